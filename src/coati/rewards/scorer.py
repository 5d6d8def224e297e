"""From the tokens of a rollout to scores: decodes the texts and asks the reward."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from itertools import compress
from typing import Any

from torch import Tensor

from coati.errors import RewardError
from coati.rewards.base import Reward, RewardRequest, is_host_work


class RewardScorer:
    """Scores finished sequences with a `Reward`.

    Args:
        reward: what to ask.
        tokenizer: decodes prompts and completions; special tokens are left out of both.
    """

    def __init__(self, reward: Reward, tokenizer: Any) -> None:
        self.reward = reward
        self.tokenizer = tokenizer

    def __call__(
        self,
        sequences: Tensor,  # [B, S] left-padded prompt, then response, S = P + A
        attention_mask: Tensor,  # [B, S]
        action_mask: Tensor,  # [B, A] True on response tokens
        columns: Mapping[str, Any] | None = None,
    ) -> Tensor:
        """Return one score per sample, [B] float32 on the device of the sequences; NaN = no score.

        See `begin` for the arguments.
        """
        return self.begin(sequences, attention_mask, action_mask, columns)()

    def begin(
        self,
        sequences: Tensor,  # [B, S]
        attention_mask: Tensor,  # [B, S]
        action_mask: Tensor,  # [B, A]
        columns: Mapping[str, Any] | None = None,
    ) -> Callable[[], Tensor]:
        """Start to score, and return what waits for the scores; it raises what the reward raised.

        Functions run beside whatever the caller does until then, and their deadlines count from here. A reward that
        may be a model is asked when its scores are wanted: it would get in the way of other models.

        `columns` are the further keys of a prompt batch, B values each. If `prompt` is among them, its texts
        are the prompts, exactly as the dataset or the chat template wrote them; else prompts are decoded.
        """
        columns = {name: _as_list(values) for name, values in (columns or {}).items()}
        for name, values in columns.items():
            if len(values) != sequences.shape[0]:
                raise RewardError(
                    f"Column {name!r} must have one value per sample ({sequences.shape[0]}), got "
                    f"{len(values)}. "
                    "Pass the columns of the batch that the sequences were generated from."
                )
        prompt_length = sequences.shape[1] - action_mask.shape[1]  # P
        prompt_mask = attention_mask[:, :prompt_length].bool()  # [B, P]
        prompts = columns.pop("prompt", None) or self.decode(sequences[:, :prompt_length], prompt_mask)
        completions = self.decode(sequences[:, prompt_length:], action_mask.bool())
        request = RewardRequest(
            prompts=prompts,
            completions=completions,
            columns=columns,
            sequences=sequences,
            attention_mask=attention_mask,
            action_mask=action_mask,
        )
        if not is_host_work(self.reward):
            return lambda: self.reward.score(request).to(sequences.device)
        scores = _Beside(lambda: self.reward.score(request), name=f"reward-{self.reward.name}")
        return lambda: scores.result().to(sequences.device)

    def decode(self, ids: Tensor, mask: Tensor) -> list[str]:
        """Decode the unmasked ids of each row; padding may be a real token, so only the mask tells."""
        rows = [list(compress(*row)) for row in zip(ids.tolist(), mask.tolist(), strict=True)]
        return [self.tokenizer.decode(row, skip_special_tokens=True) for row in rows]


class _Beside:
    """A call on a thread of its own. It must end by itself, as functions with a deadline do."""

    def __init__(self, call: Callable[[], Tensor], *, name: str) -> None:
        self._call = call
        self._scores: Tensor | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._scores = self._call()
        except BaseException as error:  # handed to the one who waits
            self._error = error

    def result(self) -> Tensor:
        """What the call returned; raises what it raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._scores is not None
        return self._scores


def _as_list(values: Any) -> list[Any]:
    return values.tolist() if isinstance(values, Tensor) else list(values)

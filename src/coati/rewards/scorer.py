"""From the tokens of a rollout to scores: decodes the texts and asks the reward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from itertools import compress
from typing import Any

from torch import Tensor

from coati.beside import beside
from coati.errors import RewardError
from coati.rewards.base import Reward, RewardRequest, is_host_work, longest_seconds

_GRACE_SECONDS = 5.0


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
        scores = beside(lambda: self.reward.score(request), name=f"reward-{self.reward.name}")
        return lambda: self._waited_for(scores).to(sequences.device)

    def _waited_for(self, scores: Future[Tensor]) -> Tensor:
        # Its own deadline, if it keeps one, has passed by then, and what it says of it is more than we could.
        seconds = longest_seconds(self.reward) + _GRACE_SECONDS
        try:
            return scores.result(timeout=seconds)
        except FutureTimeout:
            if scores.done():  # the reward's own error
                raise
            raise RewardError(
                f"The reward {self.reward.name} must score a batch within {seconds:g} s, and did not. Is it stuck?"
            ) from None

    def decode(self, ids: Tensor, mask: Tensor) -> list[str]:
        """Decode the unmasked ids of each row; padding may be a real token, so only the mask tells."""
        rows = [list(compress(*row)) for row in zip(ids.tolist(), mask.tolist(), strict=True)]
        return [self.tokenizer.decode(row, skip_special_tokens=True) for row in rows]


def _as_list(values: Any) -> list[Any]:
    return values.tolist() if isinstance(values, Tensor) else list(values)

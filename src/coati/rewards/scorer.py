"""From the tokens of a rollout to scores: decodes the texts and asks the reward."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as FutureTimeout
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn

from coati.beside import InTurn
from coati.errors import RewardError
from coati.rewards.base import Reward, RewardRequest, is_host_work, longest_seconds, models_of, reads_text

_GRACE_SECONDS = 5.0


class PendingScores:
    """The scores of one batch, on their way.

    With `in_turn` the reward is asked beside whatever its caller does, after the batches before; else when the scores
    are wanted. What it is asked is made by `request`, which may take its time, then.
    """

    def __init__(
        self, reward: Reward, request: Callable[[], RewardRequest], *, device: torch.device, in_turn: InTurn | None
    ) -> None:
        self.terms: dict[str, float] = {}
        """Mean score of each term of a weighted sum, when the scores are there."""
        self._reward, self._request, self._device, self._in_turn = reward, request, device, in_turn
        self._seconds = (
            longest_seconds(reward) + _GRACE_SECONDS
        )  # a deadline of the reward's own ends before, and says more
        self._made_at = time.monotonic()
        self._began_at: float | None = None
        self._future: Future[Tensor] | None = None
        if in_turn is not None:
            self._future = in_turn.run(lambda: self._ask({}), name=f"reward-{reward.name}")

    @property
    def is_beside(self) -> bool:
        """Whether the reward is asked beside its caller."""
        return self._future is not None

    @property
    def is_ready(self) -> bool:
        """Whether asking for the scores would not wait: they are there, or late enough to be an error."""
        return self._future is None or self._future.done() or self._seconds_left() <= 0

    def wait(self, seconds: float) -> None:
        """Wait until they are ready, but not for longer."""
        if self._future is not None:
            wait([self._future], timeout=max(0.0, min(seconds, self._seconds_left())))

    def __call__(self, ready: Mapping[nn.Module, Tensor] | None = None) -> Tensor:
        """The scores, [B] on the device of the sequences; waits for them, and raises what the reward raised.

        `ready` are scores [B] of reward models that have been asked meanwhile.
        """
        scores = self._ask(ready or {}) if self._future is None else self._waited_for(self._future)
        return scores.to(self._device)

    def _ask(self, ready: Mapping[nn.Module, Tensor]) -> Tensor:
        request = dataclasses.replace(self._request(), ready=ready)
        self._began_at = time.monotonic()
        scores = self._reward.score(request)
        self.terms = dict(getattr(self._reward, "last_terms", {}))  # before the next batch writes over them
        return scores

    def _seconds_left(self) -> float:
        """Of its own time, which counts from its own start; before that, of its time after one that is stuck."""
        until = self._made_at + 2 * self._seconds if self._began_at is None else self._began_at + self._seconds
        return until - time.monotonic()

    def _waited_for(self, scores: Future[Tensor]) -> Tensor:
        assert self._in_turn is not None
        try:
            return scores.result(timeout=max(0.0, self._seconds_left()))
        except FutureTimeout:
            if scores.done():  # the reward's own error
                raise
            raise RewardError(
                f"The reward {self._reward.name} must score a batch within {self._seconds:g} s, and did not. "
                "Is it stuck?"
            ) from None
        finally:
            self._in_turn.has_seen(scores)


class RewardScorer:
    """Scores finished sequences with a `Reward`.

    Args:
        reward: what to ask.
        tokenizer: decodes prompts and completions; special tokens are left out of both.
    """

    def __init__(self, reward: Reward, tokenizer: Any) -> None:
        self.reward = reward
        self.tokenizer = tokenizer
        self._in_turn = InTurn()

    def __getstate__(self) -> dict[str, Any]:
        """A copy has turns of its own."""
        return {**self.__dict__, "_in_turn": InTurn()}

    @property
    def models(self) -> tuple[nn.Module, ...]:
        """The models that the reward asks."""
        return models_of(self.reward)

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
    ) -> PendingScores:
        """Start to score, and return what waits for the scores; it raises what the reward raised.

        Functions run beside whatever the caller does until then. They are never called for two batches at a time: the
        second begins when the first has ended, and its deadline counts from there. A reward that may be a model is
        asked when its scores are wanted: it would get in the way of other models.

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
        prompts: list[str] | None = columns.pop("prompt", None)
        # Texts are written when the reward is asked, from tokens that are on the host by then: fetched at that time,
        # they would come behind whatever the models compute meanwhile.
        has_texts = reads_text(self.reward)
        on_host = (sequences.cpu(), attention_mask.cpu(), action_mask.cpu()) if has_texts else None

        def request() -> RewardRequest:
            texts = ([], []) if on_host is None else self._texts(*on_host, prompts)
            return RewardRequest(
                prompts=texts[0],
                completions=texts[1],
                columns=columns,
                sequences=sequences,
                attention_mask=attention_mask,
                action_mask=action_mask,
            )

        in_turn = self._in_turn if is_host_work(self.reward) else None
        return PendingScores(self.reward, request, device=sequences.device, in_turn=in_turn)

    def _texts(
        self, sequences: Tensor, attention_mask: Tensor, action_mask: Tensor, prompts: list[str] | None
    ) -> tuple[list[str], list[str]]:
        """Prompts (those that are given, if any are) and completions."""
        length = sequences.shape[1] - action_mask.shape[1]  # P
        return (
            prompts or self.decode(sequences[:, :length], attention_mask[:, :length].bool()),
            self.decode(sequences[:, length:], action_mask.bool()),
        )

    def decode(self, ids: Tensor, mask: Tensor) -> list[str]:
        """Decode the unmasked ids of each row; padding may be a real token, so only the mask tells."""
        rows = [list(compress(*row)) for row in zip(ids.tolist(), mask.tolist(), strict=True)]
        return [self.tokenizer.decode(row, skip_special_tokens=True) for row in rows]


def _as_list(values: Any) -> list[Any]:
    return values.tolist() if isinstance(values, Tensor) else list(values)

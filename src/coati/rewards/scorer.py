"""From the tokens of a rollout to scores: decodes the texts and asks the reward, again if it fails.

A reward that fails on a batch is asked again, then for each sample alone. Samples on which it fails then have no score,
and are named as failures; if it fails on all, and has never scored anything, it is the reward that is wrong.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial
from typing import Any

import torch
from torch import Tensor

from coati.background import BackgroundThread
from coati.errors import ConfigError, RewardError, RewardFailed
from coati.rewards.base import Reward, RewardRequest, WeightedSum, decode_completions, decode_prompts

logger = logging.getLogger(__name__)

_GRACE_SECONDS = 5.0


class PendingScores:
    """The scores of one batch, which may still be computed on a thread; call it to get them."""

    def __init__(self, scorer: RewardScorer, request: RewardRequest, *, may_fail: bool) -> None:
        """With `may_fail`, samples on which the reward fails are left without a score, if it scores any."""
        self.terms: dict[str, float] = {}
        """Mean score of each term of a weighted sum, when the scores are there."""
        self.failures: dict[int, str] = {}
        """Why the reward failed, by row, when the scores are there."""
        self.request = request
        self._scorer, self._reward = scorer, scorer.reward
        self._may_fail = may_fail and scorer.max_quarantined > 0
        # A reward's own deadline ends before this one and says more; the batch before may take its time too.
        num_calls = 1 + scorer.retries + self._may_fail
        self._seconds = 2 * (num_calls * self._reward.timeout_seconds + _GRACE_SECONDS)
        self._deadline = time.monotonic() + self._seconds
        self._future: Future[Tensor] | None = scorer.thread.run(self._ask) if self._reward.is_host_work else None

    @property
    def is_in_background(self) -> bool:
        """Whether they are computed on a thread, and not when they are called for."""
        return self._future is not None

    @property
    def is_ready(self) -> bool:
        """Whether calling for the scores would not wait: they are there, or overdue."""
        return self._future is None or self._future.done() or self._seconds_left() == 0

    def wait(self, seconds: float) -> None:
        """Wait until they are ready, but not for longer."""
        if self._future is not None:
            wait([self._future], timeout=min(seconds, self._seconds_left()))

    def __call__(self) -> Tensor:
        """Return the scores, [B] on the device of the sequences; raise what the reward raised."""
        if self._future is None:
            return self._ask().to(self.request.sequences.device)
        try:
            return self._future.result(timeout=self._seconds_left()).to(self.request.sequences.device)
        except FutureTimeout:
            if self._future.done():  # the reward's own error
                raise
            raise RewardError(
                f"Reward {self._reward.name!r} did not score a batch within {self._seconds:g} s."
            ) from None

    def _seconds_left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def _ask(self) -> Tensor:
        for attempt in range(self._scorer.retries + 1):
            try:
                return self._score(self.request)
            except RewardFailed as error:
                failure = error
                if attempt < self._scorer.retries:
                    logger.warning("a reward failed and is asked again: %s", error)
        return self._score_each(failure)

    def _score(self, request: RewardRequest) -> Tensor:
        self._deadline = max(self._deadline, time.monotonic() + self._reward.timeout_seconds + _GRACE_SECONDS)
        scores = self._reward.score(request)
        self._scorer.has_scored = True
        if isinstance(self._reward, WeightedSum):
            self.terms = self._reward.last_terms
        return scores

    def _score_each(self, failure: RewardFailed) -> Tensor:
        """Score the samples one by one, in the time that a batch has: what one leaves of its share is for the rest."""
        size, seconds = len(self.request), self._reward.timeout_seconds
        if not self._may_fail:
            raise failure
        scores, until = torch.full([size], torch.nan), time.monotonic() + seconds
        for row in range(size):
            sample = self.request.row(row)
            sample.timeout_seconds = max(seconds / size, (until - time.monotonic()) / (size - row))
            try:
                scores[row] = self._score(sample)[0]
            except RewardFailed as error:
                self.failures[row] = str(error)
        if len(self.failures) == size and not self._scorer.has_scored:
            raise failure
        self.terms = {}  # not of the whole batch
        return scores


class RewardScorer:
    """Scores finished sequences with a `Reward`, which is asked again `retries` times when it fails on a batch.

    The user of `begin` may leave out `max_quarantined` groups because the reward fails on a sample of theirs; 0 = a
    failure is an error. The tokenizer decodes prompts and completions, without special tokens.
    """

    def __init__(self, reward: Reward, tokenizer: Any, *, retries: int = 0, max_quarantined: int = 0) -> None:
        if not isinstance(reward, Reward):
            raise ConfigError(
                f"RewardScorer needs a coati.rewards.Reward, got a {type(reward).__name__}. Wrap a function in "
                "FunctionReward and a model in ModelReward, or subclass Reward."
            )
        self.reward = reward
        self.tokenizer = tokenizer
        self.retries, self.max_quarantined = retries, max_quarantined
        self.has_scored = False
        """Whether the reward has ever returned scores."""
        self.thread = BackgroundThread(name="rewards")

    def __call__(
        self,
        sequences: Tensor,  # [B, S] left-padded prompt, then response, S = P + A
        attention_mask: Tensor,  # [B, S]
        action_mask: Tensor,  # [B, A] True on response tokens
        columns: Mapping[str, Any] | None = None,
    ) -> Tensor:
        """Return one score per sample, [B] float32 on the device of the sequences; NaN = no score.

        See `begin` for the arguments. A reward that fails, and fails again when it is asked again, is an error.
        """
        return self.begin(sequences, attention_mask, action_mask, columns, may_fail=False)()

    def begin(
        self,
        sequences: Tensor,  # [B, S]
        attention_mask: Tensor,  # [B, S]
        action_mask: Tensor,  # [B, A]
        columns: Mapping[str, Any] | None = None,
        *,
        may_fail: bool = True,
    ) -> PendingScores:
        """Start to score, and return the pending scores.

        Unless `max_quarantined` is 0 or `may_fail` is False, look at their `failures`.

        Functions run on one thread, a batch at a time, while the caller does something else. A reward that may be a
        model is asked when its scores are called for: it would get in the way of other models.

        `columns` are the further keys of a prompt batch, B values each. If `prompt` is among them, its texts
        are the prompts, exactly as the dataset or the chat template wrote them; else prompts are decoded.
        """
        listed = {name: _as_list(values) for name, values in (columns or {}).items()}
        for name, values in listed.items():
            if len(values) != sequences.shape[0]:
                raise RewardError(
                    f"Column {name!r} must have one value per sample ({sequences.shape[0]}), got {len(values)}. "
                    "Pass the columns of the batch that the sequences were generated from."
                )
        tokens = (sequences, attention_mask, action_mask)
        if self.reward.is_host_work:  # fetched now: on the thread they would wait for what the models compute meanwhile
            tokens = (sequences.cpu(), attention_mask.cpu(), action_mask.cpu())
        request = RewardRequest(
            prompts=listed.pop("prompt", partial(decode_prompts, self.tokenizer, *tokens)),
            completions=partial(decode_completions, self.tokenizer, *tokens),
            columns=listed,
            sequences=sequences,
            attention_mask=attention_mask,
            action_mask=action_mask,
        )
        return PendingScores(self, request, may_fail=may_fail)


def _as_list(values: Any) -> list[Any]:
    return values.tolist() if isinstance(values, Tensor) else list(values)

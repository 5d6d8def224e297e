"""Scores the samples of a rollout: decodes the texts, calls the reward, and retries if it fails.

If a reward or a term of a sum fails, it is retried for the samples that it failed on, then called for each of them
alone. If it fails on all samples and has never scored any, the reward itself is wrong, which is an error.
"""

import logging
import math
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from coati.background import BackgroundThread, run_in_background
from coati.errors import ConfigError, RewardError, RewardFailed, counted
from coati.rewards.base import Reward, RewardRequest, WeightedSum, decode_completions, decode_prompts
from coati.rewards.calling import Verdict, excerpt
from coati.rewards.function import FunctionReward

logger = logging.getLogger(__name__)


class PendingScores:
    """The scores of one batch, which a thread may still be computing. Call the object to get them."""

    def __init__(self, scorer: "RewardScorer", request: RewardRequest, device: torch.device) -> None:
        """Start to score `request`; the scores are returned on `device`."""
        self.verdicts: dict[str, list[Verdict]] = {}
        """The verdicts on all samples, by name of the reward or of each term of a sum. Empty until scoring is done."""
        self.num_retries = 0
        self.request = request
        self._scorer, self._device = scorer, device
        self._future: Future[Tensor] | None = scorer.thread.run(self._score) if scorer.reward.is_host_work else None

    @property
    def is_ready(self) -> bool:
        """Whether a call would not wait: the scores are ready, or not computed on a thread."""
        return self._future is None or self._future.done()

    def wait(self, seconds: float) -> None:
        """Wait until the scores are ready, at most `seconds`."""
        if self._future is not None:
            wait([self._future], timeout=min(seconds, threading.TIMEOUT_MAX))

    def __call__(self) -> Tensor:
        """Return the scores, [B], or raise what the reward raised."""
        return (self._score() if self._future is None else self._future.result()).to(self._device)

    @property
    def terms(self) -> dict[str, Tensor]:
        """The scores of each term of a weighted sum, [B], by name; empty for other rewards."""
        is_sum = type(self._scorer.reward) is WeightedSum
        return {name: _scores(verdicts) for name, verdicts in self.verdicts.items()} if is_sum else {}

    @property
    def failures(self) -> dict[int, str]:
        """The error of a reward that failed, by row."""
        return {row: one.error for verdicts in self.verdicts.values() for row, one in enumerate(verdicts) if one.error}

    @property
    def unscored(self) -> dict[int, str]:
        """The name of a reward that returned no score without failing, by row."""
        rows = ((row, name, one) for name, verdicts in self.verdicts.items() for row, one in enumerate(verdicts))
        return {row: name for row, name, one in rows if not one.error and math.isnan(one.score)}

    def remarks(self) -> list[dict[str, Any]]:
        """Return what is recorded with each sample besides its score: the terms of a sum, and details."""
        found: list[dict[str, Any]] = [{} for _ in range(len(self.request))]
        for name, verdicts in self.verdicts.items():
            for remarks, one in zip(found, verdicts, strict=True):
                if type(self._scorer.reward) is WeightedSum:
                    remarks.setdefault("terms", {})[name] = None if math.isnan(one.score) else one.score
                if one.details:
                    remarks.setdefault("details", {})[name] = one.details
        return found

    def _score(self) -> Tensor:
        reward = self._scorer.reward
        if type(reward) is WeightedSum:
            self.verdicts = {term.name: self._verdicts_of(term) for term, _ in reward.terms}
            return reward.total(self.terms)
        self.verdicts = {reward.name: self._verdicts_of(reward)}
        return _scores(self.verdicts[reward.name])

    def _verdicts_of(self, reward: Reward) -> list[Verdict]:
        """Call one reward for all samples, retry those that it fails on, and finally call it for each of them alone."""
        request, verdicts = self.request, [Verdict()] * len(self.request)
        failed = self._evaluate(reward, list(range(len(verdicts))), verdicts)
        for _ in range(self._scorer.retries):
            if failed:
                self.num_retries += 1
                logger.warning("%s Retrying %s.", verdicts[failed[0]].error, counted(len(failed), "sample"))
                failed = self._evaluate(reward, failed, verdicts)
        if failed and not self._scorer.max_quarantined:
            raise RewardFailed(verdicts[failed[0]].error)
        if failed:
            failed = self._evaluate_each(reward, failed, verdicts)
        if failed and len(failed) == len(verdicts) and reward.name not in self._scorer.working:
            sample = f"prompt {excerpt(request.prompts[0])!r}, completion {excerpt(request.completions[0])!r}"
            raise RewardFailed(f"{verdicts[0].error} It has not scored any sample yet. First sample: {sample}.")
        return verdicts

    def _evaluate(
        self, reward: Reward, rows: list[int], verdicts: list[Verdict], timeout_seconds: float = math.inf
    ) -> list[int]:
        """Call a reward for some samples and store its verdicts; return the rows that it failed on."""
        request = self.request if len(rows) == len(self.request) else self.request.select(rows)
        request.timeout_seconds = timeout_seconds
        try:
            # A function has its own deadline; a model runs on this thread, without one.
            has_deadline = isinstance(reward, FunctionReward) and type(reward).score is FunctionReward.score
            needs_thread = reward.is_host_work and not has_deadline
            returned = _score_in_time(reward, request) if needs_thread else reward.score(request)
        except RewardFailed as error:
            returned = [Verdict(error=str(error))] * len(rows)
        if isinstance(returned, Tensor):
            returned = [Verdict(score) for score in returned.flatten().tolist()]
        if len(returned) != len(rows) or not all(isinstance(one, Verdict) for one in returned):
            kind = type(returned[0]).__name__ if len(returned) else "nothing"
            raise RewardError(
                f"Reward {reward.name!r} must return a tensor of {counted(len(rows), 'score')} or a Verdict for each "
                f"sample, got {len(returned)} of {kind}."
            )
        # In float32, where 1e300 is infinite.
        scores = _scores(returned).tolist()
        for row, verdict, score in zip(rows, returned, scores, strict=True):
            verdicts[row] = verdict._replace(score=score if math.isfinite(score) and not verdict.error else math.nan)
        failed = [row for row in rows if verdicts[row].error]
        if len(failed) < len(rows):
            self._scorer.working.add(reward.name)
        return failed

    def _evaluate_each(self, reward: Reward, rows: list[int], verdicts: list[Verdict]) -> list[int]:
        """Call a reward for samples one by one, in the time of one batch; unused time goes to the remaining samples."""
        seconds, failed = reward.timeout_seconds, list[int]()
        until = time.monotonic() + seconds
        for index, row in enumerate(rows):
            share = max(seconds / len(rows), (until - time.monotonic()) / (len(rows) - index))
            failed += self._evaluate(reward, [row], verdicts, share)
        return failed


def _score_in_time(reward: Reward, request: RewardRequest) -> Tensor | Sequence[Verdict]:
    """Call a reward on a thread of its own; RewardFailed if it does not return within its deadline."""
    call = run_in_background(lambda: reward.score(request), name=f"reward-{reward.name}")
    seconds = min(reward.timeout_seconds, request.timeout_seconds, threading.TIMEOUT_MAX)
    if not wait([call], timeout=seconds).done:
        raise RewardFailed(
            f"Reward {reward.name!r} did not score {counted(len(request), 'sample')} within {seconds:g} s. Make it "
            "faster, or raise its timeout_seconds."
        )
    return call.result()


def _scores(verdicts: Sequence[Verdict]) -> Tensor:
    return torch.tensor([verdict.score for verdict in verdicts], dtype=torch.float64).to(torch.float32)


class RewardScorer:
    """Scores finished sequences with a `Reward`, which is retried up to `retries` times if it fails on a batch.

    If `max_quarantined` is 0, a failure is an error. Otherwise the caller of `begin` may quarantine that many groups.
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
        self.working: set[str] = set()  # names of the rewards that have scored at least one sample

    @cached_property
    def thread(self) -> BackgroundThread:
        """The thread on which batches of host work are scored, one at a time."""
        return BackgroundThread(name="rewards")

    def begin(
        self,
        sequences: Tensor,  # [B, S] left-padded prompt, then response, S = P + A
        attention_mask: Tensor,  # [B, S]
        action_mask: Tensor,  # [B, A] True on response tokens
        columns: Mapping[str, Any] | None = None,
    ) -> PendingScores:
        """Start to score. Call the result for the scores, [B] float32 on the device of the sequences; NaN is no score.

        Batches of host work wait for their turn on one thread, and each call has a thread of its own, which is left
        behind if the call misses its deadline. A reward that may use a model runs when the result is called,
        so that it does not compete with other models. A column `prompt` has the texts of the prompts.
        """
        listed = {name: list(values) for name, values in (columns or {}).items()}
        device, tokens = sequences.device, (sequences, attention_mask, action_mask)
        if self.reward.is_host_work:  # copied now: on the thread, the copy would wait for the models' kernels
            tokens = (sequences.cpu(), attention_mask.cpu(), action_mask.cpu())
        request = RewardRequest(
            prompts=listed.pop("prompt", partial(decode_prompts, self.tokenizer, *tokens)),
            completions=partial(decode_completions, self.tokenizer, *tokens),
            columns=listed,
            sequences=tokens[0],
            attention_mask=tokens[1],
            action_mask=tokens[2],
        )
        return PendingScores(self, request, device)

"""From prompts to experience: choose the weights, decide when to score, and count and report the samples."""

import contextlib
import inspect
import logging
from typing import Any, TypeGuard

import torch

from coati import faults
from coati.batching import columns_of, group_ids_of, pad_prompts
from coati.config.generate import GenerateOptions
from coati.devices import device_errors_explained
from coati.errors import DataError, RewardError, counted
from coati.experience import UNKNOWN_ID, Experience, Sample
from coati.experience_maker.base import (
    MEMORY_REMEDY,
    AllSamplesDropped,
    ExperienceMaker,
    MakerBatch,
    sample_facts,
    with_ids,
)
from coati.experience_maker.naive import NaiveExperienceMaker
from coati.experience_maker.scoring import NoSignal
from coati.models.actor import unwrap
from coati.monitor.metrics import Max, Mean, Sum
from coati.monitor.timeline import Timeline, maker_metrics
from coati.rewards import RewardScorer
from coati.rewards.base import decode_completions, decode_prompts
from coati.weights.served import ServedModels

logger = logging.getLogger(__name__)

# A run fails when this many batches' worth of samples are dropped in a row. The count is in samples, because
# replacements for dropped samples come in small batches, several of which may fail in a row by chance.
MAX_EMPTY_BATCHES = 5
MIN_DROPPED_IN_A_ROW = 64
# Complete groups are scored when they reach this fraction of the largest number of samples generated at once, or after
# this many generation steps: a pass over few samples takes nearly as long as one over many, but trainers may wait.
_SCORED_FRACTION = 0.5
_MAX_STEPS_WAITED = 16
# Dynamic sampling drops by design, and may drop everything for a long time at the start of a hard task.
MAX_BATCHES_WITHOUT_SIGNAL = 100


class ExperiencePipeline:
    """Drives an experience maker: takes prompts, applies weight updates, scores complete groups, counts drops."""

    def __init__(
        self,
        maker: ExperienceMaker,
        served: ServedModels,
        *,
        generate_kwargs: dict[str, Any] | None = None,
        first_sample_id: int = 0,
        commit_between_tokens: bool = False,
        timeline: Timeline | None = None,
    ) -> None:
        """Prompts without ids are numbered from `first_sample_id`. Weight updates are committed between tokens with
        `commit_between_tokens`, otherwise only when no sample is in progress."""
        self.timeline = maker.timeline = served.timeline = timeline or Timeline()
        self.experience_maker = maker
        self.continuous_maker: NaiveExperienceMaker | None = maker if _supports_continuous_batching(maker) else None
        """The maker if it supports continuous batching; None if it makes whole batches."""
        scoring = [getattr(type(maker), name, None) for name in ("score_complete", "_score")]
        if self.continuous_maker and scoring == [NaiveExperienceMaker.score_complete, NaiveExperienceMaker._score]:
            self.continuous_maker.after_last_use = self._release_early  # other code may use the models to its end
        self.served = served
        self.num_made = 0
        self.num_dropped = 0
        self.num_quarantined = 0
        self._generate_kwargs = dict(generate_kwargs or {})
        self._next_sample_id = first_sample_id
        self._next_batch: list[Sample] = []  # the next batch for a maker of whole batches
        self.commit_between_tokens = commit_between_tokens
        self._model_use = contextlib.ExitStack()
        self._uses_models = False  # whether the models are in use, so no update may be committed
        self._max_generating = 1  # largest number of samples generated at once
        self._last_scored: MakerBatch | None = None
        self._num_steps_waited = 0  # calls of `generate_and_score` since the first unscored group completed
        self._num_dropped_in_a_row = 0
        self._num_faults_in_a_row = 0  # of those, not dropped by dynamic sampling
        self._quarantined_groups: set[int] = set()
        self._reported: dict[str, int] = {}

    @property
    def num_in_progress(self) -> int:
        """Number of samples that were added and not yet returned by `generate_and_score`."""
        maker = self.continuous_maker
        return len(self._next_batch) if maker is None else maker.num_in_progress

    def add_samples(self, samples: list[Sample]) -> None:
        """Add samples to generate responses for."""
        if samples[0].id == UNKNOWN_ID:
            samples = with_ids(samples, self._next_sample_id)
            self._next_sample_id += len(samples)
        if (maker := self.continuous_maker) is None:
            assert not self._next_batch
            self._next_batch = samples
        else:  # an engine may move the weights in memory; no update may be committed meanwhile
            with contextlib.nullcontext() if self._uses_models else self.served.use():
                maker.start_samples(samples, **self._generate_kwargs)
        self._max_generating = max(self._max_generating, len(samples) if maker is None else maker.num_generating)

    def generate_and_score(self, *, in_batches: bool = False) -> MakerBatch | None:
        """Score complete groups and return them as a batch, if it is time to; otherwise generate the next tokens.

        One or the other, so that the caller can request more samples before the scoring, and start them after it.
        With `in_batches`, everything is scored at once when all responses are complete. With `commit_between_tokens`, a
        weight update is committed here if no complete group waits for scoring, otherwise only when none is in progress.
        """
        maker, continuous = self.experience_maker, self.continuous_maker
        try:
            if self.commit_between_tokens and self.served.has_pending and continuous and not continuous.num_complete:
                self._release()  # this commits the update
            if not self._uses_models:
                maker.policy_version = self._model_use.enter_context(self.served.use())
                self._uses_models = True
            faults.reach("maker.generating")
            batch, incarnation = None, self.served.incarnation
            with device_errors_explained(f"making {self.num_in_progress} samples", MEMORY_REMEDY):
                if continuous is None:
                    samples, self._next_batch = self._next_batch, []
                    batch = make_whole_batch(maker, samples, self._generate_kwargs)
                elif continuous.num_complete and self._is_due(continuous, in_batches=in_batches):
                    batch, self._num_steps_waited = continuous.score_complete(), 0
                    self._last_scored = batch
                elif continuous.num_generating:
                    continuous.generate_tokens()
            if batch is not None:
                batch.version, batch.incarnation = maker.policy_version, incarnation
        except BaseException:
            self._release()
            raise
        if not self.num_in_progress:
            self._release()
        return batch

    def _is_due(self, continuous: NaiveExperienceMaker, *, in_batches: bool) -> bool:
        """Whether to score the complete groups now."""
        num_generating, num_complete = continuous.num_generating, continuous.num_complete
        if in_batches or not num_generating:
            return not num_generating
        self._num_steps_waited += 1
        is_overdue = self._num_steps_waited >= _MAX_STEPS_WAITED
        is_enough = num_complete >= _SCORED_FRACTION * self._max_generating or is_overdue
        # While a reward function is still busy with the last batch, collect more groups for the next one.
        is_free = self._last_scored is None or self._last_scored.is_ready
        return (is_enough and is_free) or (self.commit_between_tokens and self.served.has_pending)

    def _release_early(self) -> None:
        """Let an update be committed while a batch is being scored by other models, if it may be committed after it."""
        if self.commit_between_tokens or not self.num_in_progress:
            self._release()

    def _release(self) -> None:
        """Stop using the models, so updates can be committed."""
        self._uses_models = False
        self._model_use.close()

    def make_batch(self, samples: list[Sample]) -> MakerBatch:
        """Generate and score one batch alone. Its rewards may still be running when this returns."""
        self.add_samples(samples)
        while (batch := self.generate_and_score(in_batches=True)) is None:
            pass
        return batch

    def finish_batch(self, batch: MakerBatch) -> Experience | None:
        """Wait for the rewards of a batch and return its experience; None if all samples were dropped.

        Call it for the oldest batch first. It runs no model.
        """
        try:
            if batch.drop_error is None and self.continuous_maker is not None:
                self.continuous_maker.finalize(batch)
        except AllSamplesDropped as error:
            batch.drop_error = error
        if batch.drop_error is not None:
            batch.experience = None
        self._note_drops(batch)
        num_made = 0 if batch.experience is None else batch.experience.num_samples
        quarantined = [sample.unit for sample in batch.samples if sample.is_quarantined]
        num_dropped = len(batch.samples) - num_made - len(quarantined)
        if num_dropped < 0:
            raise DataError(
                f"{type(self.experience_maker).__name__}.make_experience returned {num_made} samples for "
                f"{len(batch.samples)} prompts. Return at most one sample per row of the batch. To sample a prompt "
                "several times, set rollout.samples_per_prompt, which repeats it in the batch."
            )
        self.num_made += num_made
        self.num_dropped += num_dropped
        self.num_quarantined += len(quarantined)
        self._quarantined_groups |= {*quarantined}
        num_groups = len(self._quarantined_groups)
        if batch.quarantined and num_groups > (limit := self.experience_maker.reward_model.max_quarantined):
            raise RewardError(
                f"the reward failed on {counted(num_groups, 'group')} of this maker, more than reward.max_quarantined "
                f"({limit}). They are listed in quarantine.jsonl. The last: {batch.quarantined[-1]['error']}"
            )
        return batch.experience

    def _note_drops(self, batch: MakerBatch) -> None:
        """Count dropped batches; raise DataError after too many in a row."""
        if (error := batch.drop_error) is None:
            self._num_dropped_in_a_row = self._num_faults_in_a_row = 0
            return
        num_samples = sum(not sample.is_quarantined for sample in batch.samples)  # quarantine has its own limit
        is_by_design = isinstance(error, NoSignal)  # valid rewards, so an earlier fault is over
        self._num_dropped_in_a_row += num_samples
        self._num_faults_in_a_row = 0 if is_by_design else self._num_faults_in_a_row + num_samples
        logger.log(logging.DEBUG if is_by_design else logging.WARNING, "a whole batch was dropped: %s", error)
        limits = {MAX_EMPTY_BATCHES: self._num_faults_in_a_row, MAX_BATCHES_WITHOUT_SIGNAL: self._num_dropped_in_a_row}
        for max_batches, count in limits.items():
            if count >= max(MIN_DROPPED_IN_A_ROW, max_batches * self._max_generating):
                raise DataError(f"{count} samples in a row had to be dropped. The last: {error}") from error

    def record(self, batch: MakerBatch, *, samples_kept: int, num_skipped: int = 0) -> dict[str, Any]:
        """Return the report of a finished batch: version, typed metrics, and `samples_kept` samples as text."""
        experience = batch.experience
        assert experience is not None
        before = self._reported
        self._reported = {
            "maker/dropped": self.num_dropped,
            "maker/quarantined": self.num_quarantined,
            "maker/skipped_prompts": num_skipped,
        }
        use = self.timeline.lap()
        make_seconds = max(1e-9, use.spent("generate", "score", "wait_rewards"))
        num_samples, scorer = experience.num_samples, self.experience_maker.reward_model
        texts = sample_texts(experience, scorer.tokenizer, samples_kept) if isinstance(scorer, RewardScorer) else []
        by_id = {sample.id: sample for sample in batch.samples}
        for text in texts:
            text |= sample_facts(by_id[text["sample_id"]]) if text["sample_id"] in by_id else {"columns": {}}
        return {
            "version": batch.version,
            "incarnation": batch.incarnation,
            "metrics": {
                "maker/samples": Sum(float(num_samples)),
                "maker/samples_per_second": Mean(num_samples / make_seconds, float(num_samples)),
                **{name: Sum(float(count - before.get(name, 0))) for name, count in self._reported.items()},
                "weights/commit_seconds": Max(self.served.last_commit_seconds),
                **maker_metrics(use),
                **batch.metrics,
            },
            "samples": texts,
        }


def sample_texts(experience: Experience, tokenizer: Any, count: int) -> list[dict[str, Any]]:
    """Return `count` samples as text, with rewards and ids, spread over the batch: samples of a prompt are adjacent."""
    count = min(count, experience.num_samples)
    rows = [index * experience.num_samples // count for index in range(count)]
    tokens = tuple(tensor[rows] for tensor in experience.tokens_and_masks())
    texts = zip(decode_prompts(tokenizer, *tokens), decode_completions(tokenizer, *tokens), strict=True)
    return [
        {
            "prompt": prompt,
            "response": response,
            "reward": float(experience.reward[row]),
            "sample_id": int(experience.sample_ids[row]) if experience.sample_ids is not None else None,
        }
        for row, (prompt, response) in zip(rows, texts, strict=True)
    ]


@torch.no_grad()
def make_whole_batch(maker: ExperienceMaker, samples: list[Sample], generate_kwargs: dict[str, Any]) -> MakerBatch:
    """Call `make_experience` for a whole batch, and fill in missing versions, and ids if no sample is missing."""
    ids = {"sample_ids": torch.tensor([sample.id for sample in samples]), "group_ids": group_ids_of(samples)}
    known: dict[str, Any] = {**ids, "columns": columns_of(samples)}
    declared = _declared_keywords(type(maker))
    known = {name: value for name, value in known.items() if name in declared}
    pad_token = GenerateOptions.parse(**generate_kwargs).pad_token(unwrap(maker.actor))
    device = next(maker.actor.parameters(), torch.empty(0)).device
    input_ids, attention_mask = (matrix.to(device) for matrix in pad_prompts(samples, pad_token=pad_token))
    try:
        experience = maker.make_experience(input_ids, attention_mask, **known, **generate_kwargs)
    except AllSamplesDropped as error:
        return MakerBatch(samples, drop_error=error)
    if experience.num_samples == len(samples):
        for name, value in ids.items():
            if getattr(experience, name) is None:
                setattr(experience, name, value)
    if experience.policy_versions is None:
        log_probs = experience.action_log_probs
        experience.policy_versions = torch.full_like(log_probs, maker.policy_version, dtype=torch.long)
    return MakerBatch(samples, experience)


def _supports_continuous_batching(maker: ExperienceMaker) -> TypeGuard[NaiveExperienceMaker]:
    """Whether the maker supports continuous batching.

    False if the most derived class that defines `start_samples` or `make_experience` defines only `make_experience`.
    """
    first = next(
        vars(owner) for owner in type(maker).__mro__ if {"start_samples", "make_experience"} & vars(owner).keys()
    )
    return "start_samples" in first


def _declared_keywords(maker_class: type) -> set[str]:
    """Return the argument names of `make_experience`, and with **kwargs those of the method that it overrides."""
    names: set[str] = set()
    for owner in maker_class.__mro__:
        if (method := vars(owner).get("make_experience")) is not None:
            parameters = inspect.signature(method).parameters
            names |= parameters.keys()
            if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
                break
    return names

"""Prompts in, experience out: one version of the weights for each batch, dropped samples, records."""

import logging
from collections.abc import Callable
from typing import Any

from coati import faults
from coati.counting import counted
from coati.errors import DataError, RewardError
from coati.experience import Experience
from coati.experience_maker.base import LESS_TO_MAKE, AllSamplesDropped, ExperienceMaker, MakerBatch, PromptBatch
from coati.experience_maker.scoring import NoSignal
from coati.experience_maker.statistics import batch_metrics, sample_texts
from coati.gpu import device_errors_explained
from coati.monitor.metrics import Max, Mean, Sum
from coati.monitor.timeline import Timeline, maker_metrics
from coati.rewards import RewardScorer
from coati.weights.served import ServedModels

logger = logging.getLogger(__name__)

# A run ends when so many batches' worth of samples are dropped in a row. Samples are counted, not batches:
# replacements for dropped samples come in small parts, several of which may fail in a row by chance.
MAX_EMPTY_BATCHES = 5
MIN_DROPPED_IN_A_ROW = 64
# Dynamic sampling drops by design, and for a long time at the start of a hard task.
MAX_BATCHES_WITHOUT_SIGNAL = 100


class ExperiencePipeline:
    """A maker, and the models that it serves from.

    The synchronous loop and the Ray actor both drive this class.
    """

    def __init__(
        self,
        maker: ExperienceMaker,
        served: ServedModels,
        *,
        generate_kwargs: dict[str, Any] | None = None,
        first_sample_id: int = 0,
        in_flight: bool = False,
        timeline: Timeline | None = None,
    ) -> None:
        """Prompts that come without ids are numbered from `first_sample_id` on. With `in_flight`, makers take new
        weights between two tokens, not only between two batches."""
        self.timeline = maker.timeline = served.timeline = timeline or Timeline()
        self.maker = maker
        self.served = served
        self.num_made = 0
        self.num_dropped = 0
        self.num_quarantined = 0
        self._generate_kwargs = dict(generate_kwargs or {})
        self._next_sample_id = first_sample_id
        self._in_flight = in_flight
        self._drops = _DropLimit()
        self._quarantined_groups: set[int] = set()
        self._reported: dict[str, int] = {}

    def begin(self, prompts: PromptBatch, *, meanwhile: Callable[[], None] | None = None) -> MakerBatch:
        """Generate, and do all else that needs the models. `meanwhile` is called between tokens."""
        if prompts.sample_ids is None:
            prompts = prompts.numbered(self._next_sample_id)
            self._next_sample_id += len(prompts)

        def between_tokens() -> int:
            faults.reach("maker.generating")
            if meanwhile is not None:
                meanwhile()
            return self.served.commit_point() if self._in_flight else version

        with self.served.use() as version:
            incarnation = self.served.incarnation
            self.maker.policy_version = version
            is_needed = meanwhile is not None or self._in_flight or faults.are_enabled()
            self.maker.between_tokens = between_tokens if is_needed else None
            try:
                with device_errors_explained(f"making {len(prompts)} samples", LESS_TO_MAKE):
                    batch = self.maker.begin(prompts, **self._generate_kwargs)
            except AllSamplesDropped as error:
                batch = MakerBatch(prompts, dropped=error)
            finally:
                self.maker.between_tokens = None
        batch.version, batch.incarnation = self.maker.policy_version, incarnation
        return batch

    def finish(self, batch: MakerBatch) -> Experience | None:
        """Complete a batch that was begun, the oldest first; waits for its rewards and needs no model.

        None if every sample had to be dropped, which is logged and counted. Too many in a row are an error.
        """
        try:
            if batch.dropped is None:
                self.maker.finish(batch)
        except AllSamplesDropped as error:
            batch.dropped = error
        if batch.dropped is not None:
            batch.experience = None
        self._drops.note(batch)
        num_made = 0 if batch.experience is None else batch.experience.num_samples
        num_dropped = len(batch.prompts) - num_made - len(batch.quarantined_ids)
        if num_dropped < 0:
            raise DataError(
                f"{type(self.maker).__name__} made {num_made} samples of {len(batch.prompts)} prompts. Return at most "
                "one for each; several samples of a prompt are several rows of the batch (rollout.samples_per_prompt)."
            )
        self.num_made += num_made
        self.num_dropped += num_dropped
        self.num_quarantined += len(batch.quarantined_ids)
        self._check_quarantine(batch)
        return batch.experience

    def _check_quarantine(self, batch: MakerBatch) -> None:
        self._quarantined_groups |= batch.quarantined_groups
        if batch.quarantined and len(self._quarantined_groups) > (limit := self.maker.reward_model.max_quarantined):
            raise RewardError(
                f"the reward failed on {counted(len(self._quarantined_groups), 'group')} of this maker, more than "
                f"reward.max_quarantined ({limit}). quarantine.jsonl has them. The last: "
                f"{batch.quarantined[-1]['error']}"
            )

    def record(self, batch: MakerBatch, *, samples_kept: int, num_skipped: int = 0) -> dict[str, Any]:
        """What to report of a finished batch: version, typed metrics, and a few samples as text.

        `num_skipped` prompts have been skipped so far.
        """
        experience = batch.experience
        assert experience is not None
        before = self._reported
        self._reported = {
            "maker/dropped": self.num_dropped,
            "maker/quarantined": self.num_quarantined,
            "maker/skipped_prompts": num_skipped,
        }
        use = self.timeline.take()
        make_seconds = max(1e-9, use.spent("generate", "score", "wait_rewards"))
        num_samples, scorer = experience.num_samples, self.maker.reward_model
        samples = sample_texts(experience, scorer.tokenizer, samples_kept) if isinstance(scorer, RewardScorer) else []
        return {
            "version": batch.version,
            "incarnation": batch.incarnation,
            "metrics": {
                **batch_metrics(experience),
                "maker/samples_per_second": Mean(num_samples / make_seconds, float(num_samples)),
                **{name: Sum(float(count - before.get(name, 0))) for name, count in self._reported.items()},
                "weights/commit_seconds": Max(self.served.last_commit_seconds),
                **maker_metrics(use),
                **batch.metrics,
            },
            "samples": [{**sample, **batch.facts_of(sample["sample_id"])} for sample in samples],
        }


class _DropLimit:
    """Ends a run in which batch after batch comes to nothing: waiting will not mend that."""

    def __init__(self) -> None:
        self._num_in_a_row = 0
        self._num_faults_in_a_row = 0
        self._largest_batch = 0

    def note(self, batch: MakerBatch) -> None:
        """Count a finished batch."""
        if (error := batch.dropped) is None:
            self._num_in_a_row = self._num_faults_in_a_row = 0
            return
        num_samples = len(batch.prompts) - len(batch.quarantined_ids)  # those have a limit of their own
        is_by_design = isinstance(error, NoSignal)  # then its rewards were valid, so an earlier fault is over
        self._num_in_a_row += num_samples
        self._num_faults_in_a_row = 0 if is_by_design else self._num_faults_in_a_row + num_samples
        self._largest_batch = max(self._largest_batch, num_samples)
        level = logging.DEBUG if is_by_design else logging.WARNING
        logger.log(level, "a whole batch was dropped: %s", error)
        for count, max_batches in (
            (self._num_faults_in_a_row, MAX_EMPTY_BATCHES),
            (self._num_in_a_row, MAX_BATCHES_WITHOUT_SIGNAL),
        ):
            if count >= max(MIN_DROPPED_IN_A_ROW, max_batches * self._largest_batch):
                raise DataError(f"{count} samples in a row had to be dropped. The last: {error}") from error

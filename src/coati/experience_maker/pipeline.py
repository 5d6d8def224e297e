"""Rollout and score: prompts in, experience out, always from one whole version of the weights."""

import dataclasses
import logging
import re
import time
from typing import Any

import torch

from coati.errors import DataError
from coati.experience_maker.base import Experience
from coati.experience_maker.dropping import DROPPED_NO_SIGNAL, AllSamplesDropped, NoSignal
from coati.experience_maker.naive import NaiveExperienceMaker
from coati.experience_maker.prompt_batch import PromptBatch
from coati.experience_maker.statistics import maker_record
from coati.ledger.admission import AdmissionGate, WorkShare
from coati.ledger.staleness import BoundSchedule
from coati.models.actor import unwrap
from coati.monitor.metrics import Max, Mean, Metric, Sum
from coati.monitor.timeline import Timeline, maker_metrics
from coati.rollout import GenerateOptions
from coati.weights import ServedModels

logger = logging.getLogger(__name__)

# Batches' worth of samples dropped one after the other, without a single good one, that end a run. Samples are
# counted and not batches: replacements for dropped samples come in parts of one, and those fail in a row by chance.
MAX_EMPTY_BATCHES = 5
MIN_DROPPED_IN_A_ROW = 64
# Dynamic sampling drops by design, and at the start of a hard task for long.
MAX_BATCHES_WITHOUT_SIGNAL = 100


@dataclasses.dataclass
class MakerCounts:
    """What has become of the samples of one maker."""

    made: int = 0
    dropped: int = 0


class ExperiencePipeline:
    """A maker, the models it serves from, and (in a bounded run) the gate that admits its prompts.

    The synchronous loop and the Ray actor both drive this class.
    """

    def __init__(
        self,
        maker: NaiveExperienceMaker,
        served: ServedModels,
        *,
        share: WorkShare | None = None,
        generate_kwargs: dict[str, Any] | None = None,
        first_sample_id: int = 0,
        in_flight: bool = False,
        timeline: Timeline | None = None,
    ) -> None:
        self.timeline = maker.timeline = served.timeline = timeline or Timeline()
        self.maker = maker
        self.served = served
        if in_flight:  # new weights are taken between two tokens, and not only between two batches
            maker.commit_point = served.commit_point
        self.gate = AdmissionGate(share) if share is not None else None
        self.bounds = BoundSchedule()
        self.counts = MakerCounts()
        self._generate_kwargs = dict(generate_kwargs or {})
        self._next_sample_id = first_sample_id
        self._num_dropped_in_a_row = 0
        self._num_without_signal_in_a_row = 0
        self._num_dropped_reported = 0
        self._num_skipped_reported = 0
        self._num_without_signal_reported = 0
        self._last_make_seconds = 0.0
        self._largest_batch = 0

    @property
    def is_done(self) -> bool:
        """Whether the gate has let through all samples of the run; never, without a gate."""
        return self.gate is not None and self.gate.is_done

    def admit(self, wanted: int) -> int:
        """Issue as many samples as may be issued now, at most `wanted`; whoever asks must make them."""
        if self.gate is None:
            return wanted
        version = self.served.version
        self._follow_bound(version)
        return self.gate.admit(wanted, version=version)

    def version_needed(self) -> int | None:
        """The version to wait for before the next sample, as far as is known now; None if there is none to wait for."""
        if self.gate is None:
            return None
        self._follow_bound(self.served.version)
        return self.gate.version_needed()

    def wait_for_admission(self, deadline_seconds: float) -> bool:
        """Wait for weights that admit one more sample; True when they serve, or when none is left to issue.

        Each new version is looked at, because it may bring another bound and with it another version to wait for.
        While work is dealt anew, nothing is admitted.
        """
        if self.gate is not None and not self.gate.wait_for_deal(deadline_seconds):
            return False
        needed, version = self.version_needed(), self.served.version
        if needed is not None and version < needed:
            # Pending weights are not enough: as long as somebody else works with the models they do not serve.
            self.served.wait_for_version(version + 1, deadline_seconds=deadline_seconds, is_committed=True)
            needed, version = self.version_needed(), self.served.version
        return needed is None or version >= needed

    def make(self, batch: PromptBatch) -> Experience | None:
        """Make experience of admitted prompts; None if every sample had to be dropped (counted, and said).

        A run in which batch after batch is dropped has a fault that waiting will not mend: an error.
        """
        sample_ids = batch.sample_ids
        if sample_ids is None:
            sample_ids = torch.arange(len(batch)) + self._next_sample_id
            self._next_sample_id += len(batch)
        started = time.perf_counter()
        with self.served.use() as version:
            self.maker.policy_version = version
            try:
                experience: Experience | None = self.maker.make_experience(
                    batch.input_ids,
                    batch.attention_mask,
                    sample_ids=sample_ids,
                    group_ids=batch.group_ids,
                    columns=batch.columns,
                    **self._generate_kwargs,
                )
            except AllSamplesDropped as error:
                experience = None
                self._tolerate(error, len(batch))
            else:
                self._num_dropped_in_a_row = self._num_without_signal_in_a_row = 0
        self._last_make_seconds = time.perf_counter() - started
        num_made = 0 if experience is None else experience.num_samples
        self.counts.made += num_made
        self.counts.dropped += len(batch) - num_made
        if self.gate is not None:
            self.gate.give_back(len(batch) - num_made)
        return experience

    def record(
        self,
        experience: Experience,
        *,
        samples_kept: int,
        prompts: Any = None,
    ) -> dict[str, Any]:
        """What there is to report of the batch just made: version, typed metrics, and a few samples as text.

        `prompts` is where they come from; if it counts what it skipped (as `PromptStream` does), that is reported.
        """
        reward = getattr(self.maker.reward_model, "reward", None)
        terms = {
            f"reward/term_{re.sub('[^a-z0-9_]', '_', name.lower())}": Mean(mean, float(experience.num_samples))
            for name, mean in getattr(reward, "last_terms", {}).items()
        }
        num_skipped = sum(getattr(prompts, "skipped", {}).values()) - self._num_skipped_reported
        self._num_skipped_reported += num_skipped
        options = GenerateOptions.parse(**self._generate_kwargs)
        num_dropped = self.counts.dropped - self._num_dropped_reported
        self._num_dropped_reported = self.counts.dropped
        num_without_signal = self.maker.dropped[DROPPED_NO_SIGNAL] - self._num_without_signal_reported
        self._num_without_signal_reported += num_without_signal
        return maker_record(
            experience,
            version=self.maker.policy_version,
            make_seconds=self._last_make_seconds,
            num_dropped=num_dropped,
            eos_token_ids=options.eos_token_ids(unwrap(self.maker.actor)),
            tokenizer=getattr(self.maker.reward_model, "tokenizer", None),
            samples_kept=samples_kept,
            extra={
                **terms,
                "weights/commit_seconds": Max(self.served.last_commit_seconds),
                "maker/skipped_prompts": Sum(num_skipped),
                **maker_metrics(self.timeline.take()),
                **self._gap_metrics(),
                **({"maker/no_signal": Sum(num_without_signal)} if self.maker.algorithm.dynamic_sampling else {}),
            },
        )

    def _gap_metrics(self) -> dict[str, Metric]:
        gap = self.maker.last_logprob_gap
        if gap is None or not gap.num_tokens:
            return {}
        return {
            "rollout/logprob_gap": Mean(gap.mean, float(gap.num_tokens)),
            "rollout/logprob_gap_max": Max(gap.largest),
        }

    def _follow_bound(self, version: int) -> None:
        """A bound that came with the weights holds from the moment they serve."""
        bound = self.bounds.at(version)
        if self.gate is not None and bound is not None:
            self.gate.limit_staleness(bound)

    def _tolerate(self, error: AllSamplesDropped, num_samples: int) -> None:
        is_by_design = isinstance(error, NoSignal)
        if is_by_design:  # its rewards were sound, so whatever was wrong before is over
            self._num_dropped_in_a_row = 0
            self._num_without_signal_in_a_row += num_samples
        else:
            self._num_dropped_in_a_row += num_samples
        self._largest_batch = max(self._largest_batch, num_samples)
        count = self._num_without_signal_in_a_row if is_by_design else self._num_dropped_in_a_row
        level = logging.DEBUG if is_by_design else logging.WARNING
        logger.log(level, "a whole batch was dropped (%d samples in a row): %s", count, error)
        max_batches = MAX_BATCHES_WITHOUT_SIGNAL if is_by_design else MAX_EMPTY_BATCHES
        if count >= max(MIN_DROPPED_IN_A_ROW, max_batches * self._largest_batch):
            raise DataError(f"{count} samples in a row had to be dropped. The last: {error}") from error

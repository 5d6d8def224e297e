"""Rollout and score: prompts in, experience out, always from one whole version of the weights."""

import dataclasses
import logging
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from coati.errors import DataError
from coati.experience import Experience
from coati.experience_maker.dropping import DROPPED_NO_SIGNAL, AllSamplesDropped, NoSignal
from coati.experience_maker.model_scores import LogprobGap
from coati.experience_maker.naive import NaiveExperienceMaker, UnfinishedExperience
from coati.experience_maker.prompt_batch import PromptBatch
from coati.experience_maker.statistics import maker_record
from coati.ledger.admission import UNBOUNDED, AdmissionGate, WorkShare
from coati.ledger.staleness import BoundSchedule
from coati.models.actor import unwrap
from coati.monitor.metrics import Max, Mean, Metric, Sum
from coati.monitor.timeline import Timeline, maker_metrics
from coati.rewards import PendingScores
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


@dataclasses.dataclass(frozen=True)
class MadeBatch:
    """Experience, and what there is to say of the batch that it comes from."""

    experience: Experience
    version: int
    make_seconds: float
    """Of the maker's own time, in which it may have waited for rewards."""
    logprob_gap: LogprobGap | None
    reward_terms: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class PendingBatch:
    """A batch that was generated, and what its models say of it; its reward functions may still run."""

    made: UnfinishedExperience | Experience | AllSamplesDropped
    """A whole experience is that of a maker that knows no unfinished ones."""
    num_samples: int
    """Before any was dropped."""
    version: int
    seconds: float
    logprob_gap: LogprobGap | None
    reward_terms: Mapping[str, float]
    """Of a reward that has ended; else they come with the scores."""

    @property
    def scores(self) -> PendingScores | None:
        """What a reward function still works at; None where nothing is waited for."""
        return self.made.scores if isinstance(self.made, UnfinishedExperience) else None

    @property
    def is_ready(self) -> bool:
        """Whether it can be finished without a wait."""
        return self.scores is None or self.scores.is_ready

    def wait(self, seconds: float) -> None:
        """Wait until it is ready, but not for longer."""
        if self.scores is not None:
            self.scores.wait(seconds)


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

    @property
    def may_defer(self) -> bool:
        """Whether the next batch may be begun before the last one is finished.

        Not on-policy: a dropped sample is given back when its batch is finished, and what takes its place must be
        issued before anything else, as it is in the synchronous loop.
        """
        if self.gate is None:
            return True
        self._follow_bound(self.served.version)
        return self.gate.share.max_staleness != 0

    @property
    def has_time_between_tokens(self) -> bool:
        """Whether the host waits for a GPU between tokens, so that it can finish the batch before meanwhile.

        Only where admission bounds the age of data: elsewhere the maker may have to wait for room when it sends, and
        what it writes meanwhile would grow old.
        """
        is_bounded = self.gate is not None and self.gate.share.max_staleness != UNBOUNDED
        if not (is_bounded and self._makes_in_parts):
            return False
        has_pauses = getattr(getattr(self.maker, "engine", None), "calls_commit_point", False)
        return has_pauses and next(self.maker.actor.parameters()).device.type == "cuda"

    def make(self, batch: PromptBatch) -> Experience | None:
        """Make experience of admitted prompts; None if every sample had to be dropped (counted, and said).

        A run in which batch after batch is dropped has a fault that waiting will not mend: an error.
        """
        made = self.finish(self.begin(batch))
        return None if made is None else made.experience

    def begin(self, batch: PromptBatch, *, meanwhile: Callable[[], None] | None = None) -> PendingBatch:
        """Generate, and do all else that needs the models. `meanwhile` is called between tokens."""
        sample_ids = batch.sample_ids
        if sample_ids is None:
            sample_ids = torch.arange(len(batch)) + self._next_sample_id
            self._next_sample_id += len(batch)
        started = time.perf_counter()
        with self.served.use() as version:
            self.maker.policy_version = version
            aside = _Timed(meanwhile)
            self.maker.meanwhile = aside if meanwhile is not None else None
            try:
                begin = self.maker.begin_experience if self._makes_in_parts else self.maker.make_experience
                made: Any = begin(
                    batch.input_ids,
                    batch.attention_mask,
                    sample_ids=sample_ids,
                    group_ids=batch.group_ids,
                    columns=batch.columns,
                    **self._generate_kwargs,
                )
            except AllSamplesDropped as error:
                made = error
            finally:
                self.maker.meanwhile = None
        reward = getattr(getattr(self.maker, "reward_model", None), "reward", None)
        return PendingBatch(
            made,
            num_samples=len(batch),
            version=self.maker.policy_version,  # of the last token, where weights came between two
            seconds=time.perf_counter() - started - aside.seconds,
            logprob_gap=getattr(self.maker, "last_logprob_gap", None),
            reward_terms=getattr(reward, "last_terms", {}),
        )

    def finish(self, pending: PendingBatch) -> MadeBatch | None:
        """Make experience of a batch that was begun, the oldest first; waits for its rewards, and needs no model."""
        started = time.perf_counter()
        experience: Experience | None = None
        try:
            made = pending.made
            if isinstance(made, AllSamplesDropped):
                raise made
            experience = self.maker.finish_experience(made) if isinstance(made, UnfinishedExperience) else made
        except AllSamplesDropped as error:
            self._tolerate(error, pending.num_samples)
        else:
            self._num_dropped_in_a_row = self._num_without_signal_in_a_row = 0
        num_made = 0 if experience is None else experience.num_samples
        self.counts.made += num_made
        self.counts.dropped += pending.num_samples - num_made
        if self.gate is not None:
            self.gate.give_back(pending.num_samples - num_made)
        if experience is None:
            return None
        return MadeBatch(
            experience,
            version=pending.version,
            make_seconds=pending.seconds + time.perf_counter() - started,
            logprob_gap=pending.logprob_gap,
            reward_terms=pending.reward_terms if pending.scores is None else pending.scores.terms,
        )

    @property
    def _makes_in_parts(self) -> bool:
        """Not a maker of one's own with a `make_experience` of its own, which makes all of it at once."""
        return getattr(type(self.maker), "make_experience", None) is NaiveExperienceMaker.make_experience

    def record(
        self,
        made: MadeBatch,
        *,
        samples_kept: int,
        prompts: Any = None,
    ) -> dict[str, Any]:
        """What there is to report of a batch: version, typed metrics, and a few samples as text.

        `prompts` is where they come from; if it counts what it skipped (as `PromptStream` does), that is reported.
        """
        terms = {
            f"reward/term_{re.sub('[^a-z0-9_]', '_', name.lower())}": Mean(mean, float(made.experience.num_samples))
            for name, mean in made.reward_terms.items()
        }
        num_skipped = sum(getattr(prompts, "skipped", {}).values()) - self._num_skipped_reported
        self._num_skipped_reported += num_skipped
        options = GenerateOptions.parse(**self._generate_kwargs)
        num_dropped = self.counts.dropped - self._num_dropped_reported
        self._num_dropped_reported = self.counts.dropped
        num_without_signal = self.maker.dropped[DROPPED_NO_SIGNAL] - self._num_without_signal_reported
        self._num_without_signal_reported += num_without_signal
        return maker_record(
            made.experience,
            version=made.version,
            make_seconds=made.make_seconds,
            num_dropped=num_dropped,
            eos_token_ids=options.eos_token_ids(unwrap(self.maker.actor)),
            tokenizer=getattr(self.maker.reward_model, "tokenizer", None),
            samples_kept=samples_kept,
            extra={
                **terms,
                "weights/commit_seconds": Max(self.served.last_commit_seconds),
                "maker/skipped_prompts": Sum(num_skipped),
                **maker_metrics(self.timeline.take()),
                **_gap_metrics(made.logprob_gap),
                **({"maker/no_signal": Sum(num_without_signal)} if self.maker.algorithm.dynamic_sampling else {}),
            },
        )

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


class _Timed:
    """Sums up the time of calls."""

    def __init__(self, call: Callable[[], None] | None) -> None:
        self.seconds = 0.0
        self._call = call

    def __call__(self) -> None:
        assert self._call is not None
        started = time.perf_counter()
        self._call()
        self.seconds += time.perf_counter() - started


def _gap_metrics(gap: LogprobGap | None) -> dict[str, Metric]:
    if gap is None or not gap.num_tokens:
        return {}
    return {
        "rollout/logprob_gap": Mean(gap.mean, float(gap.num_tokens)),
        "rollout/logprob_gap_max": Max(gap.largest),
    }

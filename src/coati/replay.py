"""Replay a run from its journal: the same samples from the same weights, trained on in the same order.

A sample's random draws are keyed on its number, and on a CPU generation is batch-invariant. So a run is determined by
its settings and its journal, which records the weights that generated and scored each sample (deliveries) and the order
of training (picks). `ReplayedRun` is a synchronous run that follows the events of the journal: it regenerates
each delivery with the recorded weights, and compares published weights with the recorded digests.
"""

import functools
import itertools
import os
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coati import build
from coati.batching import pad_items, split_experience_batch
from coati.config import RunSettings
from coati.errors import CheckpointError, ConfigError, ReplayDiffers, counted
from coati.experience import BufferItem, Experience, Sample
from coati.ledger.audit import account_of
from coati.ledger.journal import JournalContent, read_journals
from coati.ledger.rules import Event
from coati.monitor.run_log import RunLog
from coati.run_folder import resumed_settings
from coati.synchronous import SynchronousRun

_Weights = dict[str, dict[str, Tensor]]  # tensors by the label of their model and their name

_DIGITS = 8  # hexadecimal digits in the digest of one tensor


class ReplayedRun(SynchronousRun):
    """A run that follows a journal up to a version. It writes nothing to the run folder."""

    def __init__(
        self,
        config: RunSettings,
        journal: JournalContent,
        *,
        until: int | None = None,
        parts: build.Parts | None = None,
        on_version: Callable[[int, int], None],
    ) -> None:
        events, self._rules, self._on_version = journal.events, journal.rules, on_version
        made, published = ({event[kind] for event in events if kind in event} for kind in ("train", "publish"))
        newest = max(made & published, default=0)
        self.last = newest if until is None else min(until, newest)  # the version at which the replay ends
        self.num_sampled = 0
        self._ends = {event["train"]: event["samples"] for event in events if "train" in event}  # samples by version
        self._events = iter(events)
        # Number of deliveries, by version, that still need its weights.
        self._num_uses = Counter(version for event in events for version in _versions_of(event))
        self._weights: dict[int, dict[str, _Weights]] = {}  # by version and maker; "" = all other makers
        self._holders: dict[int, str] = {}  # group number -> the maker that leased it
        self._made: dict[int, list[BufferItem]] = {}  # group number -> its samples
        self._picked: deque[BufferItem] = deque()  # not yet in a batch
        super().__init__(config, RunLog(None, total_steps=0), parts=parts, rules=journal.rules)
        self._max_staleness = -1  # a tampered journal shows in the weights
        self._prompt_stream = build.make_prompts(config)
        maker: Any = self.maker.pipeline.experience_maker
        self._engine = maker.engine = _ReplayEngine(getattr(maker, "engine", None))

    def fit(self, total_steps: int, update_steps: int, train_epochs: int = 1) -> None:  # noqa: ARG002
        """Repeat the training of all versions that are to be checked."""
        if self.last:
            super().fit(self._ends[self.last] // self._config.train.batch_size, update_steps, train_epochs)

    def next_batch(self) -> Experience | None:
        """Return the next batch that the run trained on."""
        size = self._config.train.batch_size
        while len(self._picked) < size:
            self._apply(next(self._events))
        batch = [self._picked.popleft() for _ in range(size)]
        self.num_sampled += size
        return pad_items(sorted(batch, key=self._number_of))

    def publish(self) -> None:
        """Compare the next version with the journal, and keep its weights to generate samples."""
        super().publish()
        self._on_version(self.version, self.last)

    def checkpoint(self, num_fresh: int, *, was_stopped: bool = False) -> None:
        """Do nothing: a replay saves no checkpoints."""

    def _update_remote_makers(self, fully_update: bool = False, **_: Any) -> None:  # noqa: ARG002  (always full)
        """Repeat the run's events up to the publication of these weights."""
        for event in self._events:
            self._apply(event)
            if "publish" in event:
                return

    def _apply(self, event: Event) -> None:
        if "grant" in event:
            self._holders |= dict.fromkeys(event["grant"], event["maker"])
        elif "publish" in event:
            self._keep_weights(event)
        elif "deliver" in event:
            self._regenerate(event)
        for number in event.get("pick", ()):
            self._picked += self._made.pop(number)

    def _keep_weights(self, event: Event) -> None:
        """Send the weights to the maker and keep a copy. Makers that joined in mid-version may have had others."""
        version = event["publish"]
        self._published = event
        self._sender.send(version, fully_update=True)  # which calls `_note_weights`
        models = self.maker.pipeline.served.modules.items()
        copies = {label: {name: t.clone() for name, t in model.state_dict().items()} for label, model in models}
        if "makers" in event:
            self._weights.setdefault(version, {}).update(dict.fromkeys(event["makers"], copies))
        else:
            self._weights[version] = {"": copies}
        self._weights = {version: kept for version, kept in self._weights.items() if self._num_uses[version] > 0}

    def _note_weights(self, version: int, digests: Mapping[str, Mapping[str, str]], makers: Sequence[str]) -> None:  # noqa: ARG002
        actual = [(f"{label} {name}", digest) for label, model in digests.items() for name, digest in model.items()]
        text = "".join(self._published["weights"].values())
        recorded = [text[at : at + _DIGITS] for at in range(0, len(text), _DIGITS)]
        pairs = itertools.zip_longest(actual, recorded, fillvalue=("none", ""))  # the model may be another
        if differing := [(name, here, there) for (name, here), there in pairs if here != there]:
            name, here, there = differing[0]
            raise ReplayDiffers(
                f"version {version} differs in {len(differing)} of {counted(len(actual), 'weight')}. The first is "
                f"{name}: its digest is {here}, but the journal has {there}. {_conditions()}"
            )

    def _regenerate(self, delivery: Event) -> None:
        """Regenerate the groups of a delivery, in one batch per version that scored them."""
        numbers, size = delivery["deliver"], self._rules.group_size
        samples = [number * size + index for number in numbers for index in range(size)]
        maker, versions = self._holders[numbers[0]], _versions_of(delivery)
        self._engine.written_by = dict(zip(samples, delivery["written_by"], strict=True))
        self._engine.serve = serve = functools.partial(self._serve, maker)
        groups: dict[int, list[BufferItem]] = {number: [] for number in numbers}
        for version in dict.fromkeys(delivery["scored_by"]):
            scored = [number for number, by in zip(numbers, delivery["scored_by"], strict=True) if by == version]
            self._engine.scored_by = serve(version)
            drawn, _ = self._prompt_stream.batch(scored, group_size=size)
            made = self.maker.pipeline.finish_batch(self.maker.pipeline.make_batch(drawn))
            for item in [] if made is None else split_experience_batch(made):
                groups[self._number_of(item)].append(item)
        if lost := [number for number, group in groups.items() if len(group) < size]:
            raise ReplayDiffers(
                f"in the journal {maker} delivers groups {numbers} (weight versions {sorted(versions)}), but the "
                f"replay dropped {lost} of them. {_conditions()}"
            )
        self._made |= groups
        self._num_uses.subtract(versions)

    def _number_of(self, item: BufferItem) -> int:
        assert item.sample_ids is not None
        return int(item.sample_ids) // self._rules.group_size

    def _serve(self, maker: str, version: int) -> int:
        """Load the weights of a version, as this maker received them, into the models."""
        weights = self._weights[version]
        for label, module in self.maker.pipeline.served.modules.items():
            module.load_state_dict(weights.get(maker, weights[""])[label])
        return version


def _versions_of(event: Event) -> set[int]:
    """Return the versions that generated and scored the samples of a delivery; empty for other events."""
    return {*event.get("scored_by", ()), *(version for runs in event.get("written_by", ()) for version in runs[::2])}


class _ReplayEngine:
    """Makes an engine generate each sample with the weights of the original run, then loads those that scored it."""

    written_by: Mapping[int, Sequence[int]]
    """By sample: the version of the first token, then pairs of a token and the version that took over before it."""
    scored_by: int
    serve: Callable[[int], int]

    def __init__(self, engine: Any) -> None:
        """`engine` is None for a maker that generates by itself, with the weights that score."""
        self._engine = engine
        self._finished: list[Sample] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def commit(self, version: int) -> None:
        """Do nothing: the journal determines when weights change."""

    def submit(self, samples: Sequence[Sample]) -> None:
        """Generate all samples, in batches whose weights changed before the same tokens."""
        batches: dict[tuple[int, ...], list[Sample]] = {}
        for sample in samples:
            batches.setdefault(tuple(self.written_by[sample.id]), []).append(sample)
        for schedule, batch in batches.items():
            # A sample that waits for a free slot would see the weights change at other tokens.
            size = len(batch) if len(schedule) == 1 else self._engine.room
            for first in range(0, len(batch), size):
                self._generate(batch[first : first + size], *schedule)
        self.serve(self.scored_by)

    def _generate(self, samples: list[Sample], version: int, *changes: int) -> None:
        versions = dict(zip(changes[::2], changes[1::2], strict=True))
        self._engine.commit(self.serve(version))
        self._engine.submit(samples)
        end = len(self._finished) + len(samples)
        for token in itertools.count(1):
            self._finished += self._engine.advance()
            if len(self._finished) == end:
                return
            if token in versions:
                self._engine.commit(self.serve(versions[token]))

    def advance(self) -> list[Sample]:
        finished, self._finished = self._finished, []
        return finished


def _conditions() -> str:
    return (
        "A replay needs a deterministic reward, and the models, prompts, reward, settings (ledger/config-* are those "
        "before a resume changed them), processor type, number of threads, coati and torch of the run. This is torch "
        f"{torch.__version__} with {counted(torch.get_num_threads(), 'thread')}."
    )


class ReplayResult(NamedTuple):
    """The last version, identical to the run's, and the number of samples trained on to reach it."""

    version: int
    num_samples: int


def replay(
    folder: str | os.PathLike[str],
    *,
    until: int | None = None,
    parts: build.Parts | None = None,
    on_version: Callable[[int, int], None] = lambda _version, _last: None,
) -> ReplayResult:
    """Re-execute the run in a folder up to version `until`, and compare its weights with the journal.

    `parts` are the components that the run was given in addition to its settings. `on_version(version, last)` is called
    for each version that matches, from 0 on. Raises ReplayDiffers at the first difference, CheckpointError if the
    journal is missing or damaged, and ConfigError if the run is of a kind that cannot be replayed.
    """
    folder = Path(folder)
    contents = read_journals(folder)
    if len(contents) > 1 or any("resume" in event and "state" in event for event in contents[0].events):
        raise ConfigError(
            f"coati replay needs a run with one trainer from start to end, got {str(folder)!r}, which had several, or "
            "was resumed from a version that a stop had cut short."
        )
    if problems := account_of(contents).problems:
        raise CheckpointError(
            f"The journal of {str(folder)!r} is inconsistent ({problems[0]}), so the run cannot be replayed. "
            "Run `coati audit` to list all problems."
        )
    if not any(event.get("weights") for event in contents[0].events if "publish" in event):
        raise ConfigError(
            f"coati replay needs a run on the CPU, got {str(folder)!r}, whose journal has no digests of the "
            "weights: it trained on a GPU, where sums are not reproducible."
        )
    config = resumed_settings(folder, ())
    if config.rollout.engine == "vllm":
        raise ConfigError(
            f"coati replay needs a run with the native or reference engine, got {str(folder)!r} with rollout.engine = "
            '"vllm", which is not batch-invariant.'
        )
    # Evaluation does not affect training.
    changes = {"eval": (), "model": config.model.model_copy(update={"device": "cpu"})}
    config = config.model_copy(update=changes)
    run = ReplayedRun(config, contents[0], until=until, parts=parts, on_version=on_version)
    on_version(0, run.last)
    run.train()
    return ReplayResult(run.last, run.num_sampled)

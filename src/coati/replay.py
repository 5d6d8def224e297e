"""Re-executing a run from its journal: the same samples from the same weights, trained on in the same order.

A sample's draws are keyed by its number, and on a CPU its bits do not depend on its company. So a run is determined by
its settings and by what its journal says: which weights wrote and scored a sample (a delivery), and what was trained on
in which order (picks). The synchronous run does the work, along the events of the journal: it makes a delivery again
with the weights that it names, and compares weights that are published with their digests.
"""

import functools
import itertools
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coati import build
from coati.batching import pad_items, split_experience_batch
from coati.config import RunSettings
from coati.counting import counted
from coati.errors import CheckpointError, ConfigError, ReplayDiffers
from coati.experience import BufferItem, Experience, Sample
from coati.ledger.audit import account_of
from coati.ledger.journal import JournalContent, read_journals
from coati.ledger.rules import Event
from coati.monitor.run_log import RunLog
from coati.run_folder import resumed_settings
from coati.synchronous import SynchronousRun

_Weights = dict[str, dict[str, Tensor]]
"""Tensors by model and name."""

_DIGITS = 8  # of the digest of one tensor


class ReplayedRun(SynchronousRun):
    """A run that follows a journal up to a version. Nothing is written to its folder."""

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
        self.last = newest if until is None else min(until, newest)
        """The version up to which the run is followed."""
        self.num_sampled = 0
        self._events = iter(events)
        # The deliveries for which the weights of a version are still needed.
        self._num_uses = Counter(version for event in events for version in _versions_of(event))
        self._weights: dict[int, dict[str, _Weights]] = {}  # by version; those of all makers are under ""
        self._holders: dict[int, str] = {}  # makers, by the number of a group
        self._made: dict[int, list[BufferItem]] = {}  # by the number of their group
        self._picked: deque[BufferItem] = deque()  # in no batch
        super().__init__(config, RunLog(None, total_steps=0), parts=parts, rules=journal.rules)
        self._max_staleness = -1  # of a journal that was changed, the weights tell
        self._prompt_stream = build.make_prompts(config)
        maker: Any = self.maker.pipeline.experience_maker
        self._engine = maker.engine = _FollowingEngine(getattr(maker, "engine", None))

    def next_batch(self) -> Experience | None:
        """The batch that was trained on next; None if the version was ended before it was."""
        size = self._config.train.batch_size
        while len(self._picked) < size:
            event = next(self._events, {"train": 0})
            if "train" in event:
                return None
            self._follow(event)
        batch = [self._picked.popleft() for _ in range(size)]
        self.num_sampled += size
        return pad_items(sorted(batch, key=self._number_of))

    def publish(self) -> None:
        """Compare the next version with the journal, and keep it for what it wrote."""
        super().publish()
        self._on_version(self.version, self.last)

    def checkpoint(self, num_fresh: int, *, was_stopped: bool = False) -> None:
        """Save nothing."""

    def should_stop(self) -> bool:
        """Whether all is checked."""
        return self.version >= self.last

    def _update_remote_makers(self, fully_update: bool = False, **_: Any) -> None:  # noqa: ARG002  (all are kept)
        """Follow the run to where it sent these weights."""
        for event in self._events:
            self._follow(event)
            if "publish" in event:
                return

    def _follow(self, event: Event) -> None:
        """Do what the run did: grant, publish, make or pick."""
        if "grant" in event:
            self._holders |= dict.fromkeys(event["grant"], event["maker"])
        elif "publish" in event:
            self._keep_weights(event)
        elif "deliver" in event:
            self._make(event)
        for number in event.get("pick", ()):
            self._picked += self._made.pop(number)

    def _keep_weights(self, event: Event) -> None:
        """Send the weights to the maker, and keep those that it then has.

        Makers that came late may have got them in the middle of a version, which then is another one to them.
        """
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
        """Compare weights that are sent with what the journal says of them."""
        came = [(f"{label} {name}", digest) for label, model in digests.items() for name, digest in model.items()]
        text = "".join(self._published["weights"].values())
        said = [text[at : at + _DIGITS] for at in range(0, len(text), _DIGITS)]
        pairs = itertools.zip_longest(came, said, fillvalue=("none", ""))  # of another model
        if differing := [(name, here, there) for (name, here), there in pairs if here != there]:
            name, here, there = differing[0]
            raise ReplayDiffers(
                f"version {version} differs in {len(differing)} of {counted(len(came), 'weight')}. The first is "
                f"{name}: its digest is {here}, and the journal says {there}. {_conditions()}"
            )

    def _make(self, delivery: Event) -> None:
        """Make the groups of a delivery again, those together that were scored by the same weights."""
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
            made = self.maker.pipeline.complete_batch(self.maker.pipeline.make_batch(drawn))
            for item in [] if made is None else split_experience_batch(made):
                groups[self._number_of(item)].append(item)
        if lost := [number for number, group in groups.items() if len(group) < size]:
            raise ReplayDiffers(
                f"of groups {numbers}, made by {maker} with versions {sorted(versions)}, {lost} were dropped here, and "
                f"the journal says that they were delivered. {_conditions()}"
            )
        self._made |= groups
        self._num_uses.subtract(versions)

    def _number_of(self, item: BufferItem) -> int:
        assert item.sample_ids is not None
        return int(item.sample_ids) // self._rules.group_size

    def _serve(self, maker: str, version: int) -> int:
        """Give the models the weights that a maker was sent as a version."""
        weights = self._weights[version]
        for label, module in self.maker.pipeline.served.modules.items():
            module.load_state_dict(weights.get(maker, weights[""])[label])
        return version


def _versions_of(event: Event) -> set[int]:
    """Return the versions that wrote and scored what an event delivers."""
    return {*event.get("scored_by", ()), *(version for runs in event.get("written_by", ()) for version in runs[::2])}


class _FollowingEngine:
    """Has an engine write each sample with the weights that wrote it in the run; those that scored it are left."""

    written_by: Mapping[int, Sequence[int]]
    """Of each sample: the version that wrote its first token; then before which token it changed, and to what."""
    scored_by: int
    serve: Callable[[int], int]

    def __init__(self, engine: Any) -> None:
        """`engine` may be None, of a maker that generates by itself; it writes with the weights that score."""
        self._engine = engine
        self._written: list[Sample] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def commit(self, version: int) -> None:
        """Do nothing: the journal says when weights change."""

    def submit(self, samples: Sequence[Sample]) -> None:
        """Write everything, those together whose weights changed before the same tokens."""
        kinds: dict[tuple[int, ...], list[Sample]] = {}
        for sample in samples:
            kinds.setdefault(tuple(self.written_by[sample.id]), []).append(sample)
        for kind, alike in kinds.items():
            size = len(alike) if len(kind) == 1 else self._engine.room  # what waits for a place would be written later
            for first in range(0, len(alike), size):
                self._write(alike[first : first + size], *kind)
        self.serve(self.scored_by)

    def _write(self, samples: list[Sample], version: int, *changes: int) -> None:
        versions = dict(zip(changes[::2], changes[1::2], strict=True))
        self._engine.commit(self.serve(version))
        self._engine.submit(samples)
        end = len(self._written) + len(samples)
        for token in itertools.count(1):
            self._written += self._engine.advance()
            if len(self._written) == end:
                return
            if token in versions:
                self._engine.commit(self.serve(versions[token]))

    def advance(self) -> list[Sample]:
        """Return what was written."""
        written, self._written = self._written, []
        return written


def _conditions() -> str:
    return (
        "The reward must give the same text the same score each time. Models, prompts, reward, settings (files "
        "ledger/config-* are those before a resume changed them), the kind of processor, coati and torch must be those "
        "of the run, and so must the number of threads; here it is torch "
        f"{torch.__version__} with {counted(torch.get_num_threads(), 'thread')}."
    )


class ReplayResult(NamedTuple):
    """The last version that was re-executed and found to be the same, and the samples that made it."""

    version: int
    num_samples: int


def replay(
    folder: Path,
    *,
    until: int | None = None,
    parts: build.Parts | None = None,
    on_version: Callable[[int, int], None] = lambda _version, _last: None,
) -> ReplayResult:
    """Re-execute the run in a folder up to version `until`, and compare everything with its journal.

    `parts` are what the run was given besides its settings. `on_version` is called with each version that agrees, and
    with the last one. Raises ReplayDiffers at the first difference, CheckpointError if the journal is missing or
    damaged, ConfigError if the run is of a kind that cannot be replayed.
    """
    contents = read_journals(folder)
    if len(contents) > 1 or any("resume" in event and "state" in event for event in contents[0].events):
        raise ConfigError(
            f"coati replay follows runs with one trainer from start to end, got {str(folder)!r}, which has or had "
            "more, or continued from a version that a stop had ended early."
        )
    if problems := account_of(contents).problems:
        raise CheckpointError(
            f"The journal of {str(folder)!r} contradicts itself ({problems[0]}), so it cannot be followed. "
            "`coati audit` lists what is wrong."
        )
    if not any(event.get("weights") for event in contents[0].events if "publish" in event):
        raise ConfigError(
            f"coati replay follows runs on the CPU, whose journals have digests of the weights, and that of "
            f"{str(folder)!r} has none: it trained on a GPU, whose sums are not the same each time."
        )
    run = ReplayedRun(_settings(folder), contents[0], until=until, parts=parts, on_version=on_version)
    on_version(0, run.last)
    run.train()
    return ReplayResult(run.last, run.num_sampled)


def _settings(folder: Path) -> RunSettings:
    config = resumed_settings(folder, ()).model_copy(update={"eval": ()})  # which changes nothing that was trained
    if config.rollout.engine == "vllm":
        raise ConfigError(
            f'coati replay follows runs of our own engines, got {str(folder)!r} with rollout.engine = "vllm", which '
            "rounds by what it computes together."
        )
    return config.model_copy(update={"model": config.model.model_copy(update={"device": "cpu"})})

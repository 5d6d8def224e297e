"""Re-executing a run from its journal: the same samples from the same weights, trained on in the same order.

A sample's draws are keyed by its number, so a run on the CPU is determined by its settings and by what its journal
says: which groups a maker wrote together (a grant), with which weights (a delivery), and which were trained on in which
order (picks). The synchronous run does the work; its buffer follows the journal instead of deciding by itself, and its
models serve the versions that the journal names. Everything is compared with the journal's digests on the way.
"""

import contextlib
import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coati import build
from coati.config import RunSettings, load_config
from coati.config.checks import avoid_hub_without_network
from coati.counting import counted
from coati.errors import CheckpointError, ConfigError, ReplayDiffers
from coati.experience import BufferItem, Experience
from coati.experience_buffer.leased import LeasedBuffer, content_digests
from coati.experience_maker.base import PromptBatch
from coati.ledger.audit import account_of
from coati.ledger.journal import JournalContent, read_journals
from coati.ledger.rules import Event, Lease, LeaseRequest
from coati.monitor.run_log import RunLog
from coati.resume import changed_settings, resumed_settings
from coati.run_folder import earlier_settings
from coati.synchronous import SynchronousRun
from coati.weights.served import ServedModels, VerifiedUpdate

_DIGITS = 8  # of the digest of one tensor
_HARMLESS_SECTIONS = ("run", "logging", "deadlines", "topology")
_HARMLESS = ("reward.search_paths", "train.save_every", "train.checkpoints_kept")


class ReplayedBuffer(LeasedBuffer):
    """Grants, takes in and hands out what a journal says, in its order, and compares what comes with its digests."""

    def __init__(self, journal: JournalContent, sample_batch_size: int, *, until: int | None = None) -> None:
        super().__init__(journal.rules, sample_batch_size)
        self.ends: dict[int, int] = {event["train"]: event["samples"] for event in journal.events if "train" in event}
        """Samples that had been trained on when a version was made."""
        self._published = [event for event in journal.events if "publish" in event and "makers" not in event]
        newest = max(self.ends.keys() & {event["publish"] for event in self._published}, default=0)
        self.last = newest if until is None else min(until, newest)
        """The version up to which the run is followed."""
        self.wanted: Event | None = None
        """The delivery that has to be made next."""
        self.maker = ""
        """Who made it."""
        self.num_uses: Counter[int] = Counter()
        """Deliveries that the weights of a version are still needed for."""
        self.on_late_weights: Callable[[Event], None] = lambda _: None
        """Called where some makers got weights that may be those of the middle of a version."""
        picks = [number for event in journal.events for number in event.get("pick", ())]
        self._trained = set(picks[: -(-self.ends.get(self.last, 0) // self.rules.group_size)])
        self._events = deque(event for event in journal.events if self._is_followed(event))
        self._late = deque(event for event in self._events if "publish" in event)
        self._grants: dict[int, Event] = {}  # by number, the last
        self._is_leased = False  # what is wanted
        self._is_late = False  # whether weights are made for some makers only
        for event in self._events:
            self.num_uses.update({*event.get("written_by", ())[::2]})

    def _is_followed(self, event: Event) -> bool:
        kind = next(iter(event))
        if kind in ("deliver", "pick"):
            return not self._trained.isdisjoint(event[kind])
        return kind == "grant" or "makers" in event

    def _next_batch(self) -> Callable[[], Experience] | None:
        with self._lock:
            while len(self._picked) < self.sample_batch_size or self._has_late_weights():
                if self.wanted is not None or not self._events:
                    return None
                self._follow(self._events.popleft())
            return self._picked_batch()

    def _has_late_weights(self) -> bool:
        """Whether makers got the weights as they are now, before the next batch was trained on."""
        return bool(self._late) and self._late[0]["samples"] <= self.num_sampled

    def _follow(self, event: Event) -> None:
        kind = next(iter(event))
        if kind == "grant":
            self._grants |= dict.fromkeys(event["grant"], event)
        elif kind == "deliver":
            self.wanted, self._is_leased = event, False
            self.maker = self._grants[event["deliver"][0]]["maker"]
        elif kind == "pick":
            for number in event["pick"]:
                self._picked += self._delivered.pop(number)
        else:
            self._is_late = True
            self.on_late_weights(event)
            self._is_late = False
            self._late.popleft()

    def lease(self, request: LeaseRequest) -> list[Lease]:  # noqa: ARG002
        """Grant what the maker of the next delivery was granted."""
        if self.wanted is None:
            raise CheckpointError(f"The journal ends before all {self.ends[self.last]} samples that it trained on.")
        if self._is_leased:
            raise ReplayDiffers(f"{self._described()} came to nothing here, and to something in the journal.")
        self._is_leased = True
        return [Lease(number, 0) for number in self._grants[self.wanted["deliver"][0]]["grant"]]

    def extend(self, items: Sequence[BufferItem]) -> None:
        """Take in what the run was delivered; what it was not was dropped, or came too late."""
        assert self.wanted is not None
        groups: dict[int, list[BufferItem]] = {number: [] for number in self.wanted["deliver"]}
        for item in items:
            groups.get(Lease(*item.lease or ()).number, []).append(item)
        if lost := [number for number, group in groups.items() if not group]:
            raise ReplayDiffers(
                f"of {self._described()} {lost} were dropped here, and the journal says that they were delivered. "
                "Does the reward give the same text the same score each time?"
            )
        came = content_digests([item for group in groups.values() for item in group])
        for name, digest in came.items():
            if digest != self.wanted[name]:
                reward = "The reward has changed, or does not give the same text the same score each time."
                raise ReplayDiffers(
                    f"the {name} of {self._described()} has the digest {digest}, and the journal says "
                    f"{self.wanted[name]}. {reward if name == 'reward' else _conditions()}"
                )
        self._delivered |= {number: group for number, group in groups.items() if number in self._trained}
        self.num_uses.subtract({*self.wanted["written_by"][::2]})
        self.wanted = None

    def mark_trained(self, version: int) -> None:
        """Nothing is left to decide."""

    def note_weights(self, version: int, digests: Mapping[str, Mapping[str, str]], makers: Sequence[str] = ()) -> None:  # noqa: ARG002
        """Compare the weights of a version with what the journal says of them."""
        published = [event for event in self._published if event["publish"] == version]
        for event in [self._late[0]] if self._is_late else published:
            self._compare(version, digests, event["weights"])

    def _compare(self, version: int, digests: Mapping[str, Mapping[str, str]], expected: Mapping[str, str]) -> None:
        differing = []
        for label, came in digests.items():
            text = expected.get(label, "")
            said = [text[at : at + _DIGITS] for at in range(0, len(text), _DIGITS)]
            pairs = itertools.zip_longest(came.items(), said, fillvalue=("none", ""))  # of another model
            differing += [(f"{label} {name}", here, there) for (name, here), there in pairs if here != there]
        if differing:
            (name, here, there), total = differing[0], sum(map(len, digests.values()))
            raise ReplayDiffers(
                f"version {version} differs in {len(differing)} of {counted(total, 'weight')}. The first is {name}: "
                f"its digest is {here}, and the journal says {there}. {_conditions()}"
            )

    def _described(self) -> str:
        assert self.wanted is not None
        versions = ", ".join(map(str, self.wanted["written_by"][::2]))
        return f"groups {self.wanted['deliver']}, made by {self.maker} with the weights of version {versions},"


def _conditions() -> str:
    return (
        f"Models, prompts, the kind of processor, coati and torch must be those of the run, and so must the number of "
        f"threads; here it is torch {torch.__version__} with {counted(torch.get_num_threads(), 'thread')}."
    )


class ReplayedModels(ServedModels):
    """Keeps the weights of all versions that are still needed, and serves those that a delivery was made with."""

    def __init__(self, modules: Mapping[str, torch.nn.Module], **options: Any) -> None:
        super().__init__(modules, **options)
        self.num_uses: Counter[int] = Counter()
        self.makers: Sequence[str] = ()
        """Who gets the weights that come next; empty for all makers."""
        self._kept: dict[tuple[int, str], dict[tuple[str, str], Tensor]] = {}
        self._maker = ""
        self._changes: dict[int, int] = {}  # versions, by the number of the call before which they come
        self._num_calls = 0

    def offer(self, update: VerifiedUpdate) -> bool:
        """Commit the update, and keep a copy of the models if some delivery needs it."""
        is_taken = super().offer(update)
        self._kept = {key: weights for key, weights in self._kept.items() if self.num_uses[key[0]] > 0}
        if self.num_uses[self.version] > 0:
            states = {label: module.state_dict() for label, module in self.modules.items()}
            copy = {(label, name): states[label][name].clone() for label in states for name in states[label]}
            self._kept |= {(self.version, maker): copy for maker in self.makers or [""]}
        return is_taken

    def follow(self, written_by: Sequence[int], maker: str) -> None:
        """Serve these versions in the next `use`, as that maker had them."""
        self._changes = {0: written_by[0], **dict(zip(written_by[1::2], written_by[2::2], strict=True))}
        self._maker, self._num_calls = maker, 0

    @contextlib.contextmanager
    def use(self) -> Iterator[int]:
        """Work with the first version; `commit_point` changes to the others."""
        self._serve()
        yield self.version

    def commit_point(self) -> int:
        """Change to the version that the maker had after this call."""
        self._num_calls += 1
        self._serve()
        return self.version

    def _serve(self) -> None:
        version = self._changes.get(self._num_calls)
        if version is not None:
            weights = self._kept.get((version, self._maker)) or self._kept[version, ""]
            self._commit(VerifiedUpdate(version=version, tensors=weights, is_full=True))


class ReplayedRun(SynchronousRun):
    """A run that follows a journal. Nothing is written to its folder."""

    served_class = ReplayedModels
    _buffer: ReplayedBuffer

    def __init__(
        self,
        config: RunSettings,
        buffer: ReplayedBuffer,
        *,
        parts: build.Parts | None = None,
        on_version: Callable[[int, int], None],
    ) -> None:
        super().__init__(config, RunLog(None, total_steps=0), parts=parts, buffer=buffer)
        assert isinstance(self._pipeline.served, ReplayedModels)
        self._models = self._pipeline.served
        self._models.num_uses = buffer.num_uses
        self._on_version = on_version
        buffer.on_late_weights = self._send_late

    def next_batch(self) -> Experience | None:
        """The batch that was trained on next; None if the version was ended before it was."""
        return None if self._buffer.num_sampled >= self._buffer.ends[self._version + 1] else super().next_batch()

    def should_stop(self) -> bool:
        """Whether all is checked."""
        return self._version >= self._buffer.last

    def _make(self, prompts: PromptBatch) -> None:
        assert self._buffer.wanted is not None
        self._models.follow(self._buffer.wanted["written_by"], self._buffer.maker)
        super()._make(prompts)

    def _send_late(self, event: Event) -> None:
        self._models.makers = event["makers"]
        self._sender.send(event["publish"], fully_update=True)
        self._models.makers = ()

    def publish(self) -> None:
        """Compare the next version, and keep it for what it wrote."""
        super().publish()
        self._on_version(self._version, self._buffer.last)

    def checkpoint(self, num_fresh: int, *, was_stopped: bool = False) -> None:
        """Save nothing."""


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
    with the last one.

    Raises:
        ReplayDiffers: at the first difference.
        CheckpointError: when the journal is missing, damaged, or does not say enough.
        ConfigError: when the run is of a kind that cannot be replayed.
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
            f"{str(folder)!r} has none: it trained on a GPU, whose sums are not the same each time, or with an earlier "
            "version of coati."
        )
    config = _settings(folder)
    buffer = ReplayedBuffer(contents[0], config.train.batch_size, until=until)
    on_version(0, buffer.last)
    ReplayedRun(config, buffer, parts=parts, on_version=on_version).fit()
    return ReplayResult(buffer.last, buffer.num_sampled)


def _settings(folder: Path) -> RunSettings:
    config = resumed_settings(folder, ())
    avoid_hub_without_network(config)
    if config.rollout.engine == "vllm":
        raise ConfigError(
            f'coati replay follows runs of our own engines, got {str(folder)!r} with rollout.engine = "vllm", which '
            "rounds by what it computes together."
        )
    for earlier in map(load_config, earlier_settings(folder)):
        said = {key: text for key, text in changed_settings(earlier, config).items() if _matters(key, config)}
        if build.threads_per_actor(earlier) != build.threads_per_actor(config):
            said["threads"] = "topology.makers changed the number of threads"
        if said:
            raise ConfigError(
                f"coati replay needs a run with the same settings from start to end, got {str(folder)!r}, which was "
                f"resumed with others: {'; '.join(said.values())}."
            )
    changes = {
        "model": {"device": "cpu"},
        # It counts for each maker, and here one makes what all of them have made.
        "reward": {"max_quarantined": config.reward.max_quarantined * 10**6},
    }
    return config.model_copy(
        update={name: getattr(config, name).model_copy(update=values) for name, values in changes.items()}
    )


def _matters(key: str, config: RunSettings) -> bool:
    """Whether a setting decides what weights come out."""
    if key == "train.total_steps":
        return config.train.lr_schedule != "constant"
    return key not in _HARMLESS and key.partition(".")[0] not in _HARMLESS_SECTIONS

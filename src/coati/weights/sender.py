"""Sends versions of a learner's weights to makers, in chunks of bounded size.

begin_update ─ read weights ─ chunks ─► makers: stage ─┐      training continues as soon as all weights are read
               worker thread: manifest, answers ◄──────┘ verify, commit
"""

import dataclasses
import itertools
import logging
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from torch import nn

from coati import faults
from coati.background import BackgroundThread
from coati.config import Deadlines, TopologySettings
from coati.devices import device_errors_explained
from coati.errors import DeadlineExceeded, PeerDied, PeerUnavailable, RemoteError, WeightUpdateError
from coati.models.lora import LoRAConstructor
from coati.monitor.timeline import Timeline
from coati.peers import Peer, Peers, remote_error
from coati.weights.message import (
    Chunk,
    ChunkInfo,
    SharedGpuMemory,
    UpdateHeader,
    WeightManifest,
    WeightMessage,
    value_chunk,
)
from coati.wire import tensor_digest

Digests = dict[str, dict[str, str]]  # the `tensor_digest` of each trained weight, by model and name

logger = logging.getLogger(__name__)

# Maximum number of chunks in flight to each maker; four chunks of 64 MiB take 256 MiB of the object store.
MAX_CHUNKS_IN_FLIGHT = 4
_GRACE_SECONDS = 5.0
_SLICE_SECONDS = 0.5
_UPDATE = "update_experience_maker"
_MEMORY_REMEDY = (
    "Makers on the same GPU read from a second copy of the weights: give the trainer more of the GPU "
    "(topology.gpus_per_trainer), or move the makers to another GPU. Otherwise lower topology.chunk_mib."
)


@dataclasses.dataclass(eq=False)
class WeightSender:
    """Sends versions of a learner's weights, with at most one update in flight.

    `begin_update` and `publish` return once the weights have been read. Later errors are raised by `end_update` for an
    update from `begin_update`, and by `check` or the next `publish` for one from `publish`.
    """

    models: Mapping[str, nn.Module]  # sent under their labels
    strategy: Any
    recipients: "Recipients"
    settings: TopologySettings
    _: dataclasses.KW_ONLY
    timeline: Timeline
    only_trained: bool = False  # whether makers that have all weights get only those that are trained, such as adapters
    source: str = "trainer"  # unique among senders
    shared: SharedGpuMemory | None = None
    """GPU memory for makers to read from; if any maker cannot, weights are sent by value."""
    incarnation: int = 0
    on_read: Callable[[int, Digests, Sequence[str]], None] | None = None
    """Called before makers can commit an update, with its version, the digests of the trained weights, and the names of
    the makers (empty for all)."""

    def __post_init__(self) -> None:
        self.memory: SharedGpuMemory | None = None  # GPU memory that makers read updates from; None: sent by value
        self._must_probe = True  # whether to ask the makers if they can open the shared memory
        self._worker = BackgroundThread(name="weights")  # waits for answers
        self._in_flight: Future[None] | None = None
        self._published: Future[None] | None = None  # the last update from `publish` that `check` has not seen end

    def publish(self, version: int, **options: Any) -> None:
        """Wait for the previous update, raise its error if it failed, and begin a new one."""
        with self.timeline.span("wait_delivery"):
            self.wait_until_idle()
        self.check()
        self._published = self.begin_update(version, **options)

    def end_update(self, update: "Future[None]") -> None:
        """Wait until the makers have verified an update; raise its error if it failed."""
        self._wait_for_end(update).result()

    def send(self, version: int, **options: Any) -> None:
        """Send the weights as a version, and wait until the makers have verified it."""
        self.end_update(self.begin_update(version, **options))

    def wait_until_idle(self) -> None:
        """Wait until no update is in flight. Does not raise the update's error; see `check` and `end_update`."""
        if self._in_flight is not None:
            self._wait_for_end(self._in_flight)

    def check(self) -> None:
        """Raise, once, the error of a published update that has ended. Does not wait."""
        if self._published is not None and self._published.done():
            ended, self._published = self._published, None
            ended.result()

    def change_makers(self, names: Sequence[str]) -> None:
        """Replace the list of makers, from the next update on; waits for the one in flight."""
        self.wait_until_idle()
        self.recipients.change(names)
        self._must_probe = True  # a maker that could not share memory may have left

    @device_errors_explained("reading the weights to send", _MEMORY_REMEDY)
    def begin_update(
        self,
        version: int,
        *,
        fully_update: bool = False,
        only_behind: bool = False,
        on_arrival: Callable[[float, int], None] = lambda _seconds, _num_bytes: None,
        shard_size: float | None = None,
    ) -> "Future[None]":
        """Read all weights and send their chunks as a version; the worker thread sends the manifest and waits.

        First waits for the update in flight. `fully_update` sends all weights in spite of `only_trained`;
        `only_behind` sends only to makers that need all weights. `on_arrival` receives the seconds until all makers had
        verified the version, and its size in bytes.
        """
        with self.timeline.span("wait_delivery"):
            self.wait_until_idle()
        started = time.perf_counter()
        # Gathering is collective, so all ranks must agree on which weights to gather.
        is_full = not self.only_trained or fully_update
        is_full = is_full or self.strategy.any_rank(self.recipients.need_all)
        memory = self._choose_memory()
        header = UpdateHeader(
            update_id=uuid.uuid4().hex, version=version, source=self.source, incarnation=self.incarnation
        )
        calls = self.recipients.calls(only_behind=only_behind)
        calls.send(_UPDATE, message=WeightMessage(header=header, is_start=True))
        digests: Digests = {label: {} for label in self.models}
        infos = self._send_chunks(calls, header, self._chunks(memory, is_full, shard_size, digests))
        extract = LoRAConstructor.extract_lora_config
        lora = {label: extract(self.strategy.unwrap_model(model)) for label, model in self.models.items()}
        manifest = WeightManifest(chunks=tuple(infos), is_full=is_full, lora=lora)
        if self.on_read is not None and (calls.healthy or not only_behind):
            self.on_read(version, digests, calls.healthy if only_behind else ())

        def deliver() -> None:
            calls.send(_UPDATE, message=WeightMessage(header=header, manifest=manifest))
            calls.wait()
            self.recipients.record_outcome(calls, version, is_full=is_full)
            faults.reach("trainer.after_ack")
            on_arrival(time.perf_counter() - started, sum(info.nbytes for info in infos))

        self._in_flight = self._worker.run(deliver)
        return self._in_flight

    def _send_chunks(self, calls: "UpdateCalls", header: UpdateHeader, chunks: Iterator[Chunk]) -> list[ChunkInfo]:
        """Send all chunks; return their manifest entries. Reads all even without makers: gathering is collective."""
        infos: list[ChunkInfo] = []
        for chunk in chunks:
            faults.reach("weights.before_chunk", chunk.index)
            infos.append(chunk.info)
            if calls.healthy:
                message = WeightMessage(header=header, chunks=(chunk,))
                calls.send(_UPDATE, message=self.recipients.peers.share(message) if chunk.handle is None else message)
            calls.wait(until_in_flight=MAX_CHUNKS_IN_FLIGHT * len(calls.peers))
        return infos

    def _chunks(
        self, memory: SharedGpuMemory | None, is_full: bool, max_mib: float | None, digests: Digests
    ) -> Iterator[Chunk]:
        """Yield the weights of all models in chunks; with `on_read`, add the models' digests to `digests`."""
        make = value_chunk if memory is None else memory.make_chunk
        max_mib = max_mib or max(self.settings.chunk_mib, 0.0 if memory is None else memory.least_chunk_mib)
        numbers = itertools.count()
        for label, model in self.models.items():
            parameters = self.strategy.unwrap_model(model).named_parameters()
            trained = {name for name, parameter in parameters if parameter.requires_grad}
            options = {"dtype": self.strategy.compute_dtype, "names": None if is_full else trained}
            for tensors in self.strategy.get_model_state_dict_shard(model, shard_size=max_mib, **options):
                if self.on_read is not None:
                    digests[label] |= {name: tensor_digest(t) for name, t in tensors.items() if name in trained}
                yield make(next(numbers), label, tensors)

    def _choose_memory(self) -> SharedGpuMemory | None:
        """Return the shared memory if all makers can open it; ask them again only if one may be new."""
        if self._must_probe or self.recipients.need_all:  # a new maker may run on another GPU
            self._must_probe, self.memory = False, None
            try:
                if self.shared is not None and self.recipients.all_can_open(self.shared.probe()):
                    self.memory = self.shared
            except RuntimeError as error:
                logger.warning("sending weights by value: %s", error)
        return self.memory

    def _wait_for_end(self, update: "Future[None]") -> "Future[None]":
        """Wait for an update to end, successfully or not; the worker thread enforces its own, shorter deadline."""
        seconds = self.recipients.update_seconds + _GRACE_SECONDS
        try:
            update.exception(seconds)
        except TimeoutError:
            raise DeadlineExceeded(f"waited {seconds:g} s for the makers to verify the last weight update.") from None
        return update


@dataclasses.dataclass(eq=False)
class _Maker:
    behind: str | None = None  # why its next update must hold all weights; None if it is up to date
    late: "Future[Any] | None" = None
    """A call that missed its deadline. The maker gets no new calls until it has answered this one."""
    is_abandoned: bool = False  # whether the calls in flight, or else the next ones, do not wait for it


class Recipients:
    """The makers by name. One that died, is late or has joined misses an update, and gets all weights in the next."""

    def __init__(self, peers: Peers, names: Sequence[str], deadlines: Deadlines) -> None:
        self.peers = peers
        self.update_seconds = deadlines.update_seconds
        self._start_seconds = deadlines.start_seconds  # time for the first makers to appear; 0 once they have
        self._makers = {name: _Maker() for name in names}

    @property
    def need_all(self) -> bool:
        """Whether any maker that can be called now needs all weights."""
        makers = list(self._makers.items())  # a copy: another thread may change the dict
        return any(maker.behind is not None and self._find(name, maker) is not None for name, maker in makers)

    def change(self, names: Sequence[str]) -> None:
        """Replace the list of makers, from the next update on; must not be called during one."""
        before = self._makers
        for name in before.keys() - set(names):
            self.peers.forget(name)
        self._makers = {name: before.get(name) or _Maker(behind="it joined") for name in names}

    def abandon(self, name: str) -> None:
        """Stop waiting for a maker that does not respond, in the update in flight or else in the next one."""
        if (maker := self._makers.get(name)) is not None:
            maker.is_abandoned = True

    def calls(self, *, only_behind: bool = False) -> "UpdateCalls":
        """Create the calls of an update to all makers that can be called now, or only to those that need all weights.

        The first time, wait up to `deadlines.start_seconds` for each initial maker to appear.
        """
        found: dict[str, Peer] = {}
        for name, maker in self._makers.items():
            if only_behind and maker.behind is None:
                continue
            if self._start_seconds and maker.behind is None:
                found[name] = self.peers.find(name, role="maker", timeout=self._start_seconds)
            elif (peer := self._find(name, maker)) is not None:
                found[name] = peer
            else:
                maker.behind = maker.behind or "it could not be called"
        if not only_behind:
            self._start_seconds = 0.0
        return UpdateCalls(found, self._makers, seconds=self.update_seconds)

    def all_can_open(self, probe: Chunk) -> bool:
        """Whether all makers that answer can read the sender's memory; False if none answers. Logs the reasons."""
        calls = self.calls()
        calls.send("sharing_fault", probe)
        calls.wait()
        reasons = dict(calls.answers)  # why each maker cannot; None if it can
        for name, error in calls.failed.items():
            if isinstance(error, RemoteError):
                reasons[name] = str(error)
            else:  # this maker will miss the update too, so it does not matter
                logger.warning("could not ask maker %s whether it can share GPU memory: %s", name, error)
        for name, reason in reasons.items():
            if reason is not None:
                logger.warning("sending weights by value, because maker %s cannot share GPU memory: %s", name, reason)
        return bool(reasons) and all(reason is None for reason in reasons.values())

    def record_outcome(self, calls: "UpdateCalls", version: int, *, is_full: bool) -> None:
        """Record each maker's outcome; WeightUpdateError, which ends the run, if an up-to-date maker rejected it."""
        rejected = []
        for name in calls.peers:
            maker, error = self._makers[name], calls.failed.get(name)
            if error is None:
                maker.behind = None if is_full else maker.behind
                continue
            reason = str(error.cause if isinstance(error, RemoteError) else error).strip()
            if isinstance(error, PeerDied):
                self.peers.forget(name)  # a successor may take its name
            if isinstance(error, RemoteError) and maker.behind is None:
                rejected.append(f"maker {name}: {reason}")
            else:
                level = logging.INFO if isinstance(error, PeerDied) else logging.ERROR  # deaths are reported elsewhere
                logger.log(level, "maker %s missed the weights of version %d: %s", name, version, reason)
            maker.behind = reason
        if rejected:
            raise WeightUpdateError(f"weights of version {version} were rejected. {'; '.join(rejected)}")

    def _find(self, name: str, maker: _Maker) -> Peer | None:
        """Return the maker's peer if it exists and has answered its late call, if any; else None."""
        is_late = (call := maker.late) is not None and not call.done()  # another thread may set `late`
        return None if is_late else self.peers.find_now(name)


class UpdateCalls:
    """The calls of one update to its makers, and their outcomes."""

    def __init__(self, peers: Mapping[str, Peer], makers: Mapping[str, _Maker], *, seconds: float) -> None:
        self.peers = peers
        self.answers: dict[str, Any] = {}  # the last answer of each maker that answered
        self.failed: dict[str, PeerDied | PeerUnavailable | RemoteError | DeadlineExceeded] = {}
        self._makers = makers
        self._abandoned = {name for name in peers if self._is_abandoned(name)}
        self._seconds = seconds
        self._end = time.monotonic() + seconds
        self._calls: dict[Future[Any], str] = {}

    @property
    def healthy(self) -> list[str]:
        """Makers that have not failed so far; the others cannot complete the update."""
        return [name for name in self.peers if name not in self.failed]

    def send(self, method: str, *args: Any, **kwargs: Any) -> None:
        """Call a method of all healthy makers."""
        for name in self.healthy:
            try:
                self._calls[self.peers[name].call(method, *args, **kwargs)] = name
            except (AttributeError, TypeError) as error:  # Ray checks a call against the actor's class
                self.failed[name] = remote_error(name, error)

    def wait(self, *, until_in_flight: int = 0) -> None:
        """Wait until at most `until_in_flight` calls are open, or the update's deadline has passed.

        Makers that are late or abandoned count as failed, and are not waited for.
        """
        while len(self._calls) > until_in_flight:
            left = self._end - time.monotonic()
            done = wait(self._calls, max(0.0, min(_SLICE_SECONDS, left)), FIRST_COMPLETED).done
            for call in [call for call in self._calls if call in done]:  # in call order: a maker's first error counts
                name = self._calls.pop(call)
                try:
                    self.answers[name] = call.result(0.0)
                except RemoteError as error:
                    self.failed.setdefault(name, error)
                except (PeerDied, PeerUnavailable) as error:
                    self.failed[name] = error  # overrides a rejection, which the lost call may have caused
            self._abandoned |= {name for name in self._calls.values() if self._is_abandoned(name)}
            for call, name in list(self._calls.items()):
                if left <= 0 or name in self._abandoned:
                    reason = f"it did not answer within {self._seconds:g} s" if left <= 0 else "it does not respond"
                    self.failed.setdefault(name, DeadlineExceeded(reason))
                    self._makers[name].late = call
                    del self._calls[call]

    def _is_abandoned(self, name: str) -> bool:
        """Whether a maker was abandoned; resets the flag, so that the next update tries the maker again."""
        was_abandoned, self._makers[name].is_abandoned = self._makers[name].is_abandoned, False
        return was_abandoned

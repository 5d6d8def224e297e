"""Sends versions of a learner's weights to makers, in chunks of bounded size.

begin_update ─ read weights ─ chunks ─► makers: stage ─┐      the learner trains on as soon as all weights are read
               worker thread: manifest, answers ◄──────┘ verify, commit
"""

import itertools
import logging
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from torch import nn

from coati import faults
from coati.background import BackgroundThread
from coati.config import TopologySettings
from coati.errors import DeadlineExceeded
from coati.gpu import device_errors_explained
from coati.models.lora import LoRAConstructor
from coati.monitor.timeline import Timeline
from coati.weights.message import (
    CardMemory,
    Chunk,
    ChunkInfo,
    UpdateHeader,
    WeightManifest,
    WeightMessage,
    value_chunk,
)
from coati.weights.recipients import Recipients, UpdateCalls
from coati.wire import tensor_digest

Digests = dict[str, dict[str, str]]
"""The `tensor_digest` of each trained weight, by model and name."""

logger = logging.getLogger(__name__)

# Chunks by value that may be on their way at once; with 64 MiB chunks a quarter of a GiB of the object store.
MAX_CHUNKS_IN_FLIGHT = 4
_GRACE_SECONDS = 5.0
_UPDATE = "update_experience_maker"
_NO_ROOM = (
    "Makers on the same card copy the weights from a second copy: give the trainer more of the GPU "
    "(topology.gpus_per_trainer), or the makers another card. Elsewhere a lower topology.chunk_mib needs less."
)


class WeightSender:
    """Sends versions of a learner's weights, one after the other; never more than one update is under way.

    `begin_update` and `publish` return when the weights are read, which must not change meanwhile. What goes wrong
    later, `end_update` raises after `begin_update`, and `check` or the next `publish` after `publish`.
    """

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        strategy: Any,
        recipients: Recipients,
        settings: TopologySettings,
        *,
        timeline: Timeline,
        source: str = "trainer",
        shared: CardMemory | None = None,
        incarnation: int = 0,
        on_read: Callable[[int, Digests, Sequence[str]], None] | None = None,
    ) -> None:
        """`models` are sent under their labels, as the `Strategy` holds them.

        `source` is a name that no other sender has. `shared` is the memory that makers may be able to open; if not all
        can, weights travel by value. `incarnation` counts how often the trainers were started again. `on_read` is
        called before makers can commit an update, with its version, the digests of the trained weights, and the makers
        if it is not for all.
        """
        self.recipients = recipients
        self._models = models
        self._strategy = strategy
        self._settings = settings
        self._timeline = timeline
        self._source = source
        self._shared = shared
        self._incarnation = incarnation
        self._on_read = on_read
        self.memory: CardMemory | None = None  # what updates are lent in; None: they travel by value
        self._must_probe = True  # the makers have not been asked yet
        self._worker = BackgroundThread(name="weights")  # waits for answers
        self._under_way: Future[None] | None = None
        self._published: Future[None] | None = None  # the last one from `publish` that `check` has not raised

    def publish(self, version: int, **options: Any) -> None:
        """Begin an update after the one before it has ended, and raise what `check` raises of that one."""
        with self._timeline.span("wait_delivery"):
            self.settle()
        self.check()
        self._published = self.begin_update(version, **options)

    def end_update(self, update: "Future[None]") -> None:
        """Wait until the makers have verified an update; raise what is wrong with it."""
        self._ended(update).result()

    def send(self, version: int, **options: Any) -> None:
        """Send the weights as a version and wait until the makers have verified it."""
        self.end_update(self.begin_update(version, **options))

    def settle(self) -> None:
        """Wait until no update is under way. What went wrong is left for `check`."""
        if self._under_way is not None:
            self._ended(self._under_way)

    def check(self) -> None:
        """Raise what went wrong with an update that was published and has ended, once. Waits for nothing."""
        if self._published is not None and self._published.done():
            ended, self._published = self._published, None
            ended.result()

    def change_makers(self, names: Sequence[str]) -> None:
        """Update other makers from the next update on."""
        self.settle()
        self.recipients.change(names)
        self._must_probe = True  # one that could not share memory may have left

    @device_errors_explained("reading the weights to send", _NO_ROOM)
    def begin_update(
        self,
        version: int,
        *,
        fully_update: bool = False,
        only_behind: bool = False,
        on_arrival: Callable[[float, int], None] = lambda _seconds, _num_bytes: None,
        shard_size: float | None = None,
    ) -> "Future[None]":
        """Read all weights and send their chunks as a version; the rest happens in the worker thread.

        `fully_update` sends all weights even if makers usually get adapters only; with `only_behind` they go to those
        makers that need all, because they joined or missed an update. `on_arrival` gets the seconds until
        the makers had the version, and its bytes. `shard_size` is the size of a chunk in MiB.
        """
        with self._timeline.span("wait_delivery"):
            self.settle()
        started = time.perf_counter()
        # Ranks gather weights together, so they must agree on which.
        is_full = not self._settings.update_lora_weights or fully_update
        is_full = is_full or self._strategy.any_rank(self.recipients.need_all)
        memory = self._choose_memory()
        header = UpdateHeader(
            update_id=uuid.uuid4().hex, version=version, source=self._source, incarnation=self._incarnation
        )
        calls = self.recipients.calls(only_behind=only_behind)
        calls.send(_UPDATE, message=WeightMessage(header=header, is_start=True))
        digests: Digests = {label: {} for label in self._models}
        infos = self._send_chunks(calls, header, self._chunks(memory, is_full, shard_size, digests))
        manifest = self._manifest(infos, is_full)
        if self._on_read is not None and (calls.healthy or not only_behind):
            self._on_read(version, digests, calls.healthy if only_behind else ())

        def deliver() -> None:
            calls.send(_UPDATE, message=WeightMessage(header=header, manifest=manifest))
            calls.wait()
            self.recipients.note(calls, version, is_full=is_full)
            faults.reach("trainer.after_ack")
            on_arrival(time.perf_counter() - started, sum(info.nbytes for info in infos))

        self._under_way = self._worker.run(deliver)
        return self._under_way

    def _manifest(self, infos: Sequence[ChunkInfo], is_full: bool) -> WeightManifest:
        models = {label: self._strategy.unwrap_model(model) for label, model in self._models.items()}
        return WeightManifest(
            chunks=tuple(infos),
            is_full=is_full,
            lora={label: LoRAConstructor.extract_lora_config(model) for label, model in models.items()},
        )

    def _send_chunks(self, calls: UpdateCalls, header: UpdateHeader, chunks: Iterator[Chunk]) -> list[ChunkInfo]:
        """Send all chunks; returns what the manifest lists.

        Without makers the weights are still read, because ranks gather them together.
        """
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
        self, memory: CardMemory | None, is_full: bool, max_mib: float | None, digests: Digests
    ) -> Iterator[Chunk]:
        """The weights of all models, in chunks; adds to the models' `digests`, if they are wanted."""
        make = value_chunk if memory is None else memory.make_chunk
        max_mib = max_mib or max(self._settings.chunk_mib, 0.0 if memory is None else memory.least_chunk_mib)
        numbers = itertools.count()
        for label, model in self._models.items():
            parameters = self._strategy.unwrap_model(model).named_parameters()
            trained = {name for name, parameter in parameters if parameter.requires_grad}
            options = {"dtype": self._strategy.compute_dtype, "names": None if is_full else trained}
            for tensors in self._strategy.get_model_state_dict_shard(model, shard_size=max_mib, **options):
                if self._on_read is not None:
                    digests[label] |= {name: tensor_digest(t) for name, t in tensors.items() if name in trained}
                yield make(next(numbers), label, tensors)

    def _choose_memory(self) -> CardMemory | None:
        """Ask makers whether they can open the shared memory, if there are any that have not been asked."""
        if self._must_probe or self.recipients.need_all:  # newcomers may sit elsewhere
            self._must_probe = False
            try:
                can_share = self._shared is not None and self.recipients.all_can_open(self._shared.probe())
            except RuntimeError as error:
                logger.warning("sending weights by value: %s", error)
                can_share = False
            self.memory = self._shared if can_share else None
        return self.memory

    def _ended(self, update: "Future[None]") -> "Future[None]":
        """Wait for an update in the worker thread, which keeps to its deadline itself."""
        seconds = self.recipients.update_seconds + _GRACE_SECONDS
        try:
            update.exception(seconds)
        except TimeoutError:
            raise DeadlineExceeded(
                f"waited {seconds:g} s for the makers to verify the last update of weights."
            ) from None
        return update

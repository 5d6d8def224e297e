"""Sends versions of a learner's weights to makers, in chunks of bounded size.

start ─ read weights ─ chunks ─► makers: stage ─┐         the learner trains on as soon as all weights are read
        worker thread: manifest, answers ◄──────┘ verify, commit
"""

import contextlib
import dataclasses
import functools
import logging
import os
import queue
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, get_args

import torch
from torch import Tensor, nn

from coati.background import BackgroundThread
from coati.errors import ConfigError, DeadlineExceeded, PeerUnavailable
from coati.models.lora import LoRAConstructor
from coati.monitor.timeline import WEIGHTS, Timeline
from coati.weights.canary import make_canary
from coati.weights.card_memory import CardMemory
from coati.weights.host_memory import HostMemory
from coati.weights.message import Chunk, ChunkInfo, UpdateHeader, VerifyUpdates, WeightManifest
from coati.weights.recipients import Attempt, Recipients
from coati.weights.transports import ByValue, SharedTransport, Transport

logger = logging.getLogger(__name__)

# Bytes of one chunk, unless a single tensor is larger.
DEFAULT_CHUNK_MIB = 64.0
# Chunks by value that may be on their way at once; with 64 MiB chunks a quarter of a GiB of the object store.
MAX_CHUNKS_IN_FLIGHT = 4
# Lent chunks are a few hundred bytes each, and a call costs both sides about a millisecond of processor time, which is
# the time to copy 16 MiB. So some travel together; not all, because makers check them while the sender copies the next.
LENT_BYTES_PER_CALL = 256 * 2**20
# For the worker thread, which keeps to the deadline of an update itself.
_GRACE_SECONDS = 5.0


class WeightSender:
    """Sends versions of a learner's weights, one after the other; never more than one update is under way.

    `start` returns when the weights are read, which must not change meanwhile; `check` raises what went wrong with it
    later. `send` waits until the makers have verified the update, and raises what is wrong with it.
    """

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        strategy: Any,
        recipients: Recipients,
        *,
        timeline: Timeline,
        shared: SharedTransport | None = None,
        adapters_only: bool = False,
        verify_updates: VerifyUpdates = "checksum",
        chunk_mib: float = DEFAULT_CHUNK_MIB,
    ) -> None:
        """`models` are sent under their labels, as the `Strategy` holds them.

        `shared` is the memory that makers may be able to open; if not all can, weights travel by value.
        """
        if verify_updates not in get_args(VerifyUpdates):
            raise ConfigError(f'verify_updates must be "checksum", "canary" or "off", got {verify_updates!r}.')
        self.recipients = recipients
        self._models = models
        self._strategy = strategy
        self._timeline = timeline
        self._shared = shared
        self.transport: Transport | None = None  # None: ask the makers which one they can use
        self._adapters_only = adapters_only
        self._verify = verify_updates
        self._chunk_mib = chunk_mib
        self._source = f"trainer {os.environ.get('RANK', '0')} ({socket.gethostname()}, {uuid.uuid4().hex[:8]})"
        self._last_version: int | None = None
        self._worker = BackgroundThread(name="weights")  # hashes chunks, then waits for answers
        self._under_way: Future[None] | None = None
        self._failures: queue.SimpleQueue[BaseException] = queue.SimpleQueue()  # of updates from `start`

    def start(self, version: int, **options: Any) -> None:
        """Read the weights and send them as a version; see `_begin` for the options. Raises as `check` does."""
        with self._timeline.span("wait_delivery"):
            self.settle()
        self.check()
        self._begin(version, on_failure=self._failures.put, **options)

    def send(self, version: int, **options: Any) -> None:
        """Send the weights as a version and wait until the makers have verified it."""
        with self._timeline.span("wait_delivery"):
            self.settle()
        update = self._begin(version, on_failure=lambda _: None, **options)
        _wait(update, self._timeout_seconds)
        update.result(0)

    def settle(self) -> None:
        """Wait until no update is under way. What went wrong is left for `check`."""
        if self._under_way is not None:
            _wait(self._under_way, self._timeout_seconds)

    def check(self) -> None:
        """Raise what went wrong with an update that was started and has ended, once. Waits for nothing."""
        with contextlib.suppress(queue.Empty):
            raise self._failures.get_nowait()

    def change_makers(self, names: Sequence[str], *, newcomers: Sequence[str] = ()) -> None:
        """Update other makers from the next update on."""
        self.settle()
        self.recipients.change(names, newcomers=newcomers)
        self.transport = None  # newcomers may sit elsewhere

    def _begin(
        self,
        version: int,
        *,
        on_failure: Callable[[BaseException], None],
        fully_update: bool = False,
        on_arrival: Callable[[float, int], None] = lambda _seconds, _num_bytes: None,
        shard_size: float | None = None,
    ) -> "Future[None]":
        """Read all weights and send their chunks; the rest happens in the worker thread.

        `fully_update` sends all weights even if makers usually get adapters only. `on_arrival` gets the seconds until
        the makers had the version, and its bytes. `shard_size` is the size of a chunk in MiB.
        """
        started = time.perf_counter()
        is_full = not self._adapters_only or fully_update or self._any_rank_has_newcomers()
        transport = self._choose_transport()
        header = UpdateHeader(
            update_id=uuid.uuid4().hex,
            version=version,
            source=self._source,
            follows=self._last_version,
            is_sync=fully_update,
            lender=transport.begin(),
        )
        self._last_version = version
        attempt = self.recipients.attempt(header)
        with _retired_on_failure(transport):
            attempt.send(is_start=True)
            if header.lender is not None:
                attempt.wait()  # until no maker reads what the first chunk overwrites
            transport.lend_to(attempt.healthy)
            mib = shard_size or max(self._chunk_mib, transport.least_chunk_mib)
            chunks, rest = self._send_chunks(attempt, transport, self._shards(is_full, mib))
        models = {label: self._strategy.unwrap_model(model) for label, model in self._models.items()}
        has_canary = self._verify == "canary"
        manifest = WeightManifest(
            chunks=chunks,
            is_partial=not is_full,
            lora={label: LoRAConstructor.extract_lora_config(model) for label, model in models.items()},
            canary=make_canary(models["actor"], device=self._strategy.device) if has_canary else None,
        )

        def deliver() -> None:
            try:
                with _retired_on_failure(transport), self._timeline.span("deliver", WEIGHTS, version=version):
                    self._finish(attempt, transport, manifest, rest)
            except BaseException as error:
                on_failure(error)
                raise
            on_arrival(time.perf_counter() - started, sum(info.nbytes for info in chunks))

        self._under_way = self._worker.run(deliver)
        return self._under_way

    def _send_chunks(
        self, attempt: Attempt, transport: Transport, shards: Iterator[tuple[str, Mapping[str, Tensor]]]
    ) -> tuple[tuple[ChunkInfo, ...], Sequence[Chunk]]:
        """Read all shards and send them, but for the last lent chunks, which may travel with the manifest.

        Without makers the weights are still read, because ranks gather them together.
        """
        infos: list[ChunkInfo] = []
        lent: list[Chunk] = []
        for chunk in self._hashed(transport, shards):
            infos.append(chunk.info)
            if chunk.handle is None:
                attempt.send(chunks=(chunk,), share=self.recipients.peers.share)
            else:
                lent.append(chunk)
                if sum(one.info.nbytes for one in lent) >= LENT_BYTES_PER_CALL:
                    attempt.send(chunks=tuple(lent))
                    lent = []
            attempt.wait(until_in_flight=MAX_CHUNKS_IN_FLIGHT * len(attempt.peers))
        return tuple(infos), lent

    def _hashed(self, transport: Transport, shards: Iterator[tuple[str, Mapping[str, Tensor]]]) -> Iterator[Chunk]:
        """Chunks with their checksums. Each is hashed in the worker thread while the next is packed: both take about as
        long, and neither holds the interpreter's lock."""
        waiting: tuple[Chunk, Future[int]] | None = None
        for index, (module, tensors) in enumerate(shards):
            chunk = transport.pack(index, module, tensors)
            if self._verify == "off":
                yield chunk
                continue
            hashing = self._worker.run(functools.partial(transport.checksum, chunk))
            if waiting is not None:
                yield _with_checksum(*waiting, self._timeout_seconds)
            waiting = (chunk, hashing)
        if waiting is not None:
            yield _with_checksum(*waiting, self._timeout_seconds)

    def _finish(self, attempt: Attempt, transport: Transport, manifest: WeightManifest, rest: Sequence[Chunk]) -> None:
        """Send the manifest, wait for all answers, and note what came of it."""
        attempt.send(chunks=tuple(rest), manifest=manifest)
        attempt.wait()
        if any(isinstance(error, PeerUnavailable | DeadlineExceeded) for error in attempt.failed.values()):
            transport.retire()  # a maker that did not answer may still read it
        self.recipients.note(attempt)

    def _shards(self, is_full: bool, max_mib: float) -> Iterator[tuple[str, Mapping[str, Tensor]]]:
        """The weights of all models in chunks of bounded size."""
        for label, model in self._models.items():
            parameters = self._strategy.unwrap_model(model).named_parameters()
            names = None if is_full else {name for name, parameter in parameters if parameter.requires_grad}
            options = {"shard_size": max_mib, "dtype": self._strategy.compute_dtype, "names": names}
            for shard in self._strategy.get_model_state_dict_shard(model, **options):
                yield label, shard

    def _choose_transport(self) -> Transport:
        if self.transport is None or self.recipients.has_newcomers:
            self.transport = self._shared if self._shared is not None and self._all_share(self._shared) else ByValue()
        return self.transport

    def _all_share(self, shared: SharedTransport) -> bool:
        try:
            return self.recipients.all_can_open(shared.probe())
        except OSError as error:
            logger.warning("sending weights by value: %s", error)
            return False

    def _any_rank_has_newcomers(self) -> bool:
        """Whether some maker needs all weights. Ranks gather them together, so they must agree on which."""
        has_some = self.recipients.has_newcomers
        if self._strategy.world_size == 1:
            return has_some
        return bool(self._strategy.all_reduce_sum(torch.tensor(int(has_some), device=self._strategy.device)) > 0)

    @property
    def _timeout_seconds(self) -> float:
        return self.recipients.update_seconds + _GRACE_SECONDS


def shared_memory_of(device: torch.device) -> SharedTransport:
    """The memory in which a trainer on this device can share its weights."""
    return CardMemory(device) if device.type == "cuda" else HostMemory()


def _with_checksum(chunk: Chunk, checksum: "Future[int]", seconds: float) -> Chunk:
    try:
        info = dataclasses.replace(chunk.info, checksum=checksum.result(seconds))
    except FutureTimeout:
        raise DeadlineExceeded(
            f"waited {seconds:g} s for the checksum of chunk {chunk.index} of the weights."
        ) from None
    return dataclasses.replace(chunk, info=info)


@contextlib.contextmanager
def _retired_on_failure(transport: Transport) -> Iterator[None]:
    """A maker that was told of an update that failed may still read it."""
    try:
        yield
    except BaseException:
        transport.retire()
        raise


def _wait(update: "Future[None]", seconds: float) -> None:
    try:
        update.exception(timeout=seconds)
    except FutureTimeout:
        raise DeadlineExceeded(f"waited {seconds:g} s for the makers to verify the last update of weights.") from None

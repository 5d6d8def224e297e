"""A trainer's weights on their way to its makers: read at once, verified by the makers while the trainer learns on."""

import contextlib
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

import torch
from torch import Tensor, nn

from coati.background import run_in_background
from coati.config import Deadlines
from coati.errors import DeadlineExceeded
from coati.models.lora import LayerLoRA, LoRAConstructor
from coati.monitor.timeline import WEIGHTS, Timeline
from coati.ray.weight_channel import WeightChannel
from coati.ray.weight_path import WeightPath
from coati.trainer.ppo import PPOLearner
from coati.weights import Canary, Snapshots, VerifyUpdates, make_canary, new_header, weight_messages


class WeightPublisher:
    """Sends versions of a learner's weights, one after the other.

    `begin` reads the weights, which must not change meanwhile; the makers' answers are waited for in another thread.
    There is never more than one update on its way. What went wrong with one that nobody waited for is kept for the
    loop that sent it: `check` raises it. A `send` waits for its own update, and raises what is wrong with that.
    """

    def __init__(
        self,
        learner: PPOLearner,
        maker_names: Sequence[str],
        *,
        deadlines: Deadlines,
        timeline: Timeline,
        sends_adapters_only: bool,
        verify_updates: VerifyUpdates,
        chunk_mib: float,
    ) -> None:
        self._learner = learner
        self._strategy = learner.strategy
        self._timeline = timeline
        self._sends_adapters_only = sends_adapters_only
        self._verify_updates = verify_updates
        self._chunk_mib = chunk_mib
        self.channel = WeightChannel(maker_names, deadlines=deadlines)
        self.path = WeightPath(self.channel, learner.device)
        self._timeout_seconds = deadlines.update_seconds + deadlines.grace_seconds
        self._lock = threading.Lock()  # of the three below
        self._open: Future[None] | None = None
        self._left: Future[None] | None = None  # the one that nobody waits for, if it is that
        self._failure: BaseException | None = None
        self._source = f"trainer {os.environ.get('RANK', '0')} ({socket.gethostname()}, {uuid.uuid4().hex[:8]})"

    def begin(self, version: int, **options: Any) -> None:
        """Read the weights and send them as a version; see `_start` for the options."""
        self._start(version, is_left=True, **options)

    def send(self, version: int, **options: Any) -> None:
        """The same, and wait until the makers have verified it; raises what went wrong with it."""
        update = self._start(version, is_left=False, **options)
        self._close(update)
        if (failure := update.exception()) is not None:
            raise failure

    def _start(
        self,
        version: int,
        *,
        is_left: bool,
        fully_update: bool,
        max_staleness: int | None,
        on_arrival: Callable[[float, int], None],
        shard_size: float | None = None,  # MiB
    ) -> "Future[None]":
        """`on_arrival` hears how long it took until the makers had the version, and how many bytes it has."""
        started = time.perf_counter()
        with self._timeline.span("wait_delivery"):
            self.settle()
        fully_update = fully_update or self._any_rank_has_newcomers()
        is_partial = self._sends_adapters_only and not fully_update
        snapshots = self.path.snapshots
        header = new_header(version=version, source=self._source, max_staleness=max_staleness, snapshots=snapshots)
        messages = weight_messages(
            header,
            self._shards(is_partial, snapshots, shard_size),
            is_partial=is_partial,
            lora=self._lora_settings(),
            has_checksums=self._verify_updates != "off",
            canary=self._canary(),
            snapshots=snapshots,
        )
        with _retired_if_it_fails(snapshots):
            finish = self.channel.start(header, messages, fully_update=fully_update, snapshots=snapshots)

        def deliver() -> None:
            with _retired_if_it_fails(snapshots), self._timeline.span("deliver", WEIGHTS, version=version):
                num_bytes = finish()
            on_arrival(time.perf_counter() - started, num_bytes)

        update = run_in_background(deliver, name="publishing")
        with self._lock:
            self._open, self._left = update, update if is_left else None
        return update

    def settle(self) -> None:
        """Wait until nothing is on its way. What went wrong is left for `check`."""
        if (update := self._open) is not None:
            self._close(update)

    def check(self) -> None:
        """Raise what went wrong with an update that was begun and is no longer on its way, once. Waits for nothing."""
        if (update := self._open) is not None and update.done():
            self._close(update)
        with self._lock:
            failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _close(self, update: "Future[None]") -> None:
        """Wait for the end of an update. Whoever comes first notes it."""
        try:
            failure = update.exception(timeout=self._timeout_seconds)
        except FutureTimeout:
            raise DeadlineExceeded(
                f"waited {self._timeout_seconds:g} s for the makers to verify the weights that were published last."
            ) from None
        with self._lock:
            if self._open is update:
                self._open = None
                if self._left is update:
                    self._failure = self._failure or failure

    def change_makers(self, maker_names: Sequence[str], *, newcomers: Sequence[str]) -> None:
        """Others than before get the weights, from the next update on."""
        self.settle()
        self.channel.change_makers(maker_names, newcomers=newcomers)
        self.path.ask_again()  # newcomers may sit elsewhere

    def _any_rank_has_newcomers(self) -> bool:
        """Whether some maker needs all weights. Ranks gather them together, so they must agree on which."""
        has_some = self.channel.has_newcomers
        if self._strategy.world_size == 1 or not self._sends_adapters_only:
            return has_some
        return bool(self._strategy.all_reduce_sum(torch.tensor(int(has_some), device=self._strategy.device)) > 0)

    def _canary(self) -> Canary | None:
        """What the makers' actors must compute afterwards; all ranks come here together."""
        if self._verify_updates != "canary":
            return None
        return make_canary(self._strategy.unwrap_model(self._learner.actor), device=self._strategy.device)

    def _shards(
        self, is_partial: bool, snapshots: Snapshots | None, shard_size: float | None
    ) -> Iterator[tuple[str, dict[str, Tensor]]]:
        if shard_size is None:
            shard_size = max(self._chunk_mib, 0.0 if snapshots is None else snapshots.least_chunk_mib)
        for label, model in self._learner.models.items():
            kept = _trainable_names(self._strategy.unwrap_model(model)) if is_partial else None
            options = {"shard_size": shard_size, "dtype": self._strategy.compute_dtype, "names": kept}
            for shard in self._strategy.get_model_state_dict_shard(model, **options):
                yield label, shard

    def _lora_settings(self) -> dict[str, dict[str, LayerLoRA]]:
        """Adapter settings of actor and critic, for makers whose models have no adapters."""
        return {
            label: LoRAConstructor.extract_lora_config(self._strategy.unwrap_model(model))
            for label, model in self._learner.models.items()
        }


@contextlib.contextmanager
def _retired_if_it_fails(snapshots: Snapshots | None) -> Iterator[None]:
    """Whoever was told of an update that then failed may still read it."""
    try:
        yield
    except BaseException:
        if snapshots is not None:
            snapshots.retire()
        raise


def _trainable_names(model: nn.Module) -> frozenset[str]:
    return frozenset(name for name, parameter in model.named_parameters() if parameter.requires_grad)

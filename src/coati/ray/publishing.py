"""A trainer's weights on their way to its makers: read at once, verified by the makers while the trainer learns on."""

import contextlib
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout

import torch
from torch import Tensor, nn

from coati.deadlines import Deadlines
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
    What went wrong with an update is raised by `wait`, which the next `begin` calls too, so there is never more than
    one on its way.
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
        self._timeout_seconds = deadlines.update + deadlines.grace
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="publishing")
        self._open: Future[None] | None = None
        self._source = f"trainer {os.environ.get('RANK', '0')} ({socket.gethostname()}, {uuid.uuid4().hex[:8]})"

    def begin(
        self,
        version: int,
        *,
        fully_update: bool,
        max_staleness: int | None,
        on_arrival: Callable[[float, int], None],
        shard_size: float | None = None,  # MiB
    ) -> None:
        """Read the weights and send them as a version. `on_arrival` hears how long that took, and how many bytes."""
        started = time.perf_counter()
        self.wait()
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

        def wait_for_makers() -> None:
            with _retired_if_it_fails(snapshots), self._timeline.span("deliver", WEIGHTS):
                num_bytes = finish()
            on_arrival(time.perf_counter() - started, num_bytes)

        self._open = self._thread.submit(wait_for_makers)

    def wait(self) -> None:
        """Until the makers have verified what was sent last; raises what went wrong with it, once."""
        unfinished, self._open = self._open, None
        if unfinished is None:
            return
        try:
            unfinished.result(timeout=self._timeout_seconds)
        except FutureTimeout:
            if unfinished.done():  # an error of the update's own
                raise
            raise DeadlineExceeded(
                f"waited {self._timeout_seconds:g} s for the makers to verify the weights that were published last."
            ) from None

    def change_makers(self, maker_names: Sequence[str], *, newcomers: Sequence[str]) -> None:
        """Others than before get the weights, from the next update on."""
        self.wait()
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

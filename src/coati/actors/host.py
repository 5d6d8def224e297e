"""What a trainer and a maker have in common: where they live, what they report, how they are stopped."""

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from coati.actors.callbacks import MakerCallback, TrainerCallback
from coati.errors import ConfigError
from coati.experience_buffer.buffer import SampleBuffer
from coati.monitor.records import RecordLog, RecordPage
from coati.monitor.timeline import Span, Timeline
from coati.peers import LocalPeers, Peers

ENV_INFO_KEYS = ("local_rank", "rank", "world_size", "master_addr", "master_port")


class Host:
    """A process that others may share. `coati.ray.environment.ActorHost` is a Ray actor of one's own."""

    may_lend_memory = False
    """Whether makers in other processes may read weights in the memory of its card."""

    def __init__(self, name: str = "", peers: Peers | None = None, stop: threading.Event | None = None) -> None:
        """`name` is how peers find what lives here; `stop` is set to end its loop."""
        self.name = name
        self.peers = peers or LocalPeers()
        self.stop = stop or threading.Event()

    def set_up_log(self, records: RecordLog[dict[str, Any]], *, debug: bool) -> None:
        """Log what is done here, and keep warnings among `records`; a shared process does that for all."""

    def leave_out_of_collections(self) -> None:
        """Exclude what is loaded so far from garbage collection, if it stays until the process ends."""

    def make_buffer(self, *_size: Any, **_makers: Any) -> SampleBuffer:
        """Make the buffer of a trainer whose makers have data loaders of their own."""
        raise ConfigError("outside of Ray a trainer needs options.rules, by which makers lease work, got none.")


class Progress(NamedTuple):
    """Where a trainer or a maker stands."""

    state: str  # "idle", "working", "finished" or "failed"
    version: int  # that of its weights
    num_samples: int  # that were delivered, or trained on
    num_batches: int = 0  # steps of a trainer
    num_waiting: int = 0  # whole batches in its buffer
    has_weights: bool = True  # whether all weights of a maker came from a trainer
    num_made: int = 0  # samples that a trainer has taken in


class Report(NamedTuple):
    """What came after two cursors: records with metrics, samples and warnings; what was done and waited for."""

    progress: Progress
    records: RecordPage[dict[str, Any]]
    spans: RecordPage[Span]


class Worker:
    """A trainer or a maker. What is asked here is answered at any time."""

    host_class: Callable[[], Host] = Host
    """Makes the host of one that is given none."""

    def __init__(self, host: Host | None, callbacks: Sequence[MakerCallback | TrainerCallback], *, debug: bool) -> None:
        self.host = host or self.host_class()
        self.callbacks = list(callbacks)
        self._state = "idle"
        self._records: RecordLog[dict[str, Any]] = RecordLog()
        self._timeline = Timeline()
        self.host.set_up_log(self._records, debug=debug)

    def stop(self) -> None:
        """End the loop before its next batch; what is made is delivered, weights and buffer stay as they are."""
        self.host.stop.set()

    def notify(self, hook: str, *args: Any) -> None:
        """Run a hook of each callback, in order; a note on what one raises names it and the hook."""
        for callback in self.callbacks:
            callback.timeline = self._timeline
            try:
                getattr(callback, hook)(*args)
            except Exception as error:
                error.add_note(f"raised in the callback {type(callback).__qualname__}, hook {hook}")
                raise

    def progress(self) -> Progress:
        """Return where it stands."""
        raise NotImplementedError

    def report(self, record_cursor: int = 0, span_cursor: int = 0) -> Report:
        """Return where it stands, and what came after these cursors."""
        return Report(self.progress(), self._records.since(record_cursor), self._timeline.since(span_cursor))


def apply_env_info(env_info: Mapping[str, str | int] | None) -> None:
    """Set LOCAL_RANK, RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for torch.distributed from `env_info`."""
    env_info = env_info or {}
    if unknown := [key for key in env_info if key not in ENV_INFO_KEYS]:
        raise ConfigError(
            f"env_info may hold {', '.join(ENV_INFO_KEYS)}, got {', '.join(map(repr, unknown))}. Other "
            "variables do not travel to workers; use Ray's runtime_env for them."
        )
    for key, value in env_info.items():
        os.environ[key.upper()] = str(value)


def set_up_gpu(device: torch.device) -> None:
    """Turn cuDNN's attention off, which plans for each new shape of a batch: 47 ms on the host of an H200."""
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)

"""The common base of trainers and makers: the process that hosts them, their reports, and how they stop."""

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
    """The process that a trainer or maker runs in, possibly with others; `ActorHost` is a dedicated Ray actor."""

    can_share_gpu_memory = False
    """Whether makers in other processes may read weights directly from this process's GPU memory."""

    def __init__(self, name: str = "", peers: Peers | None = None, stop: threading.Event | None = None) -> None:
        """Peers find the trainer or maker under `name`; setting `stop` ends its loop."""
        self.name = name
        self.peers = peers or LocalPeers()
        self.stop = stop or threading.Event()

    def set_up_log(self, records: RecordLog[dict[str, Any]], *, debug: bool) -> None:
        """Set up logging, and copy warnings to `records`; does nothing in a shared process, which sets it up once."""

    def make_buffer(self, *_size: Any, **_makers: Any) -> SampleBuffer:
        """Create the buffer of a trainer whose makers have their own data loaders."""
        raise ConfigError(
            "outside Ray, a trainer needs options.rules, by which makers lease work, got none. Set options.rules."
        )


class Progress(NamedTuple):
    """The progress of a trainer or maker."""

    state: str  # "idle", "working", "finished" or "failed"
    version: int  # of its weights
    num_samples: int  # samples delivered by a maker, or trained on by a trainer
    num_batches: int = 0  # training steps taken by a trainer
    num_waiting: int = 0  # whole batches in a trainer's buffer
    has_weights: bool = True  # whether a maker has received all its weights from a trainer
    num_made: int = 0  # samples that a trainer has received


class Report(NamedTuple):
    """Everything recorded after two cursors: records (metrics, samples, warnings), and spans of work and waiting."""

    progress: Progress
    records: RecordPage[dict[str, Any]]
    spans: RecordPage[Span]


class Worker:
    """A trainer or a maker. `stop`, `progress` and `report` may be called from other threads while the loop runs."""

    host_class: Callable[[], Host] = Host  # creates the host if none is passed

    def __init__(self, host: Host | None, callbacks: Sequence[MakerCallback | TrainerCallback], *, debug: bool) -> None:
        self.host = host or self.host_class()
        self.callbacks = list(callbacks)
        self._state = "idle"
        self._records: RecordLog[dict[str, Any]] = RecordLog()
        self._timeline = Timeline()
        self.host.set_up_log(self._records, debug=debug)

    def stop(self) -> None:
        """End the loop before its next batch; finished samples are delivered, and weights and buffer are kept."""
        self.host.stop.set()

    def notify(self, hook: str, *args: Any) -> None:
        """Run a hook of each callback, in order; a note on an exception names the callback and the hook."""
        for callback in self.callbacks:
            callback.timeline = self._timeline
            try:
                getattr(callback, hook)(*args)
            except Exception as error:
                error.add_note(f"raised in the callback {type(callback).__qualname__}, hook {hook}")
                raise

    def progress(self) -> Progress:
        """Return the current progress."""
        raise NotImplementedError

    def report(self, record_cursor: int = 0, span_cursor: int = 0) -> Report:
        """Return the current progress, and the records and spans after these cursors."""
        return Report(self.progress(), self._records.since(record_cursor), self._timeline.spans.since(span_cursor))


def apply_env_info(env_info: Mapping[str, str | int] | None) -> None:
    """Set LOCAL_RANK, RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for torch.distributed from `env_info`."""
    env_info = env_info or {}
    if unknown := [key for key in env_info if key not in ENV_INFO_KEYS]:
        raise ConfigError(
            f"env_info may hold {', '.join(ENV_INFO_KEYS)}, got {', '.join(map(repr, unknown))}. Other "
            "variables are not passed to workers. Use Ray's runtime_env for them."
        )
    for key, value in env_info.items():
        os.environ[key.upper()] = str(value)


def set_up_gpu(device: torch.device) -> None:
    """Turn off cuDNN attention, which replans for every new batch shape: 47 ms on the host of an H200."""
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)

"""Where a trainer or a maker lives: what it is called, whom it can call, and what its process does for it."""

import os
import threading
from collections.abc import Mapping
from typing import Any

import torch

from coati.errors import ConfigError
from coati.experience_buffer.buffer import SampleBuffer
from coati.monitor.records import RecordLog
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

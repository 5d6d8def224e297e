"""Tensor parallelism in vLLM: functions that run in its worker processes, and the shared memory between them."""

import os
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coati.weights.message import TensorSpec, layout, tensor_views


def remove_shared_memory_at_exit(workers: Iterable[int]) -> "subprocess.Popen[bytes]":
    """Start a process that removes the shared memory of these workers when the current process ends, even if killed.

    Ray kills a maker together with its children, and thereby whatever would have removed the files. The shell started
    here survives: it is in a session of its own, and its environment does not mark it as part of the run.
    """
    used = "".join(Path(f"/proc/{worker}/maps").read_text(encoding="utf-8") for worker in workers)
    files = {*re.findall(r"/dev/shm/(?:psm_|cpushm|nccl-)[^/\s]+", used)}
    wait_and_remove = 'exec 3<&0; { read _ <&3; rm -f -- "$@"; } &'  # the pipe closes when this process ends
    return subprocess.Popen(
        ["sh", "-c", wait_and_remove, "sh", *files],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={"PATH": os.defpath},
        start_new_session=True,
    )


def begin_update(worker: Any) -> None:
    """Prepare a worker for new weights."""
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

    initialize_layerwise_reload(worker.get_model())


def load_chunk(worker: Any, path: str, specs: tuple[TensorSpec, ...]) -> None:
    """Load a worker's shards of the weights in a mapped file. vLLM may keep views of it until a layer is complete."""
    from vllm.config import set_current_vllm_config

    memory = torch.from_file(path, size=layout(specs)[1], dtype=torch.uint8)
    with set_current_vllm_config(worker.vllm_config):
        worker.get_model().load_weights(tensor_views(memory, specs).items())


def end_update(worker: Any) -> None:
    """Finish a worker's update after the last chunk."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    with set_current_vllm_config(worker.vllm_config):
        finalize_layerwise_reload(worker.get_model(), worker.vllm_config.model_config)


def sums_of_bits(worker: Any) -> list[int]:
    """Return the sum of the bits of each parameter in a worker."""
    return [sum_of_bits(weight) for weight in worker.get_model().parameters()]


def sum_of_bits(weight: Tensor) -> int:
    """Return the sum of a weight's bits, which joining, transposing and zero padding do not change."""
    formats = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return int(weight.view(formats[weight.element_size()]).sum(dtype=torch.int64))

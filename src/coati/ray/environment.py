"""What an actor sets up in its process: five environment variables from the driver, its log, its share of a GPU.

All other variables come from the Ray node: on a cluster, the environment in which `ray start` ran; on a private Ray,
those variables of the driver that `PASSED_ON` or `topology.environment` names.
"""

import gc
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import ray
import torch

from coati import faults
from coati.errors import ConfigError
from coati.monitor.records import RecordLog, WarningRecorder

ENV_INFO_KEYS = ("local_rank", "rank", "world_size", "master_addr", "master_port")

PASSED_ON = (
    "PATH HOME USER LOGNAME SHELL TERM COLUMNS NO_COLOR LANG LC_* TZ TMPDIR XDG_* LD_* DYLD_* PYTHON* VIRTUAL_ENV "
    "CONDA_* CC CXX MALLOC_* COVERAGE_* COATI_* RAY_* CUDA_* CUBLAS_* NVIDIA_* HIP_* NCCL_* GLOO_* TORCH* PYTORCH_* "
    "TRITON_* OMP_* MKL_* KMP_* OPENBLAS_* HF_* TRANSFORMERS_* TOKENIZERS_* VLLM_* *_PROXY *_proxy SSL_CERT_* "
    "REQUESTS_CA_BUNDLE"
)
"""Patterns of variables that actors of a private Ray get from the driver. HF_TOKEN is one: they load models."""


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


def allowed_environment(environment: Mapping[str, str], more: Iterable[str] = ()) -> dict[str, str]:
    """Return the variables that actors may have, with those that `more` names.

    >>> allowed_environment({"HOME": "/root", "BANK_KEY": "1", "JUDGE_KEY": "2"}, ["JUDGE_KEY"])
    {'HOME': '/root', 'JUDGE_KEY': '2'}
    """
    patterns = (*PASSED_ON.split(), *more)
    return {
        name: value for name, value in environment.items() if any(fnmatchcase(name, pattern) for pattern in patterns)
    }


def set_up_log(*, debug: bool = False, records: RecordLog[dict[str, Any]] | None = None) -> None:
    """Have an actor log what it does, and keep its warnings among `records` for the driver. Only in an actor.

    Ray keeps the log of each actor; `--verbose` shows it. A level or handler that is set already stays.
    """
    logger = logging.getLogger("coati")
    if debug:
        logger.setLevel(logging.DEBUG)
    if not is_actor():
        return
    faults.set_actor(actor_name())
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        logger.addHandler(handler)
    if records is not None:
        logger.addHandler(WarningRecorder(records))


def set_up_gpu(device: torch.device) -> None:
    """Turn cuDNN's attention off, which plans for each new shape of a batch: 47 ms on the host of an H200."""
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)


def leave_out_of_collections() -> None:
    """Exclude what an actor has loaded so far from garbage collection; libraries and models stay until it ends.

    Collecting them took 3 % of the steps of a small model. Does nothing outside an actor.
    """
    if is_actor():
        gc.collect()
        gc.freeze()


def is_actor() -> bool:
    """Whether this process is a Ray actor."""
    return ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None


def actor_name() -> str:
    """Return the name of this actor, or the beginning of its id; "" outside an actor."""
    if not is_actor():
        return ""
    context = ray.get_runtime_context()
    return str(context.get_actor_name() or context.get_actor_id()[:8])


def remote(plain_class: type, *, groups: Sequence[str]) -> Any:
    """Make a Ray actor class of a plain one, with one thread for each concurrency group and its docstring in place."""
    actor_class = ray.remote(concurrency_groups=dict.fromkeys(groups, 1))(plain_class)
    type(actor_class).__doc__ = plain_class.__doc__  # what help() shows
    return actor_class

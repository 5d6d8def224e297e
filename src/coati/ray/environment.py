"""What a process has as a Ray actor: its name and peers, its log, the environment that it inherits.

Environment variables come from the Ray node: on a cluster, the environment in which `ray start` ran; on a private Ray,
those variables of the driver that `PASSED_ON` or `topology.environment` names.
"""

import gc
import logging
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import ray

from coati import faults
from coati.actors.host import Host
from coati.config import Deadlines
from coati.monitor.records import RecordLog, WarningRecorder
from coati.ray.detached_replay_buffer import UnleasedBuffer
from coati.ray.peers import RayPeers

PASSED_ON = (
    "PATH HOME USER LOGNAME SHELL TERM COLUMNS NO_COLOR LANG LC_* TZ TMPDIR XDG_* LD_* DYLD_* PYTHON* VIRTUAL_ENV "
    "CONDA_* CC CXX MALLOC_* COVERAGE_* COATI_* RAY_* CUDA_* CUBLAS_* NVIDIA_* HIP_* NCCL_* GLOO_* TORCH* PYTORCH_* "
    "TRITON_* OMP_* MKL_* KMP_* OPENBLAS_* HF_* TRANSFORMERS_* TOKENIZERS_* VLLM_* *_PROXY *_proxy SSL_CERT_* "
    "REQUESTS_CA_BUNDLE"
)
"""Patterns of variables that actors of a private Ray get from the driver. HF_TOKEN is one: they load models."""


def allowed_environment(environment: Mapping[str, str], more: Iterable[str] = ()) -> dict[str, str]:
    """Return the variables that actors may have, with those that `more` names.

    >>> allowed_environment({"HOME": "/root", "BANK_KEY": "1", "JUDGE_KEY": "2"}, ["JUDGE_KEY"])
    {'HOME': '/root', 'JUDGE_KEY': '2'}
    """
    patterns = (*PASSED_ON.split(), *more)
    return {
        name: value for name, value in environment.items() if any(fnmatchcase(name, pattern) for pattern in patterns)
    }


class ActorHost(Host):
    """A Ray actor. Where there is none, in a test for example, it has no name and leaves the process alone."""

    may_lend_memory = True

    def __init__(self) -> None:
        super().__init__("", RayPeers())
        self._is_actor = ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None
        if self._is_actor:
            context = ray.get_runtime_context()
            self.name = str(context.get_actor_name() or context.get_actor_id()[:8])

    def set_up_log(self, records: RecordLog[dict[str, Any]], *, debug: bool) -> None:
        """Have the actor log what it does, and keep its warnings among `records` for the driver.

        Ray keeps the log of each actor; `--verbose` shows it. A level or handler that is set already stays.
        """
        logger = logging.getLogger("coati")
        if debug:
            logger.setLevel(logging.DEBUG)
        if not self._is_actor:
            return
        faults.set_actor(self.name)
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.INFO)
        if not logger.hasHandlers():
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
            logger.addHandler(handler)
        logger.addHandler(WarningRecorder(records))

    def leave_out_of_collections(self) -> None:
        """Exclude libraries and models, which stay, from garbage collection: that took 3 % of a small model's steps."""
        if self._is_actor:
            gc.collect()
            gc.freeze()

    def make_buffer(
        self, sample_batch_size: int, limit: int, *, maker_names: Sequence[str], deadlines: Deadlines
    ) -> UnleasedBuffer:
        """Make the buffer of a trainer whose makers have data loaders of their own."""
        return UnleasedBuffer(sample_batch_size, limit, maker_names=maker_names, deadlines=deadlines, peers=self.peers)


def run_in_groups(plain_class: type, **methods: Sequence[str]) -> None:
    """Have an actor of this class run these methods in the concurrency groups that they are listed under."""
    for group, names in methods.items():
        for name in names:
            ray.method(concurrency_group=group)(getattr(plain_class, name))


def remote(plain_class: type, *, groups: Sequence[str]) -> Any:
    """Make a Ray actor class of a plain one, with one thread for each concurrency group and its docstring in place."""
    actor_class = ray.remote(concurrency_groups=dict.fromkeys(groups, 1))(plain_class)
    type(actor_class).__doc__ = plain_class.__doc__  # what help() shows
    return actor_class

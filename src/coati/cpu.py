"""How torch computes on the CPU, set up once in every process that runs models."""

import functools
import platform
from pathlib import Path

import torch


def set_up_cpu(num_threads: int = 0) -> None:
    """Use so many threads (0: as many as torch likes), and the quicker matrix products.

    On ARM, torch hands float32 products to oneDNN, whose set-up costs more than a small product (650 µs, else 57,
    64×64 by 64×128, Neoverse N1). It is turned off on ARM without bfloat16, for which it is made: which one is
    used changes the last bits, so it goes by the machine and not by a measurement.
    """
    if num_threads > 0:
        torch.set_num_threads(num_threads)
    if _is_arm_without_bfloat16():
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]


@functools.cache
def _is_arm_without_bfloat16() -> bool:
    if platform.machine().lower() not in ("aarch64", "arm64"):
        return False
    try:
        features = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:  # not Linux
        return False
    return "bf16" not in features

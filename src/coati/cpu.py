"""How torch computes on the CPU, set up once in every process that runs models."""

import functools
import platform
from pathlib import Path

import torch


def set_up_cpu(num_threads: int = 0) -> None:
    """Use so many threads (0: as many as torch likes), and the quicker matrix products.

    On ARM, torch hands float32 products to oneDNN, whose set-up costs more than a small product: 64×64 by 64×128 took
    650 µs with it and 57 µs without on a Neoverse N1, and large ones were no faster either. So it
    is turned off on such CPUs, which are those without bfloat16 instructions, for which oneDNN is made. Which one is
    used changes the last bits, so it goes by the machine and not by a measurement: all processes of a run must agree.
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

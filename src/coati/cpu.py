"""How torch computes on the CPU, set up once in every process that runs models."""

import platform

import torch


def set_up_cpu(num_threads: int = 0) -> None:
    """Use so many threads (0: as many as torch likes), and the quicker matrix products.

    On ARM, torch hands float32 products to oneDNN, whose set-up costs more than a small product: 64×64 by 64×128 took
    650 µs with it and 57 µs without on a Neoverse N1, and large ones were no faster either (docs/performance.md). Which
    one is used changes the last bits, so it goes by the machine and not by a measurement: all processes of a run must
    agree.
    """
    if num_threads > 0:
        torch.set_num_threads(num_threads)
    if platform.machine().lower() in ("aarch64", "arm64"):
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]

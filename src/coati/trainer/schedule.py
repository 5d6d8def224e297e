"""Learning-rate schedules: linear warm-up, then constant, linear or cosine decay to zero.

The factor is a pure function of the step, so what a run will do can be read, tested and plotted beforehand.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Literal, get_args

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from coati.errors import ConfigError

ScheduleKind = Literal["constant", "linear", "cosine"]
"""What happens to the learning rate after the warm-up."""


def lr_factor(step: int, *, kind: ScheduleKind, warmup_steps: int, total_steps: int) -> float:
    """What the base learning rate is multiplied by in optimizer step `step`, counted from 0.

    Warm-up: step `s` uses `(s + 1) / (warmup_steps + 1)`, so the first step already learns and the step after
    the warm-up is the first at the full rate. Then `linear` and `cosine` fall to 0 at `total_steps`; from
    there on every schedule stays at its end value.

    Example:
        >>> [lr_factor(s, kind="linear", warmup_steps=1, total_steps=5) for s in range(7)]
        [0.5, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    if kind == "constant":
        return 1.0
    decay_steps = max(total_steps - warmup_steps, 1)
    progress = min((step - warmup_steps) / decay_steps, 1.0)  # 0 after the warm-up, 1 at the end
    if kind == "linear":
        return 1.0 - progress
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def make_schedule(optimizer: Optimizer, *, kind: ScheduleKind, warmup_steps: int, total_steps: int) -> LambdaLR:
    """A torch scheduler over `lr_factor`; call its `step()` after each optimizer step.

    `total_steps` counts optimizer steps, warm-up included.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        >>> schedule = make_schedule(optimizer, kind="constant", warmup_steps=1, total_steps=10)
        >>> schedule.get_last_lr()
        [0.5]
    """
    if kind not in get_args(ScheduleKind):
        raise ConfigError(f"lr_schedule must be one of {', '.join(get_args(ScheduleKind))}, got {kind!r}.")
    if warmup_steps < 0:
        raise ConfigError(f"warmup_steps must be 0 or more, got {warmup_steps}. Use 0 for no warm-up.")
    if total_steps < 1:
        raise ConfigError(f"total_steps must be 1 or more, got {total_steps}.")
    if warmup_steps > total_steps:
        raise ConfigError(
            f"warmup_steps must be at most total_steps ({total_steps}), got {warmup_steps}. "
            "Warm up for a tenth of the run or less."
        )
    return LambdaLR(optimizer, partial(lr_factor, kind=kind, warmup_steps=warmup_steps, total_steps=total_steps))

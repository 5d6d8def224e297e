"""The search of `strategies.py --largest`: the deepest model that trains, and what limits deeper ones."""

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The deepest model that trained (0 = none), the shallowest known not to train, and the reason."""

    layers: int
    too_many: int
    limit: str


def find_deepest(
    attempt: Callable[[int], str],
    *,
    most: int,
    limit: str,
    seconds: float,
    tries: int,
    clock: Callable[[], float] = time.monotonic,
) -> Answer:
    """Search the largest number of layers that trains, by bisection that starts at `most`.

    `most` is the depth at which weights, gradients and moments alone fill the memory named `limit`. `attempt` tries a
    number of layers and returns the limit it hit, or "" if it trained. The search stops, with time as the limit, before
    an attempt that would probably end after `seconds`.
    """
    began = clock()
    trained, failed, layers = 0, most + 1, most
    pace = 0.0  # seconds per layer, in the slowest attempt so far
    for _ in range(tries):
        if failed - trained <= 1:
            break
        started = clock()
        if started - began + pace * layers > seconds:
            between = f"{trained + 1} to {failed - 1} layers were not tried"
            return Answer(layers=trained, too_many=failed, limit=f"time ({between})")
        hit = attempt(layers)
        pace = max(pace, (clock() - started) / layers)
        if hit:
            failed, limit = layers, hit
        else:
            trained = layers
        layers = (trained + failed) // 2
    return Answer(layers=trained, too_many=failed, limit=limit)

"""The search of `strategies.py --largest`: how deep a model can be and still train, and what stops a deeper one."""

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The deepest model that trained (0: none did), the shallowest that is known not to, and why not."""

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
    """Try `most` layers, then half of them, then halfway between what trained and what did not.

    `most` is what weights, gradients and moments alone leave room for, and `limit` is what they fill. `attempt` says
    what a model of so many layers ran into; nothing if it trained. An attempt that would probably end after `seconds`
    is not made: then time is what stopped the search.
    """
    began = clock()
    trained, failed, layers = 0, most + 1, most
    pace = 0.0  # seconds of a layer, in the slowest attempt so far
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

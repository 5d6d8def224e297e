"""Points in the code at which tests and `make chaos` have a process fail.

A process that is started with COATI_FAULTS=FILE.py:ARGUMENT runs that file, whose `follow(ARGUMENT)` returns what is
called at every point that the process reaches. Without it, a point is one comparison. `tests/fault_schedule.py` is such
a file; actors of a private Ray inherit the variable.
"""

import os
import runpy
from collections.abc import Callable

VARIABLE = "COATI_FAULTS"

Hook = Callable[[str, int | None, str], None]
"""Takes the point, the number of a chunk or the like, and the name of the actor."""


def reach(point: str, index: int | None = None) -> None:
    """Be at a point, with the number of a chunk or the like."""
    if hook is not None:
        hook(point, index, _actor)


def set_actor(name: str) -> None:
    """Say which actor this process is."""
    global _actor
    _actor = name


def _loaded() -> Hook | None:
    file, _, argument = os.environ.get(VARIABLE, "").rpartition(":")
    found: Hook | None = runpy.run_path(file)["follow"](argument) if file else None
    return found


_actor = ""
hook: Hook | None = _loaded()

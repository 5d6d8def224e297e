"""Fault-injection points, at which tests and `make chaos` make a process fail.

If COATI_FAULTS=FILE.py:ARGUMENT is set, a process runs that file at import; its `follow(ARGUMENT)` returns a hook that
is called at every point the process reaches. Otherwise a point costs one comparison. See `tests/fault_schedule.py`.
Actors of a private Ray cluster inherit the variable.
"""

import os
import runpy
from collections.abc import Callable

VARIABLE = "COATI_FAULTS"

Hook = Callable[[str, int | None, str], None]
"""Called with the name of the point, an index such as a chunk number, and the actor's name."""


def reach(point: str, index: int | None = None) -> None:
    """Call the hook, if any, for this point; `index` is a chunk number, for example."""
    if hook is not None:
        hook(point, index, _actor)


def set_actor(name: str) -> None:
    """Set the actor name that hooks receive from this process."""
    global _actor
    _actor = name


def _load_hook() -> Hook | None:
    file, _, argument = os.environ.get(VARIABLE, "").rpartition(":")
    loaded: Hook | None = runpy.run_path(file)["follow"](argument) if file else None
    return loaded


_actor = ""
hook: Hook | None = _load_hook()

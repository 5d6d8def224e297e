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
        hook(point, index, actor)


actor = ""  # the name of this process's actor, for the hook
_file, _, _argument = os.environ.get(VARIABLE, "").rpartition(":")
hook: Hook | None = runpy.run_path(_file)["follow"](_argument) if _file else None

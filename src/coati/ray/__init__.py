"""The actors of the contract, and the launcher; the only package that imports Ray.

The contract is the public API: the import paths, classes and signatures that programs may rely on.
"""

import gc
import sys
from pathlib import Path

# An actor's imports create a million long-lived objects. With Python's default, one garbage collection per 700 new
# objects, collections took a twelfth of an actor's start-up. A larger threshold, or 0 (never), stays as set.
_NEW_OBJECTS = 50_000
if Path(sys.argv[0]).name == "default_worker.py" and 0 < gc.get_threshold()[0] < _NEW_OBJECTS:
    gc.set_threshold(_NEW_OBJECTS, *gc.get_threshold()[1:])

"""The actors of the contract, and the launcher: the only package that imports Ray.

The contract is what programs may rely on: the import paths, classes and signatures that coati was asked to have.
"""

import gc
import sys
from pathlib import Path

# What actors import makes a million objects, and they stay: a search for garbage after every 700 of them took a
# twelfth of an actor's start. A program that has set it to more, or to 0 for never, keeps its own; and in a program of
# somebody else's it is none of our business.
_NEW_OBJECTS = 50_000
if Path(sys.argv[0]).name == "default_worker.py" and 0 < gc.get_threshold()[0] < _NEW_OBJECTS:  # a worker of Ray's
    gc.set_threshold(_NEW_OBJECTS, *gc.get_threshold()[1:])

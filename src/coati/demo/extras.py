"""The packages of the `demo` extra, imported only when they are used and missed with a remedy."""

import importlib
from types import ModuleType

from coati.errors import ConfigError

# What each package is for, in the words of the error that misses it.
_PURPOSES = {"vaderSentiment": "the demo's reward", "matplotlib": "the plot of the reward curve"}


def import_extra(module: str) -> ModuleType:
    """Import `module`, which belongs to a package of the `demo` extra, or say how to install it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        # Only the package's own absence is cured by installing it; a broken install keeps its own message.
        if error.name != package:
            raise
        purpose = _PURPOSES.get(package, "the demo")
        raise ConfigError(
            f"{package} is needed for {purpose} and is not installed. Run: pip install 'coati[demo]'"
        ) from error


def check_demo_extras() -> None:
    """Raise `ConfigError` if a package of the `demo` extra is missing, before any work is done."""
    for package in _PURPOSES:
        import_extra(package)

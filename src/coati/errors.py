"""The exceptions that coati raises deliberately, and the formatting of counts, names and durations in messages.

Each exception takes exactly one string, so that it pickles across Ray.
"""

import os
import re
from collections.abc import Iterable


class CoatiError(Exception):
    """Base class of all exceptions that coati raises deliberately."""


def error_text(error: BaseException) -> str:
    """Return an error's message and notes as shown to users, with values of secret environment variables masked."""
    kind = "" if isinstance(error, CoatiError) else f"{type(error).__name__}: "
    text = "\n  ".join([f"{kind}{error}", *getattr(error, "__notes__", ())])
    for variable, value in os.environ.items():
        if len(value) >= 8 and re.search("KEY|TOKEN|SECRET|PASSWORD", variable):
            text = text.replace(value, f"<{variable}>")
    return text


class ConfigError(CoatiError, ValueError):
    """A setting is invalid."""


class DataError(CoatiError, ValueError):
    """Prompts, a batch or an experience are invalid."""


class RewardError(CoatiError, RuntimeError):
    """A reward raised, timed out, or did not return one score per sample."""


class RewardFailed(RewardError):
    """A reward raised, hung or killed its process on a batch; single samples of the batch may be the cause."""


class GenerateOptionError(CoatiError, TypeError):
    """A generate option is unknown or contradicts another."""


class WeightUpdateError(CoatiError, RuntimeError):
    """A weight update was rejected. The receiver keeps its current weights, or has none if the commit failed."""


class RunStopped(CoatiError, RuntimeError):
    """The run was stopped before there was anything to train or save."""


class StalenessExceeded(CoatiError, RuntimeError):
    """Training data is older than `topology.max_staleness` allows."""


class DeadlineExceeded(CoatiError, TimeoutError):
    """A wait timed out; the message says what it waited for."""


class ActorNotFound(CoatiError, LookupError):
    """No Ray actor has the name that a maker or trainer was given for its peer."""


class PeerDied(CoatiError, RuntimeError):
    """An actor that this one depends on has died."""


class StartFailed(PeerDied):
    """An actor's constructor raised, and a restart would raise again."""


class HeadLost(CoatiError, ConnectionError):
    """The head of the Ray cluster died, so the run cannot continue."""


class PeerUnavailable(CoatiError, RuntimeError):
    """The connection to an actor broke during a call, which may or may not have run."""


class RemoteError(CoatiError, RuntimeError):
    """A method of another actor raised; `cause` is the original exception."""

    cause: Exception


class TrainingDiverged(CoatiError, RuntimeError):
    """Training cannot continue: too many batches in a row were skipped, or weights are not finite."""


class OutOfMemory(CoatiError, MemoryError):
    """A forward or backward pass, a model or optimizer state did not fit in memory."""


class AcceleratorFailed(CoatiError, RuntimeError):
    """A GPU failed for a reason other than memory; only a new process can use it again."""


class EngineFailed(CoatiError, RuntimeError):
    """A worker process of the rollout engine failed; only a new maker can generate again."""


class CheckpointError(CoatiError, RuntimeError):
    """A saved model, optimizer state or journal is missing, incomplete or belongs to another run."""


class ReplayDiffers(CoatiError, RuntimeError):
    """A replayed run differs from its journal."""


class StorageError(CoatiError, OSError):
    """A run file cannot be written: the disk is full or the file system failed."""


def counted(number: float, one: str, many: str = "") -> str:
    """Return a number with its noun: "1 maker", "2,000 makers", "0.5 GPUs"."""
    amount = f"{number:,}" if isinstance(number, int) else f"{number:g}"
    return f"{amount} {one if number == 1 else many or one + 's'}"


def listed(names: Iterable[str], *, most: int = 5) -> str:
    """Join names with commas; if there are more than `most`, abbreviate: "maker-0 … maker-63 (64)"."""
    all_names = list(names)
    return ", ".join(all_names) if len(all_names) <= most else f"{all_names[0]} … {all_names[-1]} ({len(all_names)})"


def format_seconds(seconds: float) -> str:
    """Return a duration in a unit that suits its size: "12.3 ms", "12.3 s", "12 min 34 s"."""
    if seconds >= 60:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes:,} min {rest:02d} s"
    unit, scale = ("s", 1.0) if seconds >= 1 or seconds == 0 else ("ms", 1e3) if seconds >= 1e-3 else ("us", 1e6)
    value = seconds * scale
    return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"

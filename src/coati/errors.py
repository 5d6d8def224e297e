"""Every exception that coati raises on purpose. Each takes exactly one string, so it survives pickling across Ray."""

import os
import re


class CoatiError(Exception):
    """Base of all errors that coati raises on purpose."""


def error_text(error: BaseException) -> str:
    """Return what people are told: message and notes, without the values of environment variables that are secret."""
    kind = "" if isinstance(error, CoatiError) else f"{type(error).__name__}: "
    text = "\n  ".join([f"{kind}{error}", *getattr(error, "__notes__", ())])
    for variable, value in os.environ.items():
        if len(value) >= 8 and re.search("KEY|TOKEN|SECRET|PASSWORD", variable):
            text = text.replace(value, f"<{variable}>")
    return text


class ConfigError(CoatiError, ValueError):
    """A setting is wrong."""


class DataError(CoatiError, ValueError):
    """Prompts, a batch or an experience are not what they must be."""


class RewardError(CoatiError, RuntimeError):
    """A reward raised, ran past its deadline, or returned something that is not one score per sample."""


class RewardFailed(RewardError):
    """A reward raised, hung or ended its process on a batch, which may be the fault of some of its samples."""


class GenerateOptionError(CoatiError, TypeError):
    """An unknown or contradictory generate option."""


class WeightUpdateError(CoatiError, RuntimeError):
    """A weight update was rejected; the receiver serves what it had, or nothing if the commit failed."""


class RunStopped(CoatiError, RuntimeError):
    """A stop was asked for before there was anything to train or save."""


class StalenessExceeded(CoatiError, RuntimeError):
    """Training data is older than the run's bound allows."""


class DeadlineExceeded(CoatiError, TimeoutError):
    """A wait ran past its deadline; the message says what it waited for."""


class ActorNotFound(CoatiError, LookupError):
    """No Ray actor has the name that a maker or trainer was told to talk to."""


class PeerDied(CoatiError, RuntimeError):
    """An actor that this one depends on is gone."""


class StartFailed(PeerDied):
    """The constructor of an actor raised, and would raise again."""


class HeadLost(CoatiError, ConnectionError):
    """The head of the Ray cluster is gone, and the run cannot continue."""


class PeerUnavailable(CoatiError, RuntimeError):
    """The connection to an actor broke during a call, which may or may not have been executed."""


class RemoteError(CoatiError, RuntimeError):
    """A method of another actor raised; `cause` is what it raised."""

    cause: Exception


class TrainingDiverged(CoatiError, RuntimeError):
    """Training cannot continue: batch after batch was skipped, or weights are no longer finite."""


class OutOfMemory(CoatiError, MemoryError):
    """A pass, a model or an optimizer's state did not fit into memory."""


class AcceleratorFailed(CoatiError, RuntimeError):
    """A GPU failed for another reason than memory; only a new process can use it again."""


class EngineFailed(CoatiError, RuntimeError):
    """A worker process of the rollout engine failed; only a new maker can generate again."""


class CheckpointError(CoatiError, RuntimeError):
    """A saved model, optimizer state or journal is missing, torn or belongs to something else."""


class ReplayDiffers(CoatiError, RuntimeError):
    """A run that was re-executed from its journal came out differently."""


class StorageError(CoatiError, OSError):
    """A file of the run cannot be written: the disk is full, or the file system failed."""

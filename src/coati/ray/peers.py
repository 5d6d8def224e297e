"""Peers that are Ray actors."""

import logging
import re
from collections.abc import Iterable, Sequence
from typing import Any

import ray
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    GetTimeoutError,
    RayActorError,
    RayError,
    RayTaskError,
)
from ray.util import list_named_actors

from coati.errors import DeadlineExceeded, PeerDied, PeerUnavailable, StartFailed
from coati.peers import Peer, Peers, PendingCall, remote_error

logger = logging.getLogger(__name__)

_RAY_FIELD = re.compile(r"\t\w+: ")  # "\tpid: 4711", in the text of an ActorDiedError
_RAY_ADVICE = re.compile(r"\.? (Some common causes|There are some potential root causes).*")  # of any death


class RayCall(PendingCall):
    """A call of a Ray actor's method."""

    def __init__(self, name: str, method: str, ref: Any) -> None:
        self._name = name
        self._method = method
        self._ref = ref

    def done(self) -> bool:
        """Whether `result` returns or raises at once."""
        return bool(ray.wait([self._ref], timeout=0)[0])

    def result(self, timeout: float) -> Any:
        """Return what the method returned; see `PendingCall.result` for what it raises."""
        try:
            return ray.get(self._ref, timeout=timeout)
        except RayTaskError as error:  # first: it may also be of the type that the method raised
            raise remote_error(self._name, original_error(error)) from None
        except GetTimeoutError:
            raise DeadlineExceeded(f"{self._name} did not answer {self._method} within {timeout:g} s.") from None
        except ActorUnavailableError as error:
            raise PeerUnavailable(death_reason(error)) from None
        except RayActorError as error:
            raise (StartFailed if error.actor_init_failed else PeerDied)(death_reason(error)) from None
        except RayError as error:  # a lost object, a full disk: the actor may have done what was asked
            raise PeerUnavailable(f"{self._name}: {type(error).__name__}: {death_reason(error)}") from None

    @classmethod
    def wait(cls, calls: Sequence[PendingCall], num_done: int, timeout: float) -> list[PendingCall]:
        """Wait in Ray for all calls at once."""
        by_ref: dict[Any, PendingCall] = {call._ref: call for call in calls if isinstance(call, cls)}
        done, pending = ray.wait(list(by_ref), num_returns=num_done, timeout=timeout)
        if done and pending:  # Ray returns `num_done` at most
            done += ray.wait(pending, num_returns=len(pending), timeout=0)[0]
        return [by_ref[ref] for ref in done]


class RayPeer(Peer):
    """A Ray actor, by its handle."""

    def __init__(self, name: str, handle: Any) -> None:
        super().__init__(name)
        self.handle = handle

    def call(self, method: str, *args: Any, **kwargs: Any) -> RayCall:
        """Start a call of an actor's method."""
        return RayCall(self.name, method, getattr(self.handle, method).remote(*args, **kwargs))


class RayPeers(Peers):
    """Named actors of this process's Ray namespace."""

    def _lookup(self, name: str) -> RayPeer | None:
        try:
            return RayPeer(name, ray.get_actor(name))
        except ValueError:
            return None

    def _names(self) -> Iterable[str]:
        return [str(name) for name in list_named_actors()]

    def share(self, value: Any) -> Any:
        """Put a value into the object store; Ray resolves it in each actor that gets it."""
        return ray.put(value)


def original_error(error: RayTaskError) -> Exception:
    """Return the exception as the other actor raised it; the text of Ray's wrapping is a whole traceback."""
    cause: Exception = error.cause
    while isinstance(cause, RayTaskError):
        cause = cause.cause
    return cause


def death_reason(error: RayError) -> str:
    """Say in one line why an actor died: what its constructor raised, or what Ray says of its process.

    All that Ray says is logged at the level INFO.
    """
    logger.info("%s", error)
    lines = [line.rstrip() for line in str(error).splitlines() if line.strip()]
    # The message of an exception comes after its traceback, which is indented with spaces; what Ray says of a process
    # comes after the fields of its actor, and may be indented with a tab itself.
    outer = [index for index, line in enumerate(lines) if not line.startswith(" ") and not _RAY_FIELD.match(line)]
    begin = next((index for index in reversed(outer) if index - 1 not in outer), len(lines))
    reason = " ".join(line.strip() for line in lines[begin:] if not _RAY_FIELD.match(line))
    if reason in ("", ActorDiedError.BASE_ERROR_MSG):
        return f"its node is gone or its process was killed; Ray gives no reason ({type(error).__name__}). See the log."
    return _RAY_ADVICE.sub("", re.sub(r"^coati\.errors\.\w+: ", "", reason))

"""Peers that are Ray actors."""

import logging
import re
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError, RayError, RayTaskError
from ray.util import list_named_actors

from coati.errors import PeerDied, PeerUnavailable, StartFailed
from coati.peers import Peer, Peers, remote_error

logger = logging.getLogger(__name__)

_RAY_FIELD = re.compile(r"\t\w+: ")  # "\tpid: 4711", in the text of an ActorDiedError
_RAY_ADVICE = re.compile(r"\.? (Some common causes|There are some potential root causes).*")  # of any death


class RayPeer(Peer):
    """A Ray actor, by its handle."""

    def __init__(self, name: str, handle: Any) -> None:
        super().__init__(name)
        self.handle = handle

    def call(self, method: str, *args: Any, **kwargs: Any) -> "Future[Any]":
        """Start a call of an actor's method."""
        return ray_call(self.name, getattr(self.handle, method).remote(*args, **kwargs))


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


def ray_call(name: str, ref: Any) -> "Future[Any]":
    """Return the call of an actor `name` whose result Ray has as `ref`, with the errors that callers know."""
    call: Future[Any] = Future()

    def settle(answered: "Future[Any]") -> None:
        try:
            call.set_result(answered.result())
        except Exception as error:
            call.set_exception(_error_of(name, error))

    ref.future().add_done_callback(settle)
    return call


def _error_of(name: str, error: Exception) -> Exception:
    cause = error
    while isinstance(cause, RayTaskError):  # first: it may also be of the type that the method raised
        cause = cause.cause  # as the other actor raised it; the text of Ray's wrapping is a whole traceback
    if cause is not error or not isinstance(error, RayError):
        return remote_error(name, cause)
    if isinstance(error, ActorUnavailableError):
        return PeerUnavailable(death_reason(error))
    if isinstance(error, RayActorError):
        return (StartFailed if error.actor_init_failed else PeerDied)(death_reason(error))
    # A lost object, a full disk: the actor may have done what was asked.
    return PeerUnavailable(f"{name}: {type(error).__name__}: {death_reason(error)}")


def death_reason(error: RayError) -> str:
    """Say in one line why an actor died: what its constructor raised, or what Ray says of its process."""
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

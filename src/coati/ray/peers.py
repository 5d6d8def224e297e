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
_RAY_ADVICE = re.compile(r"\.? (Some common causes|There are some potential root causes).*")  # the same for every death


class RayPeer(Peer):
    """A Ray actor, called through its handle."""

    def __init__(self, name: str, handle: Any) -> None:
        super().__init__(name)
        self.handle = handle

    def call(self, method: str, *args: Any, **kwargs: Any) -> "Future[Any]":
        """Call a method of the actor without waiting for it."""
        return ray_call(self.name, getattr(self.handle, method).remote(*args, **kwargs))


class RayPeers(Peers):
    """The named actors in this process's Ray namespace."""

    def _lookup(self, name: str) -> RayPeer | None:
        try:
            return RayPeer(name, ray.get_actor(name))
        except ValueError:
            return None

    def _names(self) -> Iterable[str]:
        return [str(name) for name in list_named_actors()]

    def share(self, value: Any) -> Any:
        """Put a value into the object store; Ray resolves the reference in each actor that receives it."""
        return ray.put(value)


def ray_call(name: str, ref: Any) -> "Future[Any]":
    """Wrap the Ray call `ref` to the actor `name` as a future that raises the errors documented in `coati.peers`."""
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
    while isinstance(cause, RayTaskError):  # check this first: it may also be an instance of the method's error type
        cause = cause.cause  # the original exception; the text of Ray's wrapper is a whole traceback
    if cause is not error or not isinstance(error, RayError):
        return remote_error(name, cause)
    if isinstance(error, ActorUnavailableError):
        return PeerUnavailable(death_reason(error))
    if isinstance(error, RayActorError):
        return (StartFailed if error.actor_init_failed else PeerDied)(death_reason(error))
    # For example a lost object or a full disk: the method may have run.
    return PeerUnavailable(f"{name}: {type(error).__name__}: {death_reason(error)}")


def death_reason(error: RayError) -> str:
    """Return one line that says why an actor died: its constructor's error, or Ray's report on its process."""
    logger.info("%s", error)
    lines = [line.rstrip() for line in str(error).splitlines() if line.strip()]
    # An exception's message follows its traceback, which is indented with spaces. Ray's report on a process follows the
    # fields of the actor, and may itself be indented with a tab.
    outer = [index for index, line in enumerate(lines) if not line.startswith(" ") and not _RAY_FIELD.match(line)]
    begin = next((index for index in reversed(outer) if index - 1 not in outer), len(lines))
    reason = " ".join(line.strip() for line in lines[begin:] if not _RAY_FIELD.match(line))
    if reason in ("", ActorDiedError.BASE_ERROR_MSG):
        return f"its node is gone or its process was killed; Ray gives no reason ({type(error).__name__}). See the log."
    return _RAY_ADVICE.sub("", re.sub(r"^coati\.errors\.\w+: ", "", reason))

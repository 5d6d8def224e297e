"""Peers that are Ray actors."""

import logging
import re
import socket
import time
from collections.abc import Iterable, Sequence
from typing import Any

import ray
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    GetTimeoutError,
    RayError,
    RayTaskError,
)
from ray.util import list_named_actors

from coati.config import Deadlines
from coati.errors import ActorNotFound, DeadlineExceeded, PeerDied, PeerUnavailable
from coati.peers import Peer, Peers, PendingCall, remote_error

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.1
_RAY_FIELD = re.compile(r"\t\w+: ")  # "\tpid: 4711", in the text of an ActorDiedError


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
        except GetTimeoutError:
            raise DeadlineExceeded(f"{self._name} did not answer {self._method} within {timeout:g} s.") from None
        except RayTaskError as error:
            raise remote_error(self._name, original_error(error)) from None
        except ActorUnavailableError as error:
            raise PeerUnavailable(death_reason(error)) from None
        except RayError as error:
            raise PeerDied(death_reason(error)) from None

    @classmethod
    def wait(cls, calls: Sequence[PendingCall], num_done: int, timeout: float) -> None:
        """Wait in Ray for all calls at once."""
        ray.wait([call._ref for call in calls if isinstance(call, cls)], num_returns=num_done, timeout=timeout)


class RayPeer(Peer):
    """A Ray actor, by its handle."""

    def __init__(self, name: str, handle: Any) -> None:
        super().__init__(name)
        self.handle = handle

    def has(self, method: str) -> bool:
        """Whether the actor's class defines the method."""
        return hasattr(self.handle, method)

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


class RayHost:
    """Creates and ends actors; the tests have one that works with threads."""

    def start(self, actor_class: Any, ray_options: dict[str, Any], /, **arguments: Any) -> Peer:
        """Create an actor with Ray's options, its name among them."""
        return RayPeer(ray_options["name"], actor_class.options(**ray_options).remote(**arguments))

    def kill(self, peer: Peer) -> None:
        """End an actor's process."""
        assert isinstance(peer, RayPeer)
        try:
            ray.kill(peer.handle)
        except RayError as error:
            logger.debug("could not kill %s: %s", peer.name, error)

    def find_meeting(self, name: str, options: dict[str, Any]) -> PendingCall:
        """Find a node for rank 0 of a group: its id, its address and a free port."""
        return RayCall(name, "rendezvous", _rendezvous.options(**options).remote())

    def free_resources(self) -> dict[str, float]:
        """Return what the cluster has free, by kind."""
        return dict(ray.available_resources())


@ray.remote(num_cpus=0)
def _rendezvous() -> tuple[str, str, int]:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), port


def original_error(error: RayTaskError) -> Exception:
    """Return the exception as the other actor raised it; the text of Ray's wrapping is a whole traceback."""
    cause: Exception = error.cause
    while isinstance(cause, RayTaskError):
        cause = cause.cause
    return cause


def death_reason(error: RayError) -> str:
    """Say in one line why an actor died: what its constructor raised, or what Ray says of its process."""
    lines = [line.rstrip() for line in str(error).splitlines() if line.strip()]
    # The message of an exception comes after its traceback, which is indented with spaces; what Ray says of a process
    # comes after the fields of its actor, and may be indented with a tab itself.
    outer = [index for index, line in enumerate(lines) if not line.startswith(" ") and not _RAY_FIELD.match(line)]
    begin = next((index for index in reversed(outer) if index - 1 not in outer), len(lines))
    reason = " ".join(line.strip() for line in lines[begin:] if not _RAY_FIELD.match(line))
    if reason in ("", ActorDiedError.BASE_ERROR_MSG):
        return f"its node is gone or its process was killed; Ray gives no reason ({type(error).__name__}). See the log."
    return re.sub(r"^coati\.errors\.\w+: ", "", reason)


def find_actor(name: str, *, role: str, deadline_seconds: float) -> Any:
    """The actor of this name. Actors refer to each other before all of them exist, so this waits for it."""
    started = time.monotonic()
    next_message = started + 10.0
    while True:
        try:
            return ray.get_actor(name)
        except ValueError:
            now = time.monotonic()
            if now - started >= deadline_seconds:
                known = ", ".join(sorted(list_named_actors())) or "none"
                raise ActorNotFound(
                    f"no {role} actor named {name!r} appeared within {deadline_seconds:g} s. Actors there "
                    f"are: {known}. Create it with .options(name={name!r}) in the same Ray namespace, or "
                    "correct the name list."
                ) from None
            if now >= next_message:
                logger.info("waiting for the %s actor %r to appear (%.0f s so far)", role, name, now - started)
                next_message = now + 10.0
            time.sleep(_POLL_SECONDS)


def is_alive(name: str) -> bool:
    """Whether an actor of this name exists and answers to it; a dead one loses its name."""
    try:
        ray.get_actor(name)
    except ValueError:
        return False
    return True


class NamedPeers:
    """Handles of named actors, looked up when first needed and kept."""

    def __init__(self, names: Sequence[str], *, role: str, deadlines: Deadlines) -> None:
        self.names = tuple(names)
        self.role = role
        self._deadlines = deadlines
        self._handles: dict[str, Any] = {}

    def handle(self, name: str) -> Any:
        """The actor's handle; waits for it to appear, with a deadline."""
        if name not in self._handles:
            self._handles[name] = find_actor(name, role=self.role, deadline_seconds=self._deadlines.start_seconds)
        return self._handles[name]

    def handle_if_there(self, name: str) -> Any | None:
        """The actor's handle; None if nobody has the name now."""
        if name not in self._handles:
            try:
                self._handles[name] = ray.get_actor(name)
            except ValueError:
                return None
        return self._handles[name]

    def changed_to(self, names: Sequence[str]) -> "NamedPeers":
        """Peers of these names; those that were peers before are not looked up again, dead ones among them."""
        peers = NamedPeers(names, role=self.role, deadlines=self._deadlines)
        peers._handles = {name: handle for name, handle in self._handles.items() if name in peers.names}
        return peers

    def require_some_alive(self, doing: str) -> None:
        """Raise PeerDied if peers that were there are all gone: waiting for them would be for ever."""
        seen = [name for name in self.names if name in self._handles]
        if seen and not any(is_alive(name) for name in self.names):
            raise PeerDied(
                f"every {self.role} ({', '.join(seen)}) is gone while {doing}. See their logs for the cause."
            )

"""Finding other actors by name, and telling whether they are still there."""

import logging
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayActorError, RayTaskError
from ray.util import list_named_actors

from coati.config import Deadlines
from coati.errors import ActorNotFound, DeadlineExceeded, PeerDied

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.1
_RAY_FIELD = re.compile(r"\t\w+: ")  # "\tpid: 4711", in the text of an ActorDiedError


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


def wait_in_slices(
    attempt: Callable[[float], bool],
    *,
    deadline_seconds: float,
    what: Callable[[], str],
    slice_seconds: float = 1.0,
    message_every: float = 30.0,
    between: Callable[[], None] = lambda: None,
) -> None:
    """Repeat `attempt(seconds)` until it is True; between slices look around, and now and then say what for.

    `between` may raise to end the wait early (a stop signal, a dead peer).
    """
    started = time.monotonic()
    next_message = started + message_every
    while not attempt(max(0.0, min(slice_seconds, started + deadline_seconds - time.monotonic()))):
        between()
        now = time.monotonic()
        if now - started >= deadline_seconds:
            raise DeadlineExceeded(f"waited {deadline_seconds:g} s for {what()}.")
        if now >= next_message:
            logger.info("waiting for %s (%.0f s so far)", what(), now - started)
            next_message = now + message_every


def original_error(error: RayTaskError) -> Exception:
    """The exception as the other actor raised it; the text of Ray's wrapping is a whole traceback."""
    cause: Exception = error.cause
    while isinstance(cause, RayTaskError):
        cause = cause.cause
    return cause


def death_reason(error: RayActorError) -> str:
    """Why an actor died, in one line: what its constructor raised, or what Ray says of its process."""
    lines = [line.rstrip() for line in str(error).splitlines() if line.strip()]
    # What an exception says comes after its traceback, which is indented with spaces; what Ray says of a process comes
    # after the fields of its actor, and may be indented with a tab itself.
    outer = [index for index, line in enumerate(lines) if not line.startswith(" ") and not _RAY_FIELD.match(line)]
    begin = next((index for index in reversed(outer) if index - 1 not in outer), len(lines))
    reason = " ".join(line.strip() for line in lines[begin:] if not _RAY_FIELD.match(line))
    if reason in ("", ActorDiedError.BASE_ERROR_MSG):
        return f"its node is gone or its process was killed; Ray gives no reason ({type(error).__name__}). See the log."
    return re.sub(r"^coati\.errors\.\w+: ", "", reason)

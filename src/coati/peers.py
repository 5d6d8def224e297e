"""Calls between the actors of a run, independent of Ray: named peers, pending calls and how a call can fail.

`coati.ray.peers` implements this interface over Ray actors; the tests implement it over threads. A call is a `Future`
with one of four outcomes: a value, `RemoteError` (the method raised), `PeerDied` (the peer is gone, and the call with
it) or `PeerUnavailable` (the connection broke; the method may or may not have run).
"""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, TypeVar

from coati.errors import ActorNotFound, DeadlineExceeded, PeerDied, PeerUnavailable, RemoteError

logger = logging.getLogger(__name__)

Found = TypeVar("Found")

_POLL_SECONDS = 0.1
_MESSAGE_SECONDS = 30.0  # interval between log messages about the same wait


class Peer(ABC):
    """Another actor, called by method name. Calls of one method from one caller run in order."""

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def call(self, method: str, *args: Any, **kwargs: Any) -> "Future[Any]":
        """Start a call; arguments are copied. Never waits, and never raises for a dead peer.

        Raises AttributeError if the peer has no such method: user-defined peers may lack optional ones.
        """


class Peers(ABC):
    """Finds peers by name. A peer is cached once found, so that calls to it fail when it dies instead of waiting."""

    def __init__(self) -> None:
        self._known: dict[str, Peer] = {}

    @abstractmethod
    def _lookup(self, name: str) -> Peer | None:
        """Return the peer that has this name now; a dead peer has none."""

    @abstractmethod
    def _names(self) -> Iterable[str]:
        """List all names, for error messages."""

    @abstractmethod
    def share(self, value: Any) -> Any:
        """Store a value once to pass it to several calls; the methods receive the value itself."""

    def find_now(self, name: str) -> Peer | None:
        """Return the peer of this name, without waiting; None if none has been seen. It may have died since."""
        if name not in self._known and (found := self._lookup(name)) is not None:
            self._known[name] = found
        return self._known.get(name)

    def find(self, name: str, *, role: str, timeout: float) -> Peer:
        """Return the peer of this name, waiting for it to appear; ActorNotFound after `timeout` seconds."""

        def look(seconds: float) -> Peer | None:
            if (peer := self.find_now(name)) is None:
                time.sleep(seconds)
            return peer

        what = f"the {role} actor {name!r} to appear"
        try:
            return wait_in_slices(look, deadline_seconds=timeout, what=lambda: what, slice_seconds=_POLL_SECONDS)
        except DeadlineExceeded:
            raise ActorNotFound(
                f"no {role} actor named {name!r} appeared within {timeout:g} s. Existing actors: "
                f"{', '.join(sorted(self._names())) or 'none'}. Create it with .options(name={name!r}) in the same Ray "
                "namespace, or correct the list of names."
            ) from None

    def ask(
        self, name: str, method: str, *args: Any, what: str, seconds: float, should_stop: Callable[[], bool]
    ) -> Any:
        """Call a method, retrying if the connection breaks, and return its answer; None if the peer is gone.

        Also returns None if a retry is due but `should_stop()` is true. Raises what the method raised, or
        DeadlineExceeded after `seconds`; `what` is the answer's name in messages.
        """
        until = time.monotonic() + seconds
        while (peer := self.find_now(name)) is not None:
            try:
                return peer.call(method, *args).result(max(0.0, until - time.monotonic()))
            except PeerDied:
                self.forget(name)  # a successor may take its name
                break
            except (PeerUnavailable, TimeoutError):
                if time.monotonic() >= until:
                    raise DeadlineExceeded(f"waited {seconds:g} s for {name} to answer {what}.") from None
                if should_stop():
                    break
                time.sleep(_POLL_SECONDS)
            except RemoteError as error:
                error.cause.add_note(f"raised in {name}, which was asked for {what}")
                raise error.cause from None
        return None

    def forget(self, name: str) -> None:
        """Drop the cached peer of this name, so that the next call looks the name up again."""
        self._known.pop(name, None)


class LocalPeer(Peer):
    """An object in this process. Arguments are not copied."""

    def __init__(self, name: str, target: Any) -> None:
        super().__init__(name)
        self._target = target

    def call(self, method: str, *args: Any, **kwargs: Any) -> "Future[Any]":
        """Run the call in the caller's thread."""
        function, call = getattr(self._target, method), Future[Any]()
        try:
            call.set_result(function(*args, **kwargs))
        except Exception as error:
            call.set_exception(remote_error(self.name, error))
        return call


class LocalPeers(Peers):
    """Objects in this process, by name; `targets` may grow."""

    def __init__(self, **targets: Any) -> None:
        super().__init__()
        self.targets = targets

    def _lookup(self, name: str) -> LocalPeer | None:
        return LocalPeer(name, self.targets[name]) if name in self.targets else None

    def _names(self) -> Iterable[str]:
        return self.targets

    def share(self, value: Any) -> Any:
        """Return the value itself; nothing is copied in one process."""
        return value


def remote_error(name: str, cause: Exception) -> RemoteError:
    """Wrap an exception that a method of the peer `name` raised."""
    error = RemoteError(f"{name}: {cause}")
    error.cause = cause
    return error


def wait_for_answer(call: "Future[Any]", what: str, *, seconds: float, who: str) -> Any:
    """Return a call's result, or raise what its method raised; DeadlineExceeded after `seconds`, PeerDied on death.

    `who` and `what` name the peer and its answer in error messages.
    """
    try:
        return call.result(seconds)
    except TimeoutError:
        raise DeadlineExceeded(f"waited {seconds:g} s for {what} ({who} did not answer).") from None
    except RemoteError as error:
        raise error.cause from None
    except (PeerDied, PeerUnavailable) as error:
        raise PeerDied(f"{who} died during the wait for {what}: {error}") from None


def wait_in_slices(
    attempt: Callable[[float], Found | None],
    *,
    deadline_seconds: float,
    what: Callable[[], str],
    slice_seconds: float = 1.0,
    last_progress: Callable[[], float] = lambda: 0.0,
) -> Found:
    """Repeat `attempt(seconds)` until it returns a true value; log `what()` every 30 s. Raises DeadlineExceeded.

    `attempt` may wait up to `seconds`, and may raise to end the wait early. The deadline counts from the start or from
    `last_progress()`, a time of the monotonic clock, whichever is later.
    """
    started = now = time.monotonic()
    next_message = started + _MESSAGE_SECONDS

    def seconds_left() -> float:
        return max(started, last_progress()) + deadline_seconds - now

    while not (found := attempt(max(0.0, min(slice_seconds, seconds_left())))):
        now = time.monotonic()
        if seconds_left() <= 0:
            raise DeadlineExceeded(f"waited {deadline_seconds:g} s for {what()}.")
        if now >= next_message:
            logger.info("waiting for %s (%.0f s so far)", what(), now - started)
            next_message = now + _MESSAGE_SECONDS
    return found

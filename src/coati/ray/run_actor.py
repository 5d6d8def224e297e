"""What the driver knows of one actor of a run."""

import dataclasses
import logging
import time
from typing import Any

from coati.errors import DeadlineExceeded, PeerDied, PeerUnavailable, RemoteError
from coati.peers import Peer, PendingCall

logger = logging.getLogger(__name__)


@dataclasses.dataclass(eq=False)
class RunActor:
    """A row of the table: an actor, what it does, and what it was asked and told."""

    name: str
    peer: Peer
    is_newcomer: bool = False
    """Whether it joins at a user's request: if it fails, the run continues without it."""
    state: str = "loading"
    since: float = dataclasses.field(default_factory=lambda: time.monotonic())
    """When it came into its state."""
    job: PendingCall | None = None
    """What it was asked to do last: a maker its loop, a trainer to sync, fit or save."""
    death: PeerDied | None = None
    has_weights: bool = False
    """Whether a maker has its first weights."""
    questions: dict[str, PendingCall] = dataclasses.field(default_factory=dict)
    """What it was asked and has not answered, by method."""
    asked_at: float = 0.0
    record_cursor: int = 0
    span_cursor: int = 0
    is_stalled: bool = False
    _job_call: tuple[str, tuple[Any, ...]] = "", ()
    # What it was told without waiting for it, by method and the maker that it is about.
    _orders: dict[tuple[str, str], tuple[PendingCall, tuple[Any, ...]]] = dataclasses.field(default_factory=dict)

    def begin(self, state: str, method: str, *args: Any) -> None:
        """Start a job, which brings the actor into a state."""
        self.state, self.since = state, time.monotonic()
        self._job_call = method, args
        self.repeat_job()

    def repeat_job(self) -> None:
        """Start the last job again, whose connection broke."""
        method, args = self._job_call
        self.job = self.peer.call(method, *args)

    def order(self, method: str, *args: Any, about: str = "") -> None:
        """Call a method that may be repeated, and do not wait for it. A later order `about` the same replaces it."""
        self._orders[method, about] = self.peer.call(method, *args), args

    def repeat_lost_orders(self) -> None:
        """Give orders again whose connection broke."""
        for (method, about), (call, args) in list(self._orders.items()):
            if call.done():
                del self._orders[method, about]
                try:
                    call.result(0.0)
                except PeerUnavailable:
                    self.order(method, *args, about=about)
                except PeerDied as error:
                    logger.debug("%s did not take %s: %s", self.name, method, error)
                except RemoteError as error:
                    if not isinstance(error.cause, DeadlineExceeded):  # that of a step it waited for, for example
                        error.cause.add_note(f"raised in {self.name} by {method}")
                        raise error.cause from None
                    logger.warning("%s is told again: %s", self.name, error.cause)
                    self.order(method, *args, about=about)

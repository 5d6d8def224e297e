"""Whether more experience can still come: what a trainer asks its makers while it waits for a batch."""

import logging
import time
from collections.abc import Callable, Sequence

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayTaskError

from coati.config import Deadlines
from coati.errors import ActorNotFound, PeerDied
from coati.ray.peers import is_alive

logger = logging.getLogger(__name__)

_ASK_EVERY_SECONDS = 2.0
# A maker in one of these makes nothing more, unless somebody starts its loop again.
_OVER = frozenset({"finished", "failed", "gone"})
_ABSENT = frozenset({"missing", "failed", "gone"})


def ask_states(names: Sequence[str]) -> dict[str, str]:
    """What each maker does: the state it tells, or "busy", "unknown", "missing" (no such name), "gone"."""
    states: dict[str, str] = {}
    asked = {}
    for name in names:
        try:
            asked[name] = ray.get_actor(name).progress.remote()
        except ValueError:
            states[name] = "missing"
        except AttributeError:
            states[name] = "unknown"  # a hand-written maker that does not tell
    if asked:
        ray.wait(list(asked.values()), num_returns=len(asked), timeout=_ASK_EVERY_SECONDS)
    for name, ref in asked.items():
        try:
            states[name] = str(ray.get(ref, timeout=0).state)
        except (GetTimeoutError, ActorUnavailableError):
            states[name] = "busy"  # it loads its models, or its connection is broken for now
        except RayActorError:
            states[name] = "gone"
        except (RayTaskError, AttributeError):
            states[name] = "unknown"
    return {name: states[name] for name in names}


class MakerWatch:
    """Asks the makers, now and then.

    One watch lasts for one `fit`, so that a maker that vanished is told from one that is late.
    """

    def __init__(
        self,
        names: Sequence[str],
        deadlines: Deadlines,
        *,
        ask: Callable[[Sequence[str]], dict[str, str]] = ask_states,
        exists: Callable[[str], bool] = is_alive,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._names = tuple(names)
        self._newcomers: frozenset[str] = frozenset()
        self._deadlines = deadlines
        self._ask = ask
        self._clock = clock
        self._seen = {name for name in self._names if exists(name)}
        self._states: dict[str, str] = {}
        self._last_asked = float("-inf")
        self._over_since: float | None = None
        self.begin_wait()

    def follow(self, names: Sequence[str], *, newcomers: Sequence[str] = ()) -> None:
        """Watch these makers from now on. One that is not among them left by design: it is not gone.

        More may come from `newcomers` too, but nothing is expected of them yet: nobody misses one that is gone.
        """
        self._names = tuple(names)
        self._newcomers = frozenset(newcomers)

    def begin_wait(self) -> None:
        """A new wait for a batch begins: time in which batches come counts against nobody."""
        self._incomplete_since: float | None = None
        self._next_message = self._deadlines.message_seconds

    def all_finished(self) -> bool:
        """Whether every maker has been finished for the time of grace.

        Raises PeerDied if all are gone, or have failed; ActorNotFound if nobody works and some never
        appeared.
        """
        now = self._clock()
        if now - self._last_asked >= _ASK_EVERY_SECONDS:
            self._last_asked = now
            self._look(now)
        if self._over_since is None or now - self._over_since < self._deadlines.grace_seconds:
            return False
        if "finished" not in self._states.values():
            raise PeerDied(f"no maker is left at work ({self.describe()}), so no experience will come. See their logs.")
        return True

    def gone(self) -> list[str]:
        """Makers that died or failed, as of the last look."""
        counted = (name for name in self._names if name not in self._newcomers)
        return [name for name in counted if self._states.get(name) in ("gone", "failed")]

    def describe(self) -> str:
        """One phrase for each maker."""
        return ", ".join(f"{name} is {state}" for name, state in self._states.items()) or "none are named"

    def speak(self, waited: float) -> None:
        """Say what is waited for, now and then."""
        if waited >= self._next_message:
            self._next_message += self._deadlines.message_seconds
            logger.info("fit waits for experience, %.0f s so far; makers: %s", waited, self.describe())

    def _look(self, now: float) -> None:
        self._states = {
            # Named but never seen: it may still be created. A dead actor loses its name.
            name: "gone" if state == "missing" and name in self._seen else state
            for name, state in self._ask(self._names).items()
        }
        self._seen |= {name for name, state in self._states.items() if state != "missing"}
        unmissed = {name for name in self._newcomers if self._states.get(name) in _ABSENT}
        states = {state for name, state in self._states.items() if name not in unmissed}
        if states == {"gone"}:
            raise PeerDied(f"every maker is gone ({self.describe()}), so no experience will come. See their logs.")
        is_over = bool(states) and states <= _OVER
        self._over_since = _since(self._over_since, now) if is_over else None
        is_incomplete = "missing" in states and states <= _OVER | {"missing"}
        self._incomplete_since = _since(self._incomplete_since, now) if is_incomplete else None
        if self._incomplete_since is not None and now - self._incomplete_since >= self._deadlines.start_seconds:
            late = [name for name, state in self._states.items() if state == "missing"]
            raise ActorNotFound(
                f"no maker actor named {' or '.join(map(repr, late))} appeared within "
                f"{self._deadlines.start_seconds:g} s ({self.describe()}). Create it with .options(name=…) in the "
                "same Ray namespace, or correct experience_maker_holder_name_list."
            )


def _since(earlier: float | None, now: float) -> float:
    return now if earlier is None else earlier

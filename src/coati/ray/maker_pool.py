"""The makers of a run while it trains: those that die are replaced, and some may join or leave.

All of it comes down to leases. A maker that joins gets all weights from a trainer and asks for work; one that leaves
stops asking; the leases of one that died go to others, and to its successor. So nothing here waits: the driver calls
`advance` at each turn of its loop.
"""

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from coati.counting import listed
from coati.errors import PeerDied, PeerUnavailable, RemoteError, ScalingRefused
from coati.monitor.control import MAX_MAKERS
from coati.peers import PendingCall, wait_any
from coati.ray.restarts import Restarts
from coati.ray.run_actors import RunActors

logger = logging.getLogger(__name__)


class MakerPool:
    """Starts makers' loops and follows them.

    `before_end(names)` is called before makers are ended, to fetch what they have recorded; `after_death(name)` when
    one has died.
    """

    def __init__(
        self,
        actors: RunActors,
        prompts: Callable[[], Any],
        *,
        restarts: Restarts,
        before_end: Callable[[Sequence[str]], None],
        after_death: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._actors = actors
        self._prompts = prompts
        self._restarts = restarts
        self._before_end = before_end
        self._after_death = after_death
        self._clock = clock
        self._loops: dict[PendingCall, str] = {}
        self._joining: dict[str, PendingCall] = {}  # makers without weights yet, and what they were asked
        self._leaving: set[str] = set()
        self._replacements: dict[str, float] = {}  # makers to start again, and when

    @property
    def size(self) -> int:
        """Makers that are to stay."""
        return len(self._actors.makers.keys() - self._leaving - self._joining.keys()) + len(self._replacements)

    @property
    def working(self) -> list[str]:
        """Makers whose loops have not ended."""
        return list(self._loops.values())

    def start(self, name: str) -> None:
        """Start a maker's loop; it waits for weights first."""
        self._loops[self._actors.makers[name].call("workingloop", self._prompts)] = name

    def wind_up(self, timeout: float) -> None:
        """Wait for some loops to end, at the end of a run: what becomes of them does not matter any more."""
        for call in wait_any(self._loops, timeout):
            del self._loops[call]

    # Joining and leaving

    def scale_to(self, makers: int) -> None:
        """Begin to have so many makers; `advance` returns what remains to be waited for. Raises ScalingRefused."""
        if not 1 <= makers <= MAX_MAKERS:
            raise ScalingRefused(f"a run can have 1 to {MAX_MAKERS} makers, got {makers}.")
        if makers > self.size:
            names = self._actors.name_newcomers(makers - self.size)
            try:
                for name in names:
                    self._create(name)
                    self._joining[name] = self._actors.makers[name].call("progress")
            except Exception as error:
                self._turn_away(names, error)
        else:
            while self._replacements and self.size > makers:
                self._replacements.popitem()  # the dead need not come back
            newest = reversed(self._actors.makers)
            self._leaving = set(itertools.islice(newest, self.size - makers))
            for name in self._leaving:
                self._actors.order(self._actors.makers[name], "stop")

    def advance(self) -> str:
        """Do what is due; returns what is waited for until makers have joined or left, "" if nothing is.

        Raises ScalingRefused if makers cannot join, PeerDied if too many died, and what a maker's loop raised.
        """
        for call in wait_any(self._loops, 0.0):
            self._end(self._loops.pop(call), call)
        self._replace_some()
        self._actors.note_loaded()
        self._welcome()
        if self._joining:
            return f"{listed(self._joining)} loading models and waiting for weights"
        return f"{listed(sorted(self._leaving))} finishing its work, then leaving" if self._leaving else ""

    def _create(self, name: str) -> None:
        self._actors.create_newcomer(name)
        self.start(name)

    def _welcome(self) -> None:
        """Note which makers have their first weights."""
        for name, call in list(self._joining.items()):
            if call.done():
                try:
                    has_weights = call.result(0.0).has_weights
                except (RemoteError, PeerDied, PeerUnavailable):
                    has_weights = False  # if it died, its loop fails too, and says why
                if has_weights:
                    del self._joining[name]
                else:
                    self._joining[name] = self._actors.makers[name].call("progress")

    # Ends of loops

    def _end(self, name: str, call: PendingCall) -> None:
        try:
            call.result(0.0)
        except (RemoteError, PeerDied, PeerUnavailable) as error:
            if name in self._joining:
                self._turn_away(list(self._joining), error)
            elif isinstance(error, RemoteError):
                error.cause.add_note(f"raised in {name}")
                raise error.cause from None
            else:
                self._bury(name, error)
        else:
            self._before_end([name])
            self._dismiss(name, "left")

    def _turn_away(self, names: Sequence[str], error: Exception) -> NoReturn:
        """A maker that was to join failed: the run does not need it, nor those that were to join with it."""
        self._joining = {}
        self._loops = {call: name for call, name in self._loops.items() if name not in names}
        for name in names:
            self._dismiss(name, "could not join")
        reason = str(error.cause if isinstance(error, RemoteError) else error) or type(error).__name__
        raise ScalingRefused(f"{listed(names)} could not join; training continues without: {reason}") from error

    def _bury(self, name: str, error: Exception) -> None:
        """Have the leases of a maker that died granted to others, and plan its successor."""
        is_leaving = name in self._leaving
        self._after_death(name)
        self._dismiss(name, f"died: {error}")  # trainers hear of it now, so that its successor is a new maker to them
        if is_leaving:
            return
        seconds = self._restarts.take("makers", name, error)
        logger.warning("%s died and is started again in %g s: %s", name, seconds, error)
        self._replacements[name] = self._clock() + seconds

    def _replace_some(self) -> None:
        for name in [name for name, due in self._replacements.items() if self._clock() >= due]:
            del self._replacements[name]
            self._create(name)

    def _dismiss(self, name: str, reason: str) -> None:
        self._leaving.discard(name)
        self._actors.release(name, reason)
        self._actors.dismiss(name)
        self._actors.tell_trainers()

"""Add or remove makers while a run trains.

Joining: a new maker loads its models, is added to the update list of one trainer and gets all weights with the next
version; then the rounds that no maker has begun are redistributed, and it starts. If anything fails before that, the
newcomers are removed and the run continues as it was. Leaving: the rounds are redistributed first; the maker finishes
what it has, is removed from the trainers' lists, and ends.

The driver has other work meanwhile, so this is a generator that it advances at each turn of its loop; the yielded text
says what is waited for.
"""

import logging
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from coati.config import Deadlines
from coati.counting import listed
from coati.errors import CoatiError, DeadlineExceeded, ScalingRefused, WeightUpdateError
from coati.ledger import WorkShare
from coati.monitor.control import MAX_MAKERS
from coati.peers import PendingCall, answer, wait_all
from coati.ray.run_actors import RunActors, makers_to_leave, trainer_for_newcomer

logger = logging.getLogger(__name__)

# For a newcomer to accept its first share. All other makers are paused meanwhile.
_FIRST_PART_SECONDS = 30.0


class _Part(NamedTuple):
    """A maker's new share and prompts."""

    share: WorkShare
    loader_fn: Callable[[], Any]


class Scaler:
    """Changes the number of makers.

    `start(name, prompts)` starts the loop of a maker that joined; `is_working(name)` tells whether its loop is running;
    `before_end(names)` is called before makers are killed, to fetch what they have recorded.
    """

    def __init__(
        self,
        actors: RunActors,
        *,
        deadlines: Deadlines,
        is_private: bool,
        start: Callable[[str, Callable[[], Any]], None],
        is_working: Callable[[str], bool],
        before_end: Callable[[Sequence[str]], None],
    ) -> None:
        self._actors = actors
        self._deadlines = deadlines
        self._is_private = is_private
        self._start = start
        self._is_working = is_working
        self._before_end = before_end

    def scale_to(self, makers: int) -> Iterator[str]:
        """Change the number of makers. Raises ScalingRefused if that fails; the run then continues as it was."""
        if not 1 <= makers <= MAX_MAKERS:
            raise ScalingRefused(f"a run can have 1 to {MAX_MAKERS} makers, got {makers}.")
        have = len(self._actors.membership.members)
        if makers > have:
            yield from self._grow(makers - have)
        elif makers < have:
            yield from self._shrink(have - makers)

    def _grow(self, count: int) -> Iterator[str]:
        actors = self._actors
        names = actors.name_newcomers(count, is_private=self._is_private)
        try:
            yield from self._prepare(names)
            parts = self._begin_deal(joining=names)
        except Exception as error:
            # Whatever it is (a node that dies, a missing model, a bug in a reward), the run does not need newcomers.
            yield from self._turn_away(names)
            reason = str(error) or type(error).__name__
            raise ScalingRefused(f"{listed(names)} could not join; training continues without: {reason}") from error
        actors.admit(names)
        self._end_deal({name: part for name, part in parts.items() if name not in names})
        for name in names:
            self._start(name, parts[name].loader_fn)
        yield from self._settle(names)

    def _prepare(self, names: Sequence[str]) -> Iterator[str]:
        """Create newcomers, and wait until they have their models and the weights of a version."""
        actors, start, newcomers = self._actors, self._deadlines.start_seconds, listed(names)
        actors.create_newcomers(names, is_private=self._is_private)
        what = f"{newcomers} to start and load {'its' if len(names) == 1 else 'their'} models"
        yield from self._await_all(self._ask_progress(names), seconds=start, what=what)
        for name in names:
            actors.updaters[name] = trainer_for_newcomer(actors.updaters, len(actors.trainers))
        yield from self._await_trainers(self._tell_trainers(newcomers=names))
        yield from self._await_weights(names)

    def _turn_away(self, names: Sequence[str]) -> Iterator[str]:
        """Remove newcomers. They are killed first: a trainer in the middle of an update waits for them."""
        actors = self._actors
        were_told = [name for name in names if actors.updaters.pop(name, None) is not None]
        told = self._tell_trainers() if were_told else {}
        actors.dismiss(names)
        try:
            yield from self._await_trainers(told)
        except CoatiError as error:  # the calls are queued; trainers work without newcomers that died
            logger.warning("not all trainers have confirmed that makers did not join: %s", error)

    def _settle(self, names: Sequence[str]) -> Iterator[str]:
        """Have trainers depend on makers that joined. One that missed an update meanwhile is removed again."""
        try:
            yield from self._await_trainers(self._tell_trainers())
            faults = yield from self._await_trainers(self._ask_faults())
        except DeadlineExceeded as error:
            joined = f"{listed(names)} {'has' if len(names) == 1 else 'have'} joined"
            logger.warning("%s, but not all trainers have confirmed it: %s", joined, error)
            return
        if reason := _reason(faults, names):
            yield from self._send_away(names)
            raise ScalingRefused(f"{listed(names)} joined and had to leave again: {reason}")

    def _shrink(self, count: int) -> Iterator[str]:
        actors = self._actors
        yield from self._send_away(
            makers_to_leave({name: actors.updaters[name] for name in actors.membership.members}, count)
        )

    def _send_away(self, names: Sequence[str]) -> Iterator[str]:
        actors = self._actors
        try:
            parts = self._begin_deal(leaving=names)
        except DeadlineExceeded as error:
            raise ScalingRefused(
                f"{listed(names)} cannot be removed now; training continues as before: {error}"
            ) from error
        self._end_deal(parts)
        while working := [name for name in names if self._is_working(name)]:
            yield f"{listed(working)} finishing its work, then leaving"
        self._before_end(names)
        for name in names:
            actors.updaters.pop(name)
        try:
            yield from self._await_trainers(self._tell_trainers())
        except DeadlineExceeded as error:  # a trainer whose makers are all gone would give up
            are = "is" if len(names) == 1 else "are"
            raise ScalingRefused(f"{listed(names)} {are} idle but could not be removed: {error}") from error
        actors.dismiss(names)

    def _begin_deal(self, *, joining: Sequence[str] = (), leaving: Sequence[str] = ()) -> dict[str, _Part]:
        """Pause all makers and redistribute the rounds that none has begun.

        Newcomers get their shares now, the others in `_end_deal`. If anything fails before that, all makers continue
        with the shares they had.
        """
        actors, start = self._actors, self._deadlines.start_seconds
        before = actors.membership.shares
        try:
            held = {name: actors.makers[name].call("hold_work") for name in before}
            standings = _answers(held, "makers to pause", seconds=start)
            places = actors.membership.redeal(standings, joining=joining, leaving=leaving)
            parts = {name: _Part(place.share, actors.prompts(place.prompts)) for name, place in places.items()}
            taken = {name: actors.joining[name].call("deal_work", *parts[name]) for name in joining}
            _answers(taken, "newcomers to accept their work", seconds=min(_FIRST_PART_SECONDS, start))
        except BaseException:
            actors.membership.restore(before)
            for name, share in before.items():  # one that paused too late gets this after that
                actors.makers[name].call("deal_work", share, None)
            raise
        return parts

    def _end_deal(self, parts: Mapping[str, _Part]) -> None:
        """Resume paused makers with their new shares."""
        dealt = {name: self._actors.makers[name].call("deal_work", *part) for name, part in parts.items()}
        try:
            _answers(dealt, "makers to accept their work", seconds=self._deadlines.start_seconds)
        except DeadlineExceeded as error:  # the calls are queued, and they resume when they get there
            logger.warning("%s", error)

    def _ask_progress(self, names: Sequence[str]) -> dict[str, PendingCall]:
        return {name: self._actors.joining[name].call("progress") for name in names}

    def _ask_faults(self) -> dict[str, PendingCall]:
        return {name: trainer.call("newcomer_faults") for name, trainer in self._actors.trainers.items()}

    def _tell_trainers(self, *, newcomers: Sequence[str] = ()) -> dict[str, PendingCall]:
        """Send each trainer the makers of the run and those it updates; `newcomers` have no work yet."""
        names = list(self._actors.updaters)
        told = {}
        for rank, (trainer_name, trainer) in enumerate(self._actors.trainers.items()):
            updated = [name for name in names if self._actors.updaters[name] == rank]
            told[trainer_name] = trainer.call("change_makers", names, updated, newcomers=list(newcomers))
        return told

    def _await_trainers(self, calls: Mapping[str, PendingCall]) -> Generator[str, None, dict[str, Any]]:
        """Wait for trainers; one in the middle of a step answers after it."""
        return (
            yield from self._await_all(calls, seconds=self._deadlines.update_seconds, what="the trainers to confirm")
        )

    def _await_weights(self, names: Sequence[str]) -> Iterator[str]:
        what = f"{listed(names)} to get the weights of the next version"
        deadline = time.monotonic() + self._deadlines.batch_seconds
        while True:
            calls = {**self._ask_progress(names), **self._ask_faults()}
            answers = yield from self._await_all(calls, seconds=self._deadlines.update_seconds, what=what)
            if reason := _reason({trainer: answers[trainer] for trainer in self._actors.trainers}, names):
                raise WeightUpdateError(reason)
            if all(answers[name].has_weights for name in names):
                return
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(f"waited {self._deadlines.batch_seconds:g} s for {what}.")
            yield f"waiting for {what}"

    def _await_all(
        self, calls: Mapping[str, PendingCall], *, seconds: float, what: str
    ) -> Generator[str, None, dict[str, Any]]:
        """Return the answers by name. Raises the first error at once."""
        deadline = time.monotonic() + seconds
        waiting = {call: name for name, call in calls.items()}
        answers = {}
        while waiting:
            for call in wait_all(waiting, 0.0):
                name = waiting.pop(call)
                answers[name] = answer(call, what, seconds=seconds, who=name)
            if waiting and time.monotonic() >= deadline:
                raise DeadlineExceeded(f"waited {seconds:g} s for {what} ({listed(waiting.values())} did not answer).")
            if waiting:
                yield f"waiting for {what}"
        return answers


def _answers(calls: Mapping[str, PendingCall], what: str, *, seconds: float) -> dict[str, Any]:
    return {name: answer(call, what, seconds=seconds, who=name) for name, call in calls.items()}


def _reason(faults: Mapping[str, Mapping[str, str]], names: Sequence[str]) -> str | None:
    """Return the trainers' complaints about these makers in one line; None if there are none."""
    said = {name: reason for by_name in faults.values() for name, reason in by_name.items() if name in names}
    return "; ".join(f"{name}: {reason}" for name, reason in said.items()) or None

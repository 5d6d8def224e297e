"""More makers, or fewer, while a run trains.

Joining: the new makers load their models; each is added to the update list of one trainer and gets all weights with
the next version; then the rounds that nobody has begun are dealt anew, and it starts. Whatever fails before that deal
leaves the run as it was. Leaving: the deal comes first; who leaves finishes what it had been dealt, is taken off the
trainers' lists, and ends.

The driver has other things to do meanwhile, so this is written as a generator that it goes on with at each turn of its
loop; what is yielded says what is waited for.
"""

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

import ray

from coati.deadlines import Deadlines
from coati.errors import CoatiError, DeadlineExceeded, ScalingRefused
from coati.monitor.control import MAX_MAKERS
from coati.ray.crew import Crew, get
from coati.ray.topology import makers_to_leave, trainer_for_newcomer


class Scaler:
    """Changes the makers of a crew.

    `start(name)` begins the loop of a maker that has its place; `is_working(name)` says whether its loop goes on;
    `before_end()` is called before makers end, to fetch what they have recorded.
    """

    def __init__(
        self,
        crew: Crew,
        *,
        deadlines: Deadlines,
        is_private: bool,
        start: Callable[[str, Callable[[], Any]], None],
        is_working: Callable[[str], bool],
        before_end: Callable[[], None],
    ) -> None:
        self._crew = crew
        self._deadlines = deadlines
        self._is_private = is_private
        self._start = start
        self._is_working = is_working
        self._before_end = before_end

    def scale_to(self, makers: int) -> Iterator[str]:
        """Go on until the run has so many makers. Raises ScalingRefused if it cannot, and the run goes on as it was."""
        if not 1 <= makers <= MAX_MAKERS:
            raise ScalingRefused(f"a run can have 1 to {MAX_MAKERS} makers, got {makers}.")
        have = len(self._crew.membership.members)
        if makers > have:
            yield from self._grow(makers - have)
        elif makers < have:
            yield from self._shrink(have - makers)

    def _grow(self, count: int) -> Iterator[str]:
        crew = self._crew
        names = crew.create_newcomers(count, is_private=self._is_private)
        newcomers = ", ".join(names)
        try:
            yield from self._await_all(
                lambda: [crew.joining[name].progress.remote() for name in names],
                seconds=self._deadlines.start,
                what=f"{newcomers} to start and load their models",
            )
            for name in names:
                crew.updaters[name] = trainer_for_newcomer(crew.updaters, len(crew.trainers))
            yield from self._tell_trainers()
            yield from self._await_weights(names)
        except CoatiError as error:
            crew.dismiss(names)
            yield from self._tell_trainers()
            raise ScalingRefused(f"{newcomers} could not join, so the run goes on without: {error}") from error
        parts = self._deal(joining=names)
        crew.take_in(names)
        for name in names:
            self._start(name, parts[name])

    def _shrink(self, count: int) -> Iterator[str]:
        crew = self._crew
        names = makers_to_leave({name: crew.updaters[name] for name in crew.membership.members}, count)
        self._deal(leaving=names)
        while working := [name for name in names if self._is_working(name)]:
            yield f"{', '.join(working)} finishing what was begun, then leaving"
        self._before_end()
        for name in names:
            crew.updaters.pop(name)
        yield from self._tell_trainers()
        crew.dismiss(names)

    def _deal(self, *, joining: Sequence[str] = (), leaving: Sequence[str] = ()) -> dict[str, Callable[[], Any]]:
        """Hold everybody, deal, and let go: a moment, in which nobody waits for anybody but us."""
        crew = self._crew
        handles = {**crew.makers, **crew.joining}
        held = {name: handles[name].hold_work.remote() for name in crew.membership.members}
        places = crew.membership.redeal(self._answers(held), joining=joining, leaving=leaving)
        parts = {name: crew.prompts(place.prompts) for name, place in places.items()}
        self._answers(
            {name: handles[name].deal_work.remote(place.share, parts[name]) for name, place in places.items()}
        )
        return parts

    def _answers(self, refs: Mapping[str, Any]) -> dict[str, Any]:
        seconds = self._deadlines.start
        return {name: get(ref, "work to be dealt anew", seconds=seconds, who=name) for name, ref in refs.items()}

    def _tell_trainers(self) -> Iterator[str]:
        """Who makes experience now, and whom each trainer updates. One in the middle of a step answers after it."""
        crew = self._crew
        names = list(crew.updaters)
        yield from self._await_all(
            lambda: [
                trainer.change_makers.remote(names, [name for name in names if crew.updaters[name] == rank])
                for rank, trainer in enumerate(crew.trainers.values())
            ],
            seconds=self._deadlines.update,
            what="the trainers to take note",
        )

    def _await_weights(self, names: Sequence[str]) -> Iterator[str]:
        what = f"{', '.join(names)} to get the weights of the next version"
        deadline = time.monotonic() + self._deadlines.batch
        while True:
            progress = yield from self._await_all(
                lambda: [self._crew.joining[name].progress.remote() for name in names],
                seconds=self._deadlines.update,
                what=what,
            )
            if all(one.has_weights for one in progress):
                return
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(f"waited {self._deadlines.batch:g} s for {what}.")
            yield f"waiting for {what}"

    def _await_all(self, ask: Callable[[], list[Any]], *, seconds: float, what: str) -> Generator[str, None, list[Any]]:
        refs = ask()
        deadline = time.monotonic() + seconds
        while len(ray.wait(refs, num_returns=len(refs), timeout=0.0)[0]) < len(refs):
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(f"waited {seconds:g} s for {what}.")
            yield f"waiting for {what}"
        answers: list[Any] = get(refs, what, seconds=seconds)
        return answers

"""The lease: one rule for who may write what, when a batch may be formed, and what becomes of the work of the dead.

A lease is the right and the duty to make one group of samples. A trainer has a `Ledger` of the leases that are made for
it; makers ask for leases and get as many as the two limits allow:

* `lead`: at most (lead + 1) versions' worth of samples are granted and not trained. It decides how fresh data is.
* `max_staleness`, η: a lease granted to a maker that serves version v has the deadline v + η, the last version at which
  it may be trained on. It is granted only if everything that is open still fits before its own deadline.

Delivered groups are picked for training earliest deadline first, and one may go ahead of others only while all of those
still fit before theirs. So the trainer waits for a slow group only in the last batch that may hold it, and no sample is
older than η versions. With η = 0 groups are picked in the order of their numbers, so a run repeats to the bit.

    asked for ──► open ──► delivered ──► picked ──► trained
                 ▲    │ └──► dropped (and another takes its place)
                 └────┘ returned: its maker died, left, stalled, or is too slow

Whatever changes is an event (`Ledger.events`), and the same events make the same ledger.
"""

import dataclasses
import heapq
from collections import Counter, deque
from collections.abc import Collection, Mapping
from typing import Any, Self

from coati.ledger.rules import Event, Lease, LeaseRequest, LedgerRules, Pace, Paces

_NEVER = 2**62  # the deadline of leases in a run without a bound
_COUNTERS = ("version", "num_picked", "num_numbers", "num_dropped", "num_trained")


@dataclasses.dataclass(slots=True)
class Work:
    """A lease that has not come to its end."""

    number: int
    state: str = "returned"  # "open", "returned", "delivered" or "picked"
    epoch: int = -1
    maker: str = ""
    version: int = 0
    deadline: int = _NEVER
    slow_maker: str = ""  # which it was taken back from


class Ledger:
    """The leases of one trainer. Not thread-safe; `now` is any clock that does not go back.

    >>> ledger = Ledger(LedgerRules(samples_per_version=2, total_samples=6, lead=0, max_staleness=0))
    >>> leases = ledger.lease(LeaseRequest("maker-0", number=1, version=0, wanted=8), now=0.0)
    >>> [lease.number for lease in leases]
    [0, 1]
    >>> ledger.deliver(leases[1:], now=1.0) == leases[1:], ledger.pick()  # 0 comes first
    (True, None)
    >>> ledger.deliver(leases[:1], now=1.0) == leases[:1], ledger.pick(), ledger.pick()
    (True, 0, 1)
    >>> ledger.mark_trained(version=1)
    >>> [lease.number for lease in ledger.lease(LeaseRequest("maker-0", number=2, version=1, wanted=8), now=2.0)]
    [2, 3]
    """

    def __init__(self, rules: LedgerRules) -> None:
        self.rules = rules
        self.version = 0
        self.num_picked = 0  # samples
        self.events: list[Event] = []  # what has changed; the owner takes it from here
        self._first_epoch = 0
        self.num_numbers = 0  # granted at least once
        self.num_dropped = 0  # numbers
        self.num_trained = 0  # samples
        self._works: dict[int, Work] = {}
        self._picked: deque[int] = deque()  # numbers, not trained on yet
        self._returned: list[int] = []  # a heap of numbers
        self._delivered: list[tuple[int, int]] = []  # a heap of (deadline, number)
        self._due: Counter[int] = Counter()  # samples open or delivered, by deadline
        self._answers: dict[str, tuple[tuple[int, int], list[Lease] | None]] = {}  # to the last request, by maker
        self._paces = Paces()
        self._taken_back: dict[Lease, str] = {}  # from which maker, until that one has ended it too

    # What makers do

    def lease(self, request: LeaseRequest, *, now: float) -> list[Lease]:
        """Take account of what came to nothing, and grant leases for up to as many samples as a maker wants.

        A maker numbers its requests from 1: one that is repeated because its answer was lost gets the same answer, and
        one that was overtaken by a later one, or comes from a predecessor (a lower incarnation), gets nothing.
        """
        maker, ask, incarnation, version = request.maker, request.number, request.incarnation, request.version
        for ending in request.endings:
            self.drop(ending.lease, ending.reason, fate=ending.fate, now=now)
        (last_incarnation, last_ask), answer = self._answers.get(maker, ((-1, 0), None))
        if (incarnation, ask) == (last_incarnation, last_ask) and answer is not None:
            return answer
        if incarnation < last_incarnation or (incarnation == last_incarnation and 1 < ask <= last_ask):
            return []
        if ask == 1:  # a request of its predecessor may have come after `release`
            self.release(maker, "its maker was started again")
        pace = self._paces.setdefault(maker, Pace(since=now))
        numbers: list[int] = []
        size = self.rules.group_size
        for _ in range(min(request.wanted, self._share(maker, now) - pace.held) // size):
            number = self._next_for(maker, now)
            if not self._may_grant(number, version):
                break
            for late in [one for one, owner in self._taken_back.items() if (one.number, owner) == (number, maker)]:
                self._end_late(late, now, is_made=False)  # it is made once, for this grant
            self._apply_grant(number, maker, version)
            pace.hold(size, now)
            numbers.append(number)
        if numbers:
            pace.note_request()
            self.events.append({"grant": numbers, "maker": maker, "version": version})
        pace.room = 0 if numbers else request.wanted
        leases = [Lease(number, self._works[number].epoch) for number in numbers]
        self._answers[maker] = (incarnation, ask), leases
        return leases

    def deliver(self, leases: Collection[Lease], *, now: float) -> list[Lease]:
        """Take in groups that were made; returns those that are wanted. The others were fenced, or came before."""
        fresh = [lease for lease in leases if self._is_open(lease)]
        if refused := [lease for lease in leases if lease not in fresh]:
            self.events.append({"refuse": [lease.number for lease in refused]})
            for lease in refused:
                self._end_late(lease, now, is_made=True)
        for lease in fresh:
            self._paces[self._works[lease.number].maker].end(self.rules.group_size, now)
        if fresh:
            self._change({"deliver": [lease.number for lease in fresh]})
        return fresh

    def drop(self, lease: Lease, reason: str, *, fate: str = "drop", now: float) -> bool:
        """End a lease for which nothing comes (`fate`: "drop" or "quarantine"); another takes its place."""
        if not self._is_open(lease):
            self._end_late(lease, now, is_made=False)
            return False
        self._paces[self._works[lease.number].maker].end(self.rules.group_size, now, is_made=False)
        self._change({fate: [lease.number], "reason": reason})
        return True

    def _is_open(self, lease: Lease) -> bool:
        work = self._works.get(lease.number)
        return work is not None and work.state == "open" and work.epoch == lease.epoch

    def _end_late(self, lease: Lease, now: float, *, is_made: bool) -> None:
        """A maker has ended a lease that may have been taken back from it."""
        if (maker := self._taken_back.pop(lease, None)) is not None:
            self._paces[maker].end(self.rules.group_size, now, is_made=is_made)

    # What becomes of makers

    @property
    def makers(self) -> list[str]:
        """Makers that have asked for leases and not gone."""
        return list(self._paces)

    def release(self, maker: str, reason: str) -> list[int]:
        """A maker is gone: its open leases are granted again, to others or to its successor."""
        self._paces.pop(maker, None)
        self._taken_back = {lease: name for lease, name in self._taken_back.items() if name != maker}
        if maker in self._answers:  # what it asked before is not granted any more
            self._answers[maker] = self._answers[maker][0], None
        numbers = sorted(work.number for work in self._works.values() if work.state == "open" and work.maker == maker)
        if numbers:
            self._change({"return": numbers, "reason": reason})
        return numbers

    def take_back(self, *, now: float) -> list[int]:
        """Return leases of slow makers that a much quicker one has room for, each at most once, when a batch waits.

        It goes by the maker's speed, so that long responses are not starved.
        """
        size, numbers = self.rules.group_size, []
        quicker = {maker: self._paces.quicker_than(maker, now) for maker in self._paces}
        works = [work for work in self._works.values() if work.state == "open" and not work.slow_maker]
        for work in sorted(works, key=lambda work: (work.deadline, work.number)):
            paces = (self._paces[name] for name in quicker.get(work.maker, ()))
            if (pace := next((pace for pace in paces if pace.room >= size), None)) is not None:
                pace.room -= size
                self._taken_back[Lease(work.number, work.epoch)] = work.maker
                numbers.append(work.number)
        if numbers:
            self._change({"return": numbers, "reason": "slow maker", "is_slow": True})
        return numbers

    # What the trainer does

    @property
    def picked(self) -> list[int]:
        """Numbers of the groups that were picked and are not trained on, in that order."""
        return list(self._picked)

    def pick(self) -> int | None:
        """Choose the next group to train on and return its number; None if it has to come first."""
        if not self._delivered or not self._may_pick(*self._delivered[0]):
            return None
        _, number = self._delivered[0]
        self._change({"pick": [number]})
        return number

    def mark_trained(self, version: int, samples: int | None = None) -> None:
        """What was picked for the versions before `version` has been trained on: so many samples in all, fewer than
        were picked if training was stopped on the way; None for all of them."""
        due = min(self.num_picked, version * self.rules.samples_per_version)
        self._change({"train": version, "samples": due if samples is None else samples})

    def blocked_by(self) -> Counter[str]:
        """How many groups that the next batch cannot do without each maker holds, for messages."""
        open_ones = (work for work in self._works.values() if work.state in ("open", "returned"))
        due = self._pick_version
        return Counter(work.maker for work in open_ones if work.state == "returned" or work.deadline <= due)

    # The rules

    @property
    def _pick_version(self) -> int:
        """The version at which the next group that is picked will be trained on."""
        return self.num_picked // self.rules.samples_per_version

    def _next_for(self, maker: str, now: float) -> int:
        """The number that this maker would be granted: one that was returned, if it can make it, or a new one."""
        for number in sorted(self._returned):
            quicker = self._paces.quicker_than(self._works[number].slow_maker, now)
            if not quicker or maker in quicker:
                return number
        return self.num_numbers * self.rules.num_streams + self.rules.stream

    def _may_grant(self, number: int, version: int) -> bool:
        rules, size = self.rules, self.rules.group_size
        is_new = number not in self._works
        if is_new:
            granted = (self.num_numbers - self.num_dropped) * size
            if granted + size > min(rules.total_samples, rules.limit + self.num_trained):
                return False
        if rules.max_staleness is None:
            return True
        # Everything due by a deadline must fit before it, this group too. Returned ones before it will have the latest
        # deadlines; those after it are granted when they fit.
        own, last = version + rules.max_staleness, self._pick_version + rules.max_staleness
        returned = sum(one < number for one in self._returned) * size
        for deadline in {own, last, *self._due}:
            if deadline >= own:
                due = sum(samples for one, samples in self._due.items() if one <= deadline)
                if due + size + (returned if deadline >= last else 0) > self._room_until(deadline):
                    return False
        return True

    def _share(self, maker: str, now: float) -> int:
        """Samples that a maker may hold, so that others that are about as quick are not left without."""
        share = self.rules.limit // (1 + self._paces.num_rivals(maker, now))
        return max(share, self.rules.group_size)

    def _room_until(self, deadline: int) -> int:
        """Samples that can still be picked up to and with version `deadline`."""
        return (deadline + 1) * self.rules.samples_per_version - self.num_picked

    def _may_pick(self, deadline: int, number: int) -> bool:
        """Whether a delivered group may be trained on before those that are not: in order, or if they still fit."""
        if self.rules.is_on_policy:
            return number == min(number for number, work in self._works.items() if work.state != "picked")
        due = 0
        for earlier in sorted(one for one in self._due if one < deadline):
            due += self._due[earlier]
            if due + self.rules.group_size > self._room_until(earlier):
                return False
        return True

    # Events

    def _change(self, event: Event) -> None:
        """Make the change that an event describes, and note it."""
        kind = next(iter(event))
        if kind == "train":
            self._apply_train(event["train"], event["samples"])
        else:
            for number in event[kind]:
                self._apply_to(self._works[number], kind, event)
        self.events.append(event)

    def _apply_grant(self, number: int, maker: str, version: int) -> None:
        work = self._works.get(number)
        if work is None:
            self.num_numbers += 1
            work = self._works[number] = Work(number, epoch=self._first_epoch - 1)
        else:
            self._returned.remove(number)
        work.state, work.maker, work.version, work.epoch = "open", maker, version, work.epoch + 1
        work.deadline = _NEVER if self.rules.max_staleness is None else version + self.rules.max_staleness
        self._owe(work, self.rules.group_size)

    def _apply_to(self, work: Work, kind: str, event: Mapping[str, Any]) -> None:
        if kind == "deliver":
            work.state = "delivered"
            heapq.heappush(self._delivered, (work.deadline, work.number))
        elif kind == "return":
            work.state = "returned"
            work.epoch += 1  # what its maker delivers from now on is refused
            work.slow_maker = work.maker if event.get("is_slow") else work.slow_maker
            self._returned.append(work.number)
            self._owe(work, -self.rules.group_size)
        elif kind == "pick":
            work.state = "picked"
            heapq.heappop(self._delivered)  # it is the first
            self._picked.append(work.number)
            self.num_picked += self.rules.group_size
            self._owe(work, -self.rules.group_size)
        else:  # dropped or quarantined
            self.num_dropped += 1
            self._owe(work, -self.rules.group_size)
            del self._works[work.number]

    def _apply_train(self, version: int, samples: int) -> None:
        self.version = version
        size = self.rules.group_size
        for _ in range(-(-samples // size) - -(-self.num_trained // size)):  # a stop may leave one trained on in part
            del self._works[self._picked.popleft()]
        self.num_trained = samples

    def _owe(self, work: Work, samples: int) -> None:
        if self.rules.max_staleness is not None:
            self._due[work.deadline] += samples
            if not self._due[work.deadline]:
                del self._due[work.deadline]

    # Saved and restored

    def state(self) -> dict[str, Any]:
        """Everything that decides what the ledger will do next, as JSON holds it. Rates are measured again."""
        works = [dataclasses.asdict(work) for work in self._works.values()]
        return {**{name: getattr(self, name) for name in _COUNTERS}, "picked": list(self._picked), "works": works}

    @classmethod
    def restored(cls, rules: LedgerRules, state: Mapping[str, Any], *, first_epoch: int = 0) -> Self:
        """The ledger that `state` describes, with open leases returned.

        Epochs begin at `first_epoch`, above all that were granted after `state`: what was made for those is refused.
        """
        ledger = cls(rules)
        ledger._first_epoch = first_epoch
        for name in _COUNTERS:
            setattr(ledger, name, int(state[name]))
        ledger._picked = deque(state["picked"])
        for fields in state["works"]:
            work = ledger._works[fields["number"]] = Work(**fields)
            if work.state in ("open", "returned"):
                work.epoch = max(first_epoch, work.epoch + (work.state == "open"))
                work.state = "returned"
                ledger._returned.append(work.number)
            elif work.state == "delivered":
                ledger._delivered.append((work.deadline, work.number))
                ledger._owe(work, rules.group_size)
        heapq.heapify(ledger._delivered)
        return ledger

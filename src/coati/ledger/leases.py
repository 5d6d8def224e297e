"""The ledger of a trainer: which maker makes which group, and in which order groups are trained on (docs/leases.md).

    requested ──► open ──► delivered ──► picked ──► trained
                 ▲    │ └──► dropped or quarantined (another group takes its place)
                 └────┘ returned: its maker died, left, stalled, or is too slow

Two limits decide how many leases are granted. `lead`: at most (lead + 1) versions' worth of samples are granted and not
trained on. `max_staleness`, η: a lease granted to a maker that serves version v has the deadline v + η, the last
version at which it may be trained on, and is granted only if every group that is not picked yet can still meet its own.
Delivered groups are picked earliest deadline first, ahead of others only while those can still meet their deadlines.

Every change is an event (`Ledger.events`). Replaying the events reproduces the ledger.
"""

import dataclasses
import heapq
from collections import Counter, deque
from collections.abc import Collection, Mapping
from typing import Any, Self

from coati.ledger.rules import Event, Lease, LeaseRequest, LedgerRules, Pace, Paces

_NEVER = 2**62  # deadline of leases without a staleness bound
_COUNTERS = ("version", "num_picked", "num_numbers", "num_dropped", "num_trained")


@dataclasses.dataclass(slots=True)
class LeaseRecord:
    """A lease that is not trained on, dropped or quarantined yet."""

    number: int
    state: str = "returned"  # "open", "returned", "delivered" or "picked"
    epoch: int = -1
    maker: str = ""
    version: int = 0
    deadline: int = _NEVER
    slow_maker: str = ""  # the maker that it was taken back from


class Ledger:
    """The leases of one trainer. Not thread-safe. `now` is the time of any monotonic clock, in seconds.

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
        self.events: list[Event] = []  # changes that the owner has not yet taken
        self._first_epoch = 0
        self.num_numbers = 0  # numbers granted at least once
        self.num_dropped = 0  # numbers dropped or quarantined
        self.num_trained = 0  # samples
        self._records: dict[int, LeaseRecord] = {}
        self.picked: deque[int] = deque()  # numbers picked and not yet trained on, in this order
        self._returned: list[int] = []  # numbers
        self._delivered: list[tuple[int, int]] = []  # heap of (deadline, number)
        self._due: Counter[int] = Counter()  # samples open or delivered, by deadline
        self._answers: dict[str, tuple[tuple[int, int], list[Lease] | None]] = {}  # to the last request, by maker
        self.paces = Paces()  # by maker that has requested leases and has not been released
        self._taken_back: dict[Lease, str] = {}  # lease -> its slow maker, until that maker has ended it too

    # Calls of makers

    def lease(self, request: LeaseRequest, *, now: float) -> list[Lease]:
        """Record the leases that a maker ended, and grant it new ones for up to `request.wanted` samples.

        A maker numbers its requests from 1, which ends all its earlier leases. A retry, with the same number, gets the
        same answer. Others that arrive after a later one, or from a predecessor (a lower incarnation), get nothing.
        """
        maker, request_number = request.maker_name, request.number
        incarnation, version = request.incarnation, request.version
        for ending in request.endings:
            self.drop(ending.lease, ending.reason, fate=ending.fate, now=now)
        (last_incarnation, last_number), answer = self._answers.get(maker, ((-1, 0), None))
        if (incarnation, request_number) == (last_incarnation, last_number) and answer is not None:
            return answer
        if incarnation < last_incarnation or (incarnation == last_incarnation and 1 < request_number <= last_number):
            return []
        if request_number == 1:  # a request of its predecessor may have arrived after `release`
            self.release(maker, "its maker was restarted")
        pace = self.paces.setdefault(maker, Pace(since=now))
        numbers: list[int] = []
        size = self.rules.group_size
        for _ in range(min(request.wanted, self._share(maker, now) - pace.held) // size):
            number = self._next_for(maker, now)
            if not self._may_grant(number, version):
                break
            for late in [one for one, owner in self._taken_back.items() if (one.number, owner) == (number, maker)]:
                self._end_late(late, now, is_made=False)  # the maker makes it once, for the new grant
            self._apply_grant(number, maker, version)
            pace.hold(size, now)
            numbers.append(number)
        if numbers:
            pace.note_request()
            self.events.append({"grant": numbers, "maker": maker, "version": version})
        pace.room = 0 if numbers else request.wanted
        leases = [Lease(number, self._records[number].epoch) for number in numbers]
        self._answers[maker] = (incarnation, request_number), leases
        return leases

    def deliver(self, leases: Collection[Lease], *, now: float) -> list[Lease]:
        """Accept delivered groups and return their leases. Groups that are stale or already delivered are refused."""
        fresh = [lease for lease in leases if self._is_open(lease)]
        if refused := [lease for lease in leases if lease not in fresh]:
            self.events.append({"refuse": [lease.number for lease in refused]})
            for lease in refused:
                self._end_late(lease, now, is_made=True)
        for lease in fresh:
            self.paces[self._records[lease.number].maker].end(self.rules.group_size, now)
        if fresh:
            self._change({"deliver": [lease.number for lease in fresh]})
        return fresh

    def drop(self, lease: Lease, reason: str, *, fate: str = "drop", now: float) -> bool:
        """End a lease for which nothing will be delivered (`fate`: "drop" or "quarantine").

        Another group takes its place. Returns False if the lease is stale.
        """
        if not self._is_open(lease):
            self._end_late(lease, now, is_made=False)
            return False
        self.paces[self._records[lease.number].maker].end(self.rules.group_size, now, is_made=False)
        self._change({fate: [lease.number], "reason": reason})
        return True

    def _is_open(self, lease: Lease) -> bool:
        record = self._records.get(lease.number)
        return record is not None and record.state == "open" and record.epoch == lease.epoch

    def _end_late(self, lease: Lease, now: float, *, is_made: bool) -> None:
        """Update the speed of a maker that ended a lease after it was taken back."""
        if (maker := self._taken_back.pop(lease, None)) is not None:
            self.paces[maker].end(self.rules.group_size, now, is_made=is_made)

    # Makers that are gone or slow

    def release(self, maker: str, reason: str) -> list[int]:
        """Return the open leases of a maker that is gone, so they can be granted again. Return their numbers."""
        self.paces.pop(maker, None)
        self._taken_back = {lease: name for lease, name in self._taken_back.items() if name != maker}
        if maker in self._answers:  # a retry of an earlier request must not get its leases
            self._answers[maker] = self._answers[maker][0], None
        numbers = sorted(
            record.number for record in self._records.values() if record.state == "open" and record.maker == maker
        )
        if numbers:
            self._change({"return": numbers, "reason": reason})
        return numbers

    def take_back(self, *, now: float) -> list[int]:
        """Return the oldest leases of slow makers, as many as much faster makers have room for, and their numbers.

        Call it while a batch waits. Each lease is taken back at most once. The maker's average speed decides, so a
        merely long response stays where it is.
        """
        size, numbers = self.rules.group_size, []
        faster = {maker: self.paces.faster_than(maker, now) for maker in self.paces}
        records = [record for record in self._records.values() if record.state == "open" and not record.slow_maker]
        for record in sorted(records, key=lambda record: (record.deadline, record.number)):
            paces = (self.paces[name] for name in faster.get(record.maker, ()))
            if (pace := next((pace for pace in paces if pace.room >= size), None)) is not None:
                pace.room -= size
                self._taken_back[Lease(record.number, record.epoch)] = record.maker
                numbers.append(record.number)
        if numbers:
            self._change({"return": numbers, "reason": "slow maker", "is_slow": True})
        return numbers

    # Calls of the trainer

    def pick(self) -> int | None:
        """Pick the next group to train on and return its number; None if it is not delivered yet."""
        if not self._delivered or not self._may_pick(*self._delivered[0]):
            return None
        _, number = self._delivered[0]
        self._change({"pick": [number]})
        return number

    def mark_trained(self, version: int, samples: int | None = None) -> None:
        """Record that the groups picked for the versions before `version` have been trained on.

        `samples` is the number trained on in the run, which a stop may leave below the number picked; None for all.
        """
        due = min(self.num_picked, version * self.rules.samples_per_version)
        self._change({"train": version, "samples": due if samples is None else samples})

    def blocked_by(self) -> Counter[str]:
        """Return the number of groups that the next batch waits for, by the maker that holds them, for messages.

        Returned groups, which no maker holds, are counted under "".
        """
        records, due = self._records.values(), self._pick_version
        held = Counter(record.maker for record in records if record.state == "open" and record.deadline <= due)
        return held + Counter("" for record in records if record.state == "returned")

    # Rules

    @property
    def _pick_version(self) -> int:
        """The version at which the next picked group will be trained on."""
        return self.num_picked // self.rules.samples_per_version

    def _next_for(self, maker: str, now: float) -> int:
        """Return the number to grant this maker next: a returned one that it is fast enough for, or a new one."""
        for number in sorted(self._returned):
            faster = self.paces.faster_than(self._records[number].slow_maker, now)
            if not faster or maker in faster:
                return number
        return self.num_numbers * self.rules.num_streams + self.rules.stream

    def _may_grant(self, number: int, version: int) -> bool:
        rules, size = self.rules, self.rules.group_size
        is_new = number not in self._records
        if is_new:
            granted = (self.num_numbers - self.num_dropped) * size
            if granted + size > min(rules.total_samples, rules.limit + self.num_trained):
                return False
        if rules.max_staleness is None:
            return True
        # For every deadline, all groups due by then must fit, including this one. Returned groups with lower numbers
        # will get the latest deadline; those with higher numbers are granted once they fit.
        own, last = version + rules.max_staleness, self._pick_version + rules.max_staleness
        returned = sum(one < number for one in self._returned) * size
        for deadline in {own, last, *self._due}:
            if deadline >= own:
                due = sum(samples for one, samples in self._due.items() if one <= deadline)
                if due + size + (returned if deadline >= last else 0) > self._room_until(deadline):
                    return False
        return True

    def _share(self, maker: str, now: float) -> int:
        """Return the number of samples that a maker may hold: an equal share among makers of about its speed."""
        share = self.rules.limit // (1 + self.paces.num_rivals(maker, now))
        return max(share, self.rules.group_size)

    def _room_until(self, deadline: int) -> int:
        """Return the number of samples that can still be picked up to and including version `deadline`."""
        return (deadline + 1) * self.rules.samples_per_version - self.num_picked

    def _may_pick(self, deadline: int, number: int) -> bool:
        """Whether a delivered group may be picked now, ahead of groups that are not delivered yet."""
        if self.rules.max_staleness == 0:
            return number == min(number for number, record in self._records.items() if record.state != "picked")
        due = 0
        for earlier in sorted(one for one in self._due if one < deadline):
            due += self._due[earlier]
            if due + self.rules.group_size > self._room_until(earlier):
                return False
        return True

    # Events

    def _change(self, event: Event) -> None:
        """Apply the change that an event describes, and append it to `events`."""
        kind = next(iter(event))
        if kind == "train":
            self._apply_train(event["train"], event["samples"])
        else:
            for number in event[kind]:
                self._apply_to(self._records[number], kind, event)
        self.events.append(event)

    def _apply_grant(self, number: int, maker: str, version: int) -> None:
        record = self._records.get(number)
        if record is None:
            self.num_numbers += 1
            record = self._records[number] = LeaseRecord(number, epoch=self._first_epoch - 1)
        else:
            self._returned.remove(number)
        record.state, record.maker, record.version, record.epoch = "open", maker, version, record.epoch + 1
        record.deadline = _NEVER if self.rules.max_staleness is None else version + self.rules.max_staleness
        self._count_due(record, self.rules.group_size)

    def _apply_to(self, record: LeaseRecord, kind: str, event: Mapping[str, Any]) -> None:
        if kind == "deliver":
            record.state = "delivered"
            heapq.heappush(self._delivered, (record.deadline, record.number))
        elif kind == "return":
            record.state = "returned"
            record.epoch += 1  # later deliveries for the old grant are refused
            record.slow_maker = record.maker if event.get("is_slow") else record.slow_maker
            self._returned.append(record.number)
            self._count_due(record, -self.rules.group_size)
        elif kind == "pick":
            record.state = "picked"
            heapq.heappop(self._delivered)  # the picked group is always the first
            self.picked.append(record.number)
            self.num_picked += self.rules.group_size
            self._count_due(record, -self.rules.group_size)
        else:  # dropped or quarantined
            self.num_dropped += 1
            self._count_due(record, -self.rules.group_size)
            del self._records[record.number]

    def _apply_train(self, version: int, samples: int) -> None:
        self.version = version
        size = self.rules.group_size
        for _ in range(-(-samples // size) - -(-self.num_trained // size)):  # after a stop, the last may be partial
            del self._records[self.picked.popleft()]
        self.num_trained = samples

    def _count_due(self, record: LeaseRecord, samples: int) -> None:
        if self.rules.max_staleness is not None:
            self._due[record.deadline] += samples
            if not self._due[record.deadline]:
                del self._due[record.deadline]

    # Checkpoints

    def state(self) -> dict[str, Any]:
        """Return the state as JSON values. The speeds of makers are not included; they are measured again."""
        records = [dataclasses.asdict(record) for record in self._records.values()]
        return {**{name: getattr(self, name) for name in _COUNTERS}, "picked": list(self.picked), "works": records}

    @classmethod
    def restored(cls, rules: LedgerRules, state: Mapping[str, Any], *, first_epoch: int = 0) -> Self:
        """Return the ledger that `state` describes, with open leases returned.

        Epochs start at `first_epoch`. Choose it so that leases granted after `state` was saved are refused.
        """
        ledger = cls(rules)
        ledger._first_epoch = first_epoch
        for name in _COUNTERS:
            setattr(ledger, name, int(state[name]))
        ledger.picked = deque(state["picked"])
        for fields in state["works"]:
            record = ledger._records[fields["number"]] = LeaseRecord(**fields)
            if record.state in ("open", "returned"):
                record.epoch = max(first_epoch, record.epoch + (record.state == "open"))
                record.state = "returned"
                ledger._returned.append(record.number)
            elif record.state == "delivered":
                ledger._delivered.append((record.deadline, record.number))
                ledger._count_due(record, rules.group_size)
        heapq.heapify(ledger._delivered)
        return ledger

"""A run that continues with another number of trainers: what was unfinished is divided among them, and nothing is lost,
doubled or too old."""

import dataclasses
import functools
import itertools
import random

import pytest
import tiny

from coati.experience_buffer.leased import Ending, LeasedBuffer, LeaseRequest
from coati.ledger import Ledger, LedgerRules
from coati.ledger.audit import audit_run
from coati.ledger.journal import Journal, read_journal, resume_event

VERSIONS = 6
SIZE = 2  # of a batch, and of a version


class Trainers:
    """The buffers of a group, which makers serve as the dice decide."""

    def __init__(self, folder, number, *, dice, max_staleness):
        self.dice, self._asks = dice, itertools.count(1)
        self.buffers = []
        for stream in range(number):
            rules = LedgerRules(
                samples_per_version=SIZE,
                total_samples=SIZE * VERSIONS,
                lead=2,
                max_staleness=max_staleness,
                stream=stream,
                num_streams=number,
            )
            path = folder / "ledger" / f"stream-{stream}.jsonl"
            journal = functools.partial(Journal, path, rules, run="r", is_resumed=True)
            self.buffers.append(LeasedBuffer(rules, SIZE, open_journal=journal, clock=lambda: 0.0))
        self.trained = []

    def train(self, version):
        """Make the version after this one."""
        for buffer in self.buffers:
            for _ in range(200):
                if (batch := buffer.try_sample(0.0)) is not None:
                    break
                self._make(buffer, version)
            assert batch is not None, buffer.describe_wait()
            self.trained += batch.sample_ids.tolist()
        for buffer in self.buffers:
            self._make(buffer, version)  # more than is trained on
            buffer.train(version + 1)

    def _make(self, buffer, version):
        leases = buffer.lease(LeaseRequest("maker", next(self._asks), version, self.dice.randint(1, 4)))
        self.dice.shuffle(leases)
        dropped = leases[:1] if self.dice.random() < 0.2 else []
        late = leases[1:2] if self.dice.random() < 0.3 else []
        made = [lease for lease in leases if lease not in (*dropped, *late)]
        buffer.extend([dataclasses.replace(tiny.item(lease.number), lease=tuple(lease)) for lease in made])
        endings = tuple(Ending(lease, "the dice") for lease in dropped)
        buffer.lease(LeaseRequest("maker", next(self._asks), version, 0, endings))
        if late:
            buffer.release("maker", "it is late")

    def close(self):
        states = [buffer.state()[0] for buffer in self.buffers]
        for buffer in self.buffers:
            buffer.close()
        return states


@pytest.mark.parametrize("max_staleness", [0, 2, None])
@pytest.mark.parametrize("numbers", [(1, 2), (2, 1), (4, 1), (2, 3), (3, 2, 3), (1, 4, 1)], ids=str)
def test_trainers_take_over_from_others(numbers, max_staleness, tmp_path):
    dice, version, trained, states = random.Random(str(numbers)), 0, [], None
    for number in numbers:
        trainers = Trainers(tmp_path, number, dice=dice, max_staleness=max_staleness)
        if states is not None:
            for buffer in trainers.buffers:
                buffer.take_over(states)
            for stream in range(number, len(states)):
                rules = dataclasses.replace(trainers.buffers[0].rules, stream=stream)
                journal = Journal(tmp_path / "ledger" / f"stream-{stream}.jsonl", rules, run="r", is_resumed=True)
                journal.write([resume_event(version, states[stream]["events"], rules, state=Ledger(rules).state())])
                journal.close()
        for version in range(version, version + 2):  # noqa: B020
            trainers.train(version)
        version += 1
        trained += trainers.trained
        states = trainers.close()
    assert len(trained) == len(set(trained)) == 2 * SIZE * sum(numbers)
    account = audit_run(tmp_path)
    assert account.problems == []
    fates = {number: group.fate for stream in account.streams for number, group in stream.groups.items()}
    assert len(fates) == sum(len(stream.groups) for stream in account.streams), "each number has one ledger"
    assert {number for number, fate in fates.items() if fate == "trained"} == set(trained)
    next_numbers = [state["ledger"]["num_numbers"] * len(states) + stream for stream, state in enumerate(states)]
    assert fates.keys() >= set(range(min(next_numbers))), "no prompt is left out"
    for stream, state in enumerate(states):
        content = read_journal(tmp_path / "ledger" / f"stream-{stream}.jsonl")
        assert Ledger.replayed(content.first_rules, content.events).state() == state["ledger"]

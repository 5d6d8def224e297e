"""A run that continues with a different number of trainers: unfinished groups are divided among them, and none is lost,
duplicated or too old."""

import dataclasses
import functools
import itertools
import random

import pytest
import tiny
from ledger_events import replayed

from coati.experience_buffer.buffer import LeasedBuffer
from coati.ledger import LedgerRules
from coati.ledger.audit import audit_run
from coati.ledger.journal import Journal, read_journal, retire_journals
from coati.ledger.rules import Ending, LeaseRequest

VERSIONS = 6
SIZE = 2  # samples per batch and per version


class Trainers:
    """The buffers of several trainers, served by makers in random order."""

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
        """Train the next version."""
        for buffer in self.buffers:
            for _ in range(200):
                if (batch := buffer.try_sample(0.0)) is not None:
                    break
                self._make(buffer, version)
            assert batch is not None, buffer.describe_wait()
            self.trained += batch.sample_ids.tolist()
        for buffer in self.buffers:
            self._make(buffer, version)  # more than the version needs
            buffer.mark_trained(version + 1)

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


def begun(folder, number, states, version, **settings):
    """Return trainers that continue from the states of others."""
    trainers = Trainers(folder, number, **settings)
    for buffer in trainers.buffers:
        buffer.take_over(states)
    events = [state["events"] for state in states]
    retire_journals(folder, trainers.buffers[0].rules, run="r", version=version, events=events)
    return trainers


@pytest.mark.parametrize("given_up", [(), (1, 0)], ids=["at_once", "after_others_gave_up"])
@pytest.mark.parametrize("max_staleness", [0, 2, None])
@pytest.mark.parametrize("numbers", [(1, 2), (2, 1), (4, 1), (2, 3), (3, 2, 3), (1, 4, 1)], ids=str)
def test_trainers_take_over_from_others(numbers, max_staleness, given_up, tmp_path):
    """`given_up`: for each earlier attempt from the same states, its number of extra trainers."""
    settings = {"dice": random.Random(str(numbers)), "max_staleness": max_staleness}
    version, trained, states = 2, [], []
    for step, number in enumerate(numbers):
        if step == 0:
            trainers = Trainers(tmp_path, number, **settings)
        else:
            for more in given_up:
                if number + more != len(states):  # otherwise they would restore their own
                    trainers = begun(tmp_path, number + more, states, version, **settings)
                    trainers.train(version)
                    trainers.close()
            trainers = begun(tmp_path, number, states, version, **settings)
        for version in range(2 * step, 2 * step + 2):
            trainers.train(version)
        version += 1
        trained += trainers.trained
        states = trainers.close()
    assert len(trained) == len(set(trained)) == 2 * SIZE * sum(numbers)
    account = audit_run(tmp_path)
    assert account.problems == []
    fates = {number: group.fate for trainer in account.trainers for number, group in trainer.groups.items()}
    assert len(fates) == sum(len(trainer.groups) for trainer in account.trainers), "each number has one ledger"
    assert {number for number, fate in fates.items() if fate == "trained"} == set(trained)
    next_numbers = [state["ledger"]["num_numbers"] * len(states) + stream for stream, state in enumerate(states)]
    assert fates.keys() >= set(range(min(next_numbers))), "no prompt is left out"
    for stream, state in enumerate(states):
        content = read_journal(tmp_path / "ledger" / f"stream-{stream}.jsonl")
        assert replayed(content.first_rules, content.events).state() == state["ledger"]


def test_a_run_that_starts_over_voids_the_journals_of_former_trainers(tmp_path):
    settings = {"dice": random.Random(0), "max_staleness": 2}
    both = Trainers(tmp_path, 2, **settings)
    both.train(0)
    states = both.close()
    alone = begun(tmp_path, 1, states, 1, **settings)
    alone.train(1)
    alone.close()
    alone = Trainers(tmp_path, 1, **settings)
    alone.buffers[0].start_over()
    retire_journals(tmp_path, alone.buffers[0].rules, run="r", version=0, events=None)
    alone.train(0)
    alone.train(1)
    alone.close()
    account = audit_run(tmp_path)
    assert account.problems == []
    trained = [
        number for trainer in account.trainers for number, group in trainer.groups.items() if group.fate == "trained"
    ]
    assert sorted(trained) == sorted(alone.trained)

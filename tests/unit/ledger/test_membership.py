"""Makers that join and leave: every round is made once, within the bound, whatever comes and goes."""

import itertools
import random
from collections import Counter

import pytest
import torch

from coati.errors import ConfigError
from coati.experience_buffer import BufferItem
from coati.ledger import UNBOUNDED, AdmissionGate, Membership, PromptPart, RoundOrder, Standing, WorkShare


def shares_of(num_makers, **settings):
    settings = {"rounds_per_version": 4, "total_rounds": 24, **settings}
    return {f"m{index}": WorkShare(maker_index=index, num_makers=num_makers, **settings) for index in range(num_makers)}


def rounds_of(share):
    return [share.round_of(number) for number in range(share.total // share.num_trainers)]


def test_deals_by_hand():
    # 2 makers, 12 rounds. At round 5 a third joins, at round 9 the first leaves.
    #   rounds  0 1 2 3 4 | 5 6 7 8 | 9 10 11
    #   makers  a b a b a | a b c a | b c  b
    a, b = (WorkShare(rounds_per_version=4, total_rounds=12, maker_index=index, num_makers=2) for index in range(2))
    c = WorkShare(rounds_per_version=4, total_rounds=12, maker_index=None)
    assert c.total == 0
    a, b, c = a.dealt(5, 0, 3), b.dealt(5, 1, 3), c.dealt(5, 2, 3)
    a, b, c = a.dealt(9, None, 2), b.dealt(9, 0, 2), c.dealt(9, 1, 2)
    assert [rounds_of(share) for share in (a, b, c)] == [[0, 2, 4, 5, 8], [1, 3, 6, 9, 11], [7, 10]]
    assert [share.rounds_begun(0) for share in (a, b, c)] == [0, 0, 0]
    assert [b.rounds_begun(number) for number in range(1, 5)] == [2, 4, 7, 10]
    assert b.rounds_begun(5) == 12, "a maker that has issued everything cannot be dealt more"


def test_rounds_begun_are_whole_hands_of_groups():
    # Groups of 4 over 2 trainers: a hand is 2 rounds, 4 samples. One sample of the second hand begins rounds 4 and 5.
    share = WorkShare(rounds_per_version=4, total_rounds=12, num_trainers=2, group_size=4, num_makers=2)
    assert [share.rounds_begun(number) for number in (1, 4, 5, 8, 9, 12)] == [2, 2, 6, 6, 10, 12]
    with pytest.raises(ConfigError, match=r"at a multiple of 2 rounds, got \[3\]"):
        share.dealt(3, 0, 1)
    with pytest.raises(ConfigError, match=r"one after the other, .* got \[6, 4\]"):
        share.dealt(6, 0, 1).dealt(4, 0, 1)
    with pytest.raises(ConfigError, match="got maker 2 of 2"):
        share.dealt(6, 2, 2)


@pytest.mark.parametrize("trainers", [1, 2, 3])
@pytest.mark.parametrize("group_size", [1, 4])
def test_every_round_is_dealt_once_for_any_two_changes(trainers, group_size):
    for first, second, third in itertools.product(range(1, 5), repeat=3):
        for cut, later in ((0, 0), (4, 4), (8, 20), (24, 24)):
            membership = Membership(shares_of(first, num_trainers=trainers, group_size=group_size))
            everybody = dict.fromkeys(membership.members)
            for number, (size, at) in enumerate(((second, cut), (third, later))):
                members = membership.members
                joining = [f"n{number}-{index}" for index in range(max(0, size - len(members)))]
                places = membership.redeal(
                    {name: Standing(at, 0) for name in members}, joining=joining, leaving=members[size:]
                )
                assert len(membership.members) == size
                everybody |= {name: place.share for name, place in places.items()}
            dealt = Counter(itertools.chain.from_iterable(rounds_of(share) for share in everybody.values()))
            assert dealt == Counter(range(24)), (first, second, third, cut)
            assert sum(share.total for share in everybody.values()) == 24 * trainers


def test_who_leaves_gets_prompts_of_its_own_and_the_others_share_the_rest_anew():
    membership = Membership(shares_of(3))
    standings = {"m0": Standing(9, 12), "m1": Standing(4, 17), "m2": Standing(2, 3)}
    places = membership.redeal(standings, leaving=["m1", "m2"], joining=["new"])
    assert places["m0"].prompts == PromptPart(0, 2, 17)
    assert places["new"].prompts == PromptPart(1, 2, 17)
    assert [places[name].prompts for name in ("m1", "m2")] == [PromptPart(0, 2, 2**40), PromptPart(1, 2, 2**40)]
    assert [rounds_of(places[name].share) for name in ("m1", "m2")] == [[1, 4, 7], [2, 5, 8]]
    # m1 had begun more than anybody has now: what is dealt next still begins after it.
    again = membership.redeal({"m0": Standing(3, 1), "new": Standing(0, 0)}, leaving=["new"])
    assert again["m0"].prompts == PromptPart(0, 1, 17)
    assert again["new"].prompts == PromptPart(0, 1, 2 * 2**40)
    assert rounds_of(again["m0"].share) == [0, 3, 6, *range(9, 24)]


def item(round_index):
    one = torch.zeros(1)
    return BufferItem(torch.tensor([1, 2]), one, one, torch.tensor(0.0), one, one, None, None, round_index=round_index)


class Run:
    """Makers at random speeds with real gates, trainers with real round orders, and changes at random moments."""

    def __init__(self, seed, *, eta, trainers, group_size):
        self.dice = random.Random(seed)
        self.eta, self.trainers, self.group_size = eta, trainers, group_size
        shares = shares_of(self.dice.randint(1, 3), max_staleness=eta, num_trainers=trainers, group_size=group_size)
        self.membership = Membership(shares)
        self.gates = {name: AdmissionGate(share) for name, share in shares.items()}
        self.numbers = {name: Counter() for name in shares}
        self.orders = [RoundOrder() for _ in range(trainers)]
        self.trained = [[] for _ in range(trainers)]  # (round, version that wrote it)
        self.written = {}
        self.version = 0

    def change(self):
        members = self.membership.members
        size = self.dice.randint(1, 5)
        joining = [f"j{len(self.gates) + index}" for index in range(max(0, size - len(members)))]
        leaving = self.dice.sample(members, max(0, len(members) - size))
        waiting = self.membership.share_in_waiting()
        for name in joining:
            self.gates[name], self.numbers[name] = AdmissionGate(waiting), Counter()
        held = {name: Standing(self.gates[name].hold(), 0) for name in members}
        assert all(self.gates[name].admit(self.group_size, version=self.version) == 0 for name in members)
        before = self.membership.shares
        places = self.membership.redeal(held, joining=joining, leaving=leaving)
        dealt = {name: place.share for name, place in places.items()}
        if joining and self.dice.random() < 0.3:  # a newcomer does not take its part
            self.membership.restore(before)
            dealt = before
        for name, share in dealt.items():
            self.gates[name].deal(share)

    def issue(self):
        """One group of one maker that may; False if none may."""
        able = [n for n, gate in self.gates.items() if gate.admissible(self.group_size, version=self.version)]
        if not able:
            return False
        name = self.dice.choice(able)
        start = self.gates[name].num_issued
        assert self.gates[name].admit(self.group_size, version=self.version) == self.group_size
        if self.dice.random() < 0.1:
            self.gates[name].give_back(self.group_size)
            return True
        for turn in range(start, start + self.group_size):
            trainer = turn % self.trainers
            index = self.gates[name].share.round_of(self.numbers[name][trainer])
            self.numbers[name][trainer] += 1
            assert (trainer, index) not in self.written
            self.written[trainer, index] = self.version
            ordered = item(None if self.eta == UNBOUNDED else index)
            ordered.sample_ids = torch.tensor(index)
            self.trained[trainer] += [int(one.sample_ids) for one in self.orders[trainer].add([ordered])]
        return True

    def train(self):
        while self.version < 6 and all(len(got) >= 4 * (self.version + 1) for got in self.trained):
            for trainer, got in enumerate(self.trained):
                for index in got[4 * self.version : 4 * (self.version + 1)]:
                    age = self.version - self.written[trainer, index]
                    assert self.eta == UNBOUNDED or 0 <= age <= self.eta
            self.version += 1


@pytest.mark.parametrize("eta", [0, 1, 3, UNBOUNDED])
def test_nothing_is_lost_or_too_old_and_everything_ends_whenever_makers_come_and_go(eta):
    for seed, trainers, group_size in itertools.product(range(4), (1, 2, 3), (1, 4)):
        run = Run(seed, eta=eta, trainers=trainers, group_size=group_size)
        while run.version < 6:
            if run.dice.random() < 0.15:
                run.change()
            moved = run.issue()
            before = run.version
            run.train()
            assert moved or run.version > before, f"seed {seed}: {run.membership.members} stall"
        assert all(sorted(got) == list(range(24)) for got in run.trained)
        assert all(gate.is_done for gate in run.gates.values())
        assert sum(gate.num_issued for gate in run.gates.values()) == 24 * trainers

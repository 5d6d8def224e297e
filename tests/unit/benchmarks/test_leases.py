"""The benchmark of leases, shortened: what it compares with, and that both sides keep the bound."""

import dataclasses
from pathlib import Path

import pytest
import tiny

from coati.ledger import LeaseRequest

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.fixture
def leases(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import leases

    return leases


def test_dealt_shares_belong_to_makers_and_come_in_order(leases):
    dealt = leases.make_ledger(leases.Case("even", "dealt", 1, 1), 8)
    first = dealt.lease(LeaseRequest("maker-1", 1, 0, 3), now=0.0)
    assert [lease.number for lease in first] == [1, 5, 9]
    rest = dealt.lease(LeaseRequest("maker-1", 2, 0, 99), now=0.0)
    assert [lease.number for lease in rest] == list(range(13, 128, 4))  # two versions of 64
    assert dealt.lease(LeaseRequest("maker-1", 3, 0, 99), now=0.0) == []
    dealt.deliver(first, now=1.0)
    assert dealt.pick() is None
    dealt.deliver(dealt.lease(LeaseRequest("maker-0", 1, 0, 1), now=0.0), now=1.0)
    assert [dealt.pick(), dealt.pick(), dealt.pick()] == [0, 1, None]
    assert dealt.picked == [0, 1]


def test_leases_beat_dealt_shares_when_makers_are_uneven_and_both_keep_the_bound(leases):
    dealt, leased = (leases.simulate(case, seed=0, versions=8) for case in leases.CASES[3:5])
    assert max(dealt.oldest, leased.oldest) <= 4
    assert leased.samples_per_second > 2 * dealt.samples_per_second
    assert leased.mean_age < dealt.mean_age


@pytest.mark.parametrize("rule", ["dealt", "leases"])
def test_actors_of_both_rules_lease_and_deliver(leases, rule):
    case = leases.Case("even", rule, 1, 1, "batches")
    trainer = leases.Trainer(case, 0.0, 2, "run")
    maker = leases.Maker(case, 1, 100, 0.0, 2, "run")
    lent = trainer.lease(LeaseRequest(maker.name, 1, 0, 64))
    items = [dataclasses.replace(tiny.item(lease.number), lease=tuple(lease)) for lease in lent]
    trainer.buffer_extend(items)
    assert len(lent) == (32 if rule == "dealt" else 64)  # a quarter of two versions, or what was asked for
    assert trainer.buffer_get_length() == len(lent) // 64
    trainer._leased.mark_trained(1)

"""The account of a run, from journals of real ledgers and from forged ones."""

import dataclasses

import pytest
import typer
from lease_world import World

from coati.cli.audit import audit
from coati.errors import CheckpointError, DataError
from coati.ledger.audit import audit_run, history_of
from coati.ledger.journal import Journal
from coati.ledger.rules import LedgerRules

RULES = LedgerRules(samples_per_version=4, total_samples=16, group_size=2, max_staleness=1)


def write(folder, rules, events):
    journal = Journal(folder / "ledger" / f"stream-{rules.stream}.jsonl", rules, run="")
    for event in events:
        journal.write([event])
    journal.close()


def grant(*numbers, version=0, maker="maker-0"):
    return {"grant": list(numbers), "maker": maker, "version": version}


def problems_of(folder, *events, **changes):
    write(folder, dataclasses.replace(RULES, **changes), events)
    return audit_run(folder).problems


@pytest.mark.parametrize("seed", range(5))
def test_the_account_of_real_ledgers_closes(tmp_path, seed, capsys):
    world = World(
        seed=seed, speeds=[1, 0.3, 0.05], slots=[5, 3, 8], versions=6, drop_rate=0.2, num_streams=2, group_size=2,
        max_staleness=seed,
    )  # fmt: skip
    world.at(1.5, "die", "maker-1")
    assert world.run()
    for ledger in world.ledgers:
        write(tmp_path, ledger.rules, ledger.events)
    account = audit_run(tmp_path)
    assert not account.problems
    counts = {
        fate: sum(row[3] for row in account.table() if row[0] == fate) for fate in ("trained", "dropped", "all leased")
    }
    assert counts["trained"] == sum(rules.total_samples for rules in world.rules)
    assert counts["dropped"] == 2 * sum(ledger.num_dropped for ledger in world.ledgers)
    assert counts["all leased"] == sum(row[3] for row in account.table()[:-1])
    assert account.oldest == max(world.ages)
    audit(tmp_path)
    assert "The account balances" in capsys.readouterr().out


def test_every_group_has_one_fate_with_its_reason(tmp_path, capsys):
    events = [
        grant(0, 1, 2, 3), grant(4, maker="maker-1"), {"deliver": [1, 0]}, {"pick": [1]}, {"pick": [0]},
        {"drop": [2], "reason": "over the limit"}, {"quarantine": [4], "reason": "reward raised"},
        grant(5, 6, 7, 8), {"train": 1}, {"deliver": [6]}, {"deliver": [7]}, {"pick": [6]},
        {"return": [8], "reason": "died"},
    ]  # fmt: skip
    write(tmp_path, RULES, events)
    account = audit_run(tmp_path)
    assert account.table() == [
        ("trained", "", 2, 4),
        ("dropped", "over the limit", 1, 2),
        ("quarantined", "reward raised", 1, 2),
        ("open", "being made by maker-0", 2, 4),
        ("open", "delivered", 1, 2),
        ("open", "picked", 1, 2),
        ("open", "returned", 1, 2),
        ("all leased", "", 9, 18),
    ]
    audit(tmp_path)
    assert "over the limit" in capsys.readouterr().out


def test_groups_made_twice_are_shown_below_the_account(tmp_path, capsys):
    rules = dataclasses.asdict(RULES)
    events = [
        grant(0, 1, 2), {"return": [0, 1], "reason": "slow maker", "is_slow": True}, grant(0, 1, maker="maker-1"),
        {"deliver": [0]}, {"refuse": [0]}, {"refuse": [1]},
        {"resume": 0, "events": 6, "first_epoch": 9, "rules": rules},
    ]  # fmt: skip
    write(tmp_path, RULES, events)
    account = audit_run(tmp_path)
    assert account.repeated() == [
        ("returned", "slow maker", 2, 4),
        ("returned", "the run was resumed", 2, 4),
        ("refused", "delivered too late, or twice", 2, 4),
    ]
    assert (account.num_made, account.num_trained) == (2, 0), "refused groups are not counted"
    assert account.table()[-1] == ("all leased", "", 3, 6)
    audit(tmp_path)
    below = capsys.readouterr().out.partition("leased")[2]
    assert "Made: 2 samples" in below
    assert "slow maker" in below
    assert "refused" in below


def test_a_table_is_short_whatever_reasons_there_are(tmp_path):
    fault = "Reward function 'judge' raised KeyError: 'no {0}' (at rewards.py:3) (samples {0})"
    reasons = [fault.format(number) for number in range(4)] + [f"{'x' * number} no good" for number in range(90, 97)]
    ends = [{"quarantine": [number], "reason": reason} for number, reason in enumerate(reasons)]
    write(tmp_path, RULES, [grant(*range(11)), *ends])
    rows = audit_run(tmp_path).table()
    assert rows[1] == ("quarantined", "Reward function 'judge' raised KeyError", 4, 8)
    assert len(rows) < 8
    assert max(len(row[1]) for row in rows) <= 60
    ends = [{"drop": [number], "reason": f"reason {number}"} for number in range(11, 20)]
    write(tmp_path / "many", RULES, [grant(*range(20)), *ends])
    assert audit_run(tmp_path / "many").table()[5] == ("dropped", "4 other reasons", 4, 8)


def test_a_group_that_is_trained_on_twice_is_named(tmp_path, capsys):
    again = [{"deliver": [0]}, {"pick": [0]}, {"pick": [0]}, {"train": 1}]
    found = problems_of(tmp_path, grant(0), *again)
    assert found == ["group 0: pick after it was picked", "group 0: train after it was trained"]
    with pytest.raises(typer.Exit) as stop:
        audit(tmp_path)
    assert stop.value.exit_code == 1
    assert "group 0: train after it was trained" in capsys.readouterr().out


def test_a_group_that_two_trainers_have_trained_on_is_named(tmp_path):
    trained = [{"deliver": [0]}, {"pick": [0]}, {"train": 1, "samples": 2}]
    rules = [dataclasses.replace(RULES, stream=stream, num_streams=2) for stream in range(2)]
    write(tmp_path, rules[0], [grant(0), *trained])
    moved = dataclasses.asdict(rules[1])
    state = {"works": [{"number": 0}], "num_numbers": 0, "num_trained": 0}
    write(tmp_path, rules[1], [{"resume": 0, "events": 0, "rules": moved, "state": state}, grant(0), *trained])
    assert audit_run(tmp_path).problems == ["group 0: trained on by each of trainers [0, 1]"]


def test_a_group_that_two_makers_hold_is_named(tmp_path):
    found = problems_of(tmp_path, grant(0), grant(0, maker="maker-1"))
    assert found == ["group 0: grant after it was open"]


def test_a_group_that_was_returned_may_be_granted_again(tmp_path):
    assert not problems_of(tmp_path, grant(0), {"return": [0], "reason": "died"}, grant(0, maker="maker-1"))


def test_a_group_that_was_skipped_or_never_granted_is_named(tmp_path):
    found = problems_of(tmp_path, grant(0), grant(2), {"deliver": [7]})
    assert found == ["group 2: granted, but 1 was next", "group 7: deliver after it was never granted"]


@pytest.mark.parametrize(("bound", "is_wrong"), [(0, True), (1, False), (None, False)])
def test_a_group_older_than_the_bound_is_named(tmp_path, bound, is_wrong):
    delivered = [{"deliver": [0, 1, 2]}, {"pick": [0, 1]}, {"train": 1}, {"pick": [2]}, {"train": 2}]
    found = problems_of(tmp_path, grant(0, 1, 2), *delivered, max_staleness=bound)
    assert [problem[:39] for problem in found] == ["group 2: trained at version 1, granted "] * is_wrong


def test_part_of_a_record_at_the_end_is_a_note(tmp_path):
    write(tmp_path, RULES, [grant(0), grant(1)])
    path = tmp_path / "ledger" / "stream-0.jsonl"
    path.write_bytes(path.read_bytes()[:-3])
    account = audit_run(tmp_path)
    assert account.table()[-1] == ("all leased", "", 1, 2)
    assert len(account.notes) == 1


def test_missing_journals_are_errors(tmp_path):
    with pytest.raises(CheckpointError, match="has no journals"):
        audit_run(tmp_path)
    write(tmp_path, dataclasses.replace(RULES, stream=1, num_streams=2), [])
    with pytest.raises(CheckpointError, match="2 trainers, got those of \\[1\\]"):
        audit_run(tmp_path)


def test_the_life_of_a_sample_is_that_of_its_group(tmp_path, capsys):
    events = [
        grant(0, 1, 2, 3), {"return": [1], "reason": "slow maker", "is_slow": True}, {"deliver": [0]}, {"pick": [0]},
        {"train": 1, "samples": 2}, grant(1, maker="maker-1", version=1), {"refuse": [1]},
        {"deliver": [2, 1], "written_by": [[0], [0], [0], [0, 5, 1]], "scored_by": [1, 1]}, {"pick": [1]},
        {"pick": [2]}, {"train": 2, "samples": 6},
        {"drop": [3], "reason": "no score by 'matches': None (sample ids [6])"},
    ]  # fmt: skip
    write(tmp_path, RULES, events)
    audit(tmp_path, sample=3)
    life = [
        "version 0: leased to maker-0, which served version 0",
        "version 0: returned: slow maker",
        "version 1: leased to maker-1, which served version 1",
        "version 1: another delivery was refused: it was too late, or the second one",
        "version 1: delivered, written by version 0, then 1",
        "version 1: picked for training",
        "version 1: trained on, which made version 2",
    ]
    assert capsys.readouterr().out.splitlines() == [
        "Sample 3 is in group 1 (samples 2 to 3). Fate: trained.", *life
    ]  # fmt: skip
    assert history_of(tmp_path, 2)[5] == "version 1: delivered, written by version 0"
    assert history_of(tmp_path, 7) == [
        "Sample 7 is in group 3 (samples 6 to 7). Fate: dropped (no score by 'matches').",
        life[0],
        "version 2: dropped: no score by 'matches': None (sample ids [6])",
    ]


def test_the_life_of_a_sample_has_no_void_events(tmp_path):
    rules = dataclasses.replace(RULES, group_size=1)
    resume = {"resume": 0, "events": 1, "first_epoch": 9, "rules": dataclasses.asdict(rules)}
    events = [grant(0, 1), {"deliver": [1]}, {"pick": [1]}, {"train": 1, "samples": 1}, resume]
    write(tmp_path, rules, [*events, grant(1, maker="maker-1"), {"quarantine": [0], "reason": "reward raised"}])
    assert history_of(tmp_path, 1) == [
        "Sample 1. Fate: open (being made by maker-1).",
        "version 0: leased to maker-0, which served version 0",
        "version 0: returned: the run was resumed from version 0",
        "version 0: leased to maker-1, which served version 0",
    ]


def test_the_life_of_a_sample_that_changed_trainers(tmp_path):
    two, one = dataclasses.replace(RULES, num_streams=2), RULES
    before = [grant(0), {"deliver": [0]}, {"pick": [0]}, {"train": 1, "samples": 2}]
    resume = {"resume": 1, "first_epoch": 9}
    taken = {"works": [{"number": 1}], "num_numbers": 2, "num_trained": 4}
    now = {**resume, "events": 4, "rules": dataclasses.asdict(one), "state": taken}
    write(tmp_path, two, [*before, now, grant(1, maker="maker-1", version=1)])
    former = dataclasses.replace(two, stream=1)
    before = [grant(1), {"train": 1, "samples": 0}, {"return": [1], "reason": "died"}, grant(1, version=1)]
    retired = {**resume, "events": 4, "rules": dataclasses.asdict(former)}
    write(tmp_path, former, [*before, retired | {"state": {"works": [], "num_numbers": 0, "num_trained": 0}}])
    assert history_of(tmp_path, 3) == [
        "Sample 3 is in group 1 (samples 2 to 3). Fate: open (being made by maker-1).",
        "trainer 1, version 0: leased to maker-0, which served version 0",
        "trainer 1, version 1: returned: died",
        "trainer 1, version 1: leased to maker-0, which served version 1",
        "trainer 0, version 1: returned: the run was resumed from version 1",
        "trainer 0, version 1: leased to maker-1, which served version 1",
    ]


@pytest.mark.parametrize("num_granted", [0, 4])
def test_a_sample_that_was_never_leased_is_an_error(tmp_path, num_granted):
    write(tmp_path, RULES, [grant(*range(num_granted))] * (num_granted > 0))
    with pytest.raises(DataError, match=f"below {2 * num_granted}, got 8.*sample_id"):
        audit(tmp_path, sample=8)

"""The schedule of evaluations: what is due, one job at a time, the best model, patience, and restarts."""

import json

import pytest

from coati.config import EvalSettings
from coati.evaluation.schedule import EvalSchedule


def one(name="set", **settings):
    sections = {"prompts": {"path": "p.jsonl"}, "reward": {"function": "m:f"}}
    return EvalSettings.model_validate({"name": name, **sections, **settings})


class Run:
    """A schedule with its records and stops."""

    def __init__(self, *sets, **options):
        self.records, self.stops = [], 0
        self.schedule = EvalSchedule(sets, record=self.records.append, stop=self.stop, **options)

    def stop(self):
        self.stops += 1

    def ask(self, version, maker="maker-0", incarnation=0):
        return self.schedule.grant(maker, version, incarnation)

    def report(self, job, version, *, is_best=None):
        """Report a job at a version as a maker does; without `is_best`, no sample has a score."""
        found = {} if is_best is None else {"avg@1": 0.5, "is_best": is_best}
        return self.schedule.report(job, {"name": job.name, "version": version, **found})

    def versions(self, *asked, end=None):
        """Ask at these versions, and report each job at once; return the versions at which there was a job."""
        made = []
        for version in asked:
            if version == end:
                self.schedule.end(version)
            if (job := self.ask(version)) is not None:
                self.report(job, version)
                made.append(version)
        return made


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [0, 7]),
        ({"every": 3}, [0, 3, 6, 7]),
        ({"every": 3, "before": False, "at_end": False}, [3, 6]),
        ({"every": 7}, [0, 7]),
        ({"before": False}, [7]),
        ({"before": False, "at_end": False}, []),
        ({"at_end": False}, [0]),
    ],
)
def test_sets_are_due_before_training_every_n_versions_and_at_the_end(settings, expected):
    run = Run(one(**settings))
    assert run.versions(*range(8), end=7) == expected
    assert run.schedule.pending == []


def test_a_due_version_that_no_maker_serves_is_evaluated_once_at_the_next():
    run = Run(one(every=4))
    assert run.versions(0, 3, 6, 7, 9) == [0, 6, 9]


def test_two_makers_get_different_sets():
    run = Run(one("a"), one("b"))
    first, second = run.ask(0, "maker-0"), run.ask(0, "maker-1")
    assert (first.name, second.name) == ("a", "b")
    assert run.ask(0, "maker-2") is None


def test_a_set_is_evaluated_by_one_maker_at_a_time():
    run = Run(one(every=1))
    job = run.ask(0, "maker-0")
    assert [run.ask(version, "maker-1") for version in (1, 2, 3)] == [None] * 3
    assert run.report(job, 0)
    assert run.ask(3, "maker-1") is not None


def test_the_job_of_a_dead_maker_is_reassigned_and_its_late_report_refused():
    run = Run(one())
    lost = run.ask(0, "maker-0")
    run.schedule.release("maker-0")
    job = run.ask(1, "maker-1")
    assert not run.report(lost, 0)
    assert run.records == []
    assert run.report(job, 1)
    assert not run.report(job, 1), "a repeated report counts only once"
    assert [record["evaluation"]["version"] for record in run.records] == [1]


def test_a_maker_that_lost_the_reply_gets_the_job_again():
    run = Run(one())
    lost, job = run.ask(0), run.ask(0)
    assert (job.name, run.report(lost, 0), run.report(job, 0)) == ("set", False, True)


def test_no_job_for_weights_of_an_earlier_incarnation():
    run = Run(one(), incarnation=1)
    assert run.ask(0, incarnation=0) is None
    assert run.ask(0, incarnation=1) is not None


def test_patience_ends_the_run_with_a_reason():
    run = Run(one(best_by="avg@1", every=1, patience=2))
    for version, is_best in enumerate([True, False, True, False]):
        run.report(run.ask(version), version, is_best=is_best)
    assert run.stops == 0
    run.report(run.ask(4), 4, is_best=False)
    assert run.stops == 1
    assert run.ask(5) is None, "the run ends"
    assert "avg@1" in run.records[-1]["evaluation"]["stop"]
    assert "stop" not in run.records[-2]["evaluation"]


def test_an_evaluation_without_scores_is_neither_better_nor_worse():
    run = Run(one(best_by="avg@1", every=1, patience=1))
    assert run.report(run.ask(0), 0)
    assert run.stops == 0


def test_a_restored_schedule_has_the_evaluations_that_are_not_done():
    run = Run(one("a", every=2), one("b", every=2, best_by="avg@1", patience=2))
    job = run.ask(2, "maker-0")
    run.report(run.ask(2, "maker-1"), 2, is_best=False)
    run.report(run.ask(4, "maker-1"), 4, is_best=False)
    run.report(job, 2)
    again = Run(one("a", every=2), one("b", every=2, best_by="avg@1", patience=2))
    again.schedule.restore(json.loads(json.dumps(run.schedule.state())))
    assert again.ask(2) is None
    assert again.ask(4, "maker-0").name == "a"
    assert again.ask(4, "maker-1") is None
    again.report(again.ask(6, "maker-1"), 6, is_best=False)
    assert again.stops == 1, "the count of evaluations without improvement survives a restart"


def test_the_final_evaluations_are_waited_for():
    run = Run(one("a"), one("b", at_end=False))
    assert run.versions(0, 0) == [0, 0]
    run.schedule.end(5)
    assert run.schedule.pending == ["a"]
    assert not run.schedule.wait(0.0)
    assert run.ask(4) is None, "only the final version counts"
    run.report(run.ask(5), 5)
    assert run.schedule.wait(0.0)

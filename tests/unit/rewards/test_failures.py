"""A reward that fails is retried, then called for each sample alone; failures are reported and never scored."""

import itertools
import math
import threading
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from coati.errors import RewardError, RewardFailed
from coati.rewards import FunctionReward, Reward, RewardProcess, RewardScorer, WeightedSum
from coati.rewards import scorer as scorer_module
from coati.rewards.calling import Verdict


class Numbers:
    """A tokenizer that decodes ids to numbers."""

    def decode(self, ids, skip_special_tokens):
        return " ".join(map(str, ids))


def begin(function, *responses, timeout_seconds=30.0, is_sum=False, scorer=None, **options):
    """Start to score samples with the completions " 1", " 2", …"""
    reward = FunctionReward(function, name="judge", timeout_seconds=timeout_seconds)
    reward = WeightedSum([(reward, 2.0)]) if is_sum else reward
    scorer = scorer or RewardScorer(reward, Numbers(), **{"retries": 1, "max_quarantined": 4, **options})
    sequences = torch.tensor([[9, number] for number in responses])
    columns = {"topic": [f"topic {number}" for number in responses]}
    mask = torch.ones_like(sequences)
    return scorer.begin(sequences, mask, mask[:, :1].bool(), columns)


class Judge:
    """Raises on a bad completion, and records its calls."""

    def __init__(self, *bad):
        self.bad, self.calls = bad, []

    def __call__(self, completions):
        numbers = [int(text) for text in completions]
        self.calls.append(numbers)
        for number in numbers:
            if number in self.bad:
                raise KeyError(f"no {number}")
        return [number / 2 for number in numbers]


@pytest.mark.parametrize("is_sum", [False, True])
def test_failing_samples_are_isolated_and_the_others_scored(is_sum):
    judge = Judge(2, 4)
    scores = begin(judge, 1, 2, 3, 4, is_sum=is_sum)
    factor = 2 if is_sum else 1
    assert scores().tolist() == pytest.approx([0.5 * factor, math.nan, 1.5 * factor, math.nan], nan_ok=True)
    assert judge.calls == [[1, 2, 3, 4]] * 2 + [[1], [2], [3], [4]]
    assert sorted(scores.failures) == [1, 3]
    assert "'judge' raised KeyError: 'no 2'" in scores.failures[1]
    assert "'judge' raised KeyError: 'no 4'" in scores.failures[3]


@pytest.mark.parametrize("retries", [0, 1, 3])
def test_a_reward_is_retried_as_often_as_allowed(retries):
    calls = itertools.count(1)

    def flaky(completions):
        if next(calls) <= retries:
            raise ConnectionError("try again")
        return [1.0] * len(completions)

    scores = begin(flaky, 1, 2, retries=retries)
    assert scores().tolist() == [1.0, 1.0]
    assert not scores.failures
    assert next(calls) == retries + 2


def test_samples_that_fail_together_but_not_alone_are_scored():
    def small(completions):
        if len(completions) > 1:
            raise MemoryError
        return [1.0]

    scores = begin(small, 1, 2)
    assert scores().tolist() == [1.0, 1.0]
    assert not scores.failures


def test_a_function_that_never_works_is_an_error_with_its_own_message():
    def broken(completions):
        raise KeyError("no such column")

    with pytest.raises(RewardFailed, match=r"^Reward function 'judge' raised KeyError: 'no such column'") as caught:
        begin(broken, 1, 2)()
    assert "completion ' 1'" in str(caught.value)


def test_a_retry_warning_counts_samples_and_blames_none(caplog):
    begin(Judge(2), 1, 2, 3)()
    begin(lambda completions: [ValueError("hard"), 1.0, 1.0][: len(completions)], 1, 2, 3)()
    whole, named = (record.getMessage() for record in caplog.records)
    assert "'judge' raised KeyError: 'no 2'" in whole
    assert "Retrying 3 samples." in whole
    assert "Retrying 1 sample." in named
    assert not [text for text in (whole, named) if "completion '" in text]


def test_a_function_that_has_worked_may_fail_on_a_whole_batch():
    scores = begin(Judge(2, 3), 1)
    assert scores().tolist() == [0.5]
    later = begin(None, 2, 3, scorer=scores._scorer)
    assert later().isnan().all()
    assert sorted(later.failures) == [0, 1]


def test_without_quarantine_the_first_failure_is_an_error():
    judge = Judge(2)
    with pytest.raises(RewardFailed, match="no 2"):
        begin(judge, 1, 2, max_quarantined=0)()
    assert judge.calls == [[1, 2], [1, 2]]


@pytest.mark.parametrize("returned", [[1.0], [1.0, "2"], None], ids=repr)
def test_wrong_scores_are_an_error_at_once(returned):
    calls = []

    def wrong(completions):
        calls.append(1)
        return returned

    with pytest.raises(RewardError, match=r"returned|did not return a list") as caught:
        begin(wrong, 1, 2)()
    assert not isinstance(caught.value, RewardFailed)
    assert calls == [1]


def test_samples_called_alone_share_the_time_of_one_batch(monkeypatch):
    now, shares = [0.0], []
    monkeypatch.setattr(scorer_module, "time", SimpleNamespace(monotonic=lambda: now[0]))

    class Hangs(Reward):
        """Takes 0.25 s per call, or all of its time if the second sample is in the request."""

        name, timeout_seconds = "judge", 2.0

        def score(self, request):
            shares.append(request.timeout_seconds)
            hangs = " 2" in request.completions
            now[0] += min(self.timeout_seconds, request.timeout_seconds) if hangs else 0.25
            if hangs:
                raise RewardFailed("did not return in time")
            return torch.ones(len(request))

    scores = begin(None, 1, 2, 3, scorer=RewardScorer(Hangs(), Numbers(), max_quarantined=4))
    assert scores().tolist() == pytest.approx([1.0, math.nan, 1.0], nan_ok=True)
    assert scores.failures == {1: "did not return in time"}
    # A third of 2 s; half of the 1.75 s that the first sample left; the second used up its half.
    assert shares == pytest.approx([math.inf, 2 / 3, 1.75 / 2, 1.75 / 2])
    assert now[0] == pytest.approx(2.0 + 0.25 + 1.75 / 2 + 0.25)


def test_a_process_may_take_longer_to_start_than_a_batch():

    class SlowToStart(RewardProcess):
        """A process that takes longer to start than the deadline of a batch."""

        def __init__(self):
            pass

        def start(self):
            threading.Event().wait(0.2)
            return False

        def call(self, arguments, expected):
            return [Verdict(1.0)] * expected

        def kill(self):
            pass

    scores = begin(SlowToStart(), 1, 2, timeout_seconds=0.1, retries=0)
    assert scores().tolist() == [1.0, 1.0]


def test_only_the_samples_that_failed_are_retried():
    calls = []

    def picky(completions):
        calls.append([int(text) for text in completions])
        is_bad = {2: len(calls) == 1, 4: True}
        return [ValueError("hard") if is_bad.get(number) else 1.0 for number in calls[-1]]

    scores = begin(picky, 1, 2, 3, 4, retries=1)
    assert scores().tolist() == pytest.approx([1.0, 1.0, 1.0, math.nan], nan_ok=True)
    assert calls == [[1, 2, 3, 4], [2, 4], [4]]
    assert list(scores.failures) == [3]
    assert "'judge' raised ValueError: hard" in scores.failures[3]
    assert scores.num_retries == 1


def test_a_function_that_fails_on_every_sample_and_has_never_scored_one_is_an_error():
    with pytest.raises(RewardFailed, match="no such key"):
        begin(lambda completions: [KeyError("no such key") for _ in completions], 1, 2)()


def test_without_quarantine_a_failure_of_one_sample_is_an_error_too():
    with pytest.raises(RewardFailed, match="hard"):
        begin(lambda completions: [ValueError("hard") for _ in completions], 1, 2, max_quarantined=0)()


def test_only_the_term_that_fails_is_retried():
    judge, calls = Judge(2), []
    other = FunctionReward(lambda completions: calls.append(1) or [{"score": 1.0, "by": "other"}] * 2, name="other")
    terms = WeightedSum([(other, 10.0), (FunctionReward(judge, name="judge"), 2.0)])
    scores = begin(None, 1, 2, scorer=RewardScorer(terms, Numbers(), retries=1, max_quarantined=4))
    assert scores().tolist() == pytest.approx([11.0, math.nan], nan_ok=True)
    assert len(calls) == 1
    assert judge.calls == [[1, 2], [1, 2], [1], [2]]
    assert scores.terms["other"].tolist() == [1.0, 1.0]
    assert scores.terms["judge"].tolist() == pytest.approx([0.5, math.nan], nan_ok=True)
    assert [row["details"] for row in scores.remarks()] == [{"other": {"by": "other"}}] * 2
    assert list(scores.failures) == [1]


def test_a_missing_score_is_not_a_failure():
    scores = begin(lambda completions: [math.nan, None], 1, 2)
    assert scores().isnan().all()
    assert not scores.failures
    assert scores.unscored == {0: "judge", 1: "judge"}


def test_the_term_that_gives_no_score_is_named_and_recorded():
    form = {1: None, 2: 0.5, 3: ValueError("odd")}
    terms = [
        ("right", lambda completions: [1.0] * 3),
        ("form", lambda completions: [form[int(one)] for one in completions]),
    ]
    reward = WeightedSum([(FunctionReward(function, name=name), 1.0) for name, function in terms])
    scores = begin(None, 1, 2, 3, scorer=RewardScorer(reward, Numbers(), retries=0, max_quarantined=4))
    scores()
    assert (scores.unscored, sorted(scores.failures)) == ({0: "form"}, [2])
    assert [bool(one.error) for one in scores.verdicts["form"]] == [False, False, True]
    assert not any(one.error for one in scores.verdicts["right"])
    assert [row["terms"]["form"] for row in scores.remarks()] == [None, 0.5, None]


@given(
    tape=st.lists(st.sampled_from(["score", "score", "none", "fail", "raise"]), max_size=60),
    size=st.integers(1, 5),
    retries=st.integers(0, 2),
    is_sum=st.booleans(),
)
@example(tape=["raise"] * 9, size=3, retries=1, is_sum=False)
@example(tape=["score", "fail", "raise", "none", "score", "fail"], size=3, retries=0, is_sum=True)
def test_samples_get_their_own_score_or_none_and_failures_are_reported(tape, size, retries, is_sum):
    left, last = list(tape), {}

    def erratic(completions):
        answers = []
        for text in completions:
            last[int(text)] = what = left.pop() if left else "score"
            if what == "raise":
                last.update((int(other), what) for other in completions)
                raise OSError("broken")
            answers.append({"score": int(text) / 2, "none": None, "fail": ValueError("hard")}[what])
        return answers

    reward = FunctionReward(erratic, name="judge")
    reward = WeightedSum([(reward, 2.0)]) if is_sum else reward
    scorer = RewardScorer(reward, Numbers(), retries=retries, max_quarantined=4)
    scorer.working.add("judge")  # otherwise a failure on all samples would be an error
    scores = begin(None, *range(1, size + 1), scorer=scorer)
    values = scores().tolist()
    assert {row for row in range(size) if last[row + 1] in ("fail", "raise")} == set(scores.failures)
    for row, value in enumerate(values):
        assert value == (row + 1) / (1 if is_sum else 2) if last[row + 1] == "score" else math.isnan(value)

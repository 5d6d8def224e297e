"""Reward functions run while the models score the same batch; models as rewards wait their turn."""

import threading

import pytest
import torch
from torch import nn

from coati.config import AlgorithmSettings
from coati.errors import RewardError
from coati.experience_maker import NaiveExperienceMaker
from coati.models import Actor
from coati.rewards import FunctionReward, Reward, RewardScorer, WeightedSum

PROMPTS = torch.tensor([[3, 4], [5, 6]])
SECONDS = 30  # far longer than anything here takes


class Numbers:
    """A tokenizer that writes numbers."""

    def decode(self, ids, skip_special_tokens):
        return " ".join(map(str, ids))


class Watched(nn.Module):
    """A reference model that calls a hook on each forward pass, which may block."""

    def __init__(self, model, on_call):
        super().__init__()
        self.model, self.on_call = model, on_call

    def forward(self, input_ids, attention_mask=None, **kwargs):
        self.on_call()
        return self.model(input_ids=input_ids, attention_mask=attention_mask, **kwargs)


@pytest.fixture
def make(llama):
    def make(reward, on_reference=lambda: None):
        maker = NaiveExperienceMaker(
            Actor(llama(seed=1)),
            None,
            RewardScorer(reward, Numbers()),
            Watched(llama(seed=2), on_reference),
            algorithm=AlgorithmSettings(name="grpo"),
        )
        group_ids = torch.zeros(2, dtype=torch.long)
        return maker.make_experience(PROMPTS, torch.ones_like(PROMPTS), group_ids=group_ids, max_new_tokens=3)

    return make


@pytest.mark.parametrize("is_sum", [False, True])
def test_a_function_and_the_reference_work_at_the_same_time(make, is_sum):
    reward_begun, reference_begun = threading.Event(), threading.Event()

    def patient(completions):
        reward_begun.set()
        return [1.0 if reference_begun.wait(SECONDS) else -1.0] * len(completions)

    def on_reference():  # neither can end before the other has started
        assert reward_begun.wait(SECONDS)
        reference_begun.set()

    reward = FunctionReward(patient)
    experience = make(WeightedSum([(reward, 2.0)]) if is_sum else reward, on_reference)
    assert experience.reward.tolist() == ([2.0, 2.0] if is_sum else [1.0, 1.0])


def test_an_error_of_a_function_is_raised_where_its_scores_are_used(make):
    calls = []

    def broken(completions):
        raise ZeroDivisionError("of nothing")

    with pytest.raises(RewardError, match="'broken' raised ZeroDivisionError: of nothing"):
        make(FunctionReward(broken), lambda: calls.append("reference"))
    assert calls == ["reference"]


def test_a_deadline_counts_from_the_start_and_is_kept(make):
    is_over = threading.Event()

    def hanging(completions):
        is_over.wait(SECONDS)
        return [0.0] * len(completions)

    try:
        with pytest.raises(RewardError, match=r"0\.01 s"):
            make(FunctionReward(hanging, timeout_seconds=0.01))
    finally:
        is_over.set()


def test_a_reward_that_may_be_a_model_is_asked_after_the_models(make):
    calls = []

    class OfSomebody(Reward):
        name = "of somebody"

        def score(self, request):
            calls.append(threading.current_thread())
            return torch.ones(len(request))

    function = FunctionReward(lambda completions: [1.0] * len(completions), name="function")
    for reward in (OfSomebody(), WeightedSum([(function, 1.0), (OfSomebody(), 1.0)])):
        calls.clear()
        make(reward, lambda: calls.append("reference"))
        assert calls == ["reference", threading.current_thread()]


def test_a_function_that_uses_a_model_waits_its_turn(make):
    calls = []

    def judged(completions):
        calls.append("reward")
        return [1.0] * len(completions)

    judged.is_host_work = False
    make(FunctionReward(judged), lambda: calls.append("reference"))
    assert calls == ["reference", "reward"]


def test_a_reward_that_never_ends_is_an_error(make):
    is_over = threading.Event()

    class Stuck(Reward):
        name, is_host_work, timeout_seconds = "stuck", True, 0.01

        def score(self, request):
            is_over.wait(SECONDS)
            return torch.zeros(len(request))

    try:
        with pytest.raises(RewardError, match="'stuck' did not score"):
            make(Stuck())
    finally:
        is_over.set()


def test_a_reward_that_never_ends_has_the_time_of_one_batch_for_all_samples_alone():
    is_over = threading.Event()

    class Stuck(Reward):
        name, is_host_work, timeout_seconds = "stuck", True, 0.2

        def score(self, request):
            if len(request) == 1 and request.completions[0] == " 5":
                return torch.ones(1)
            is_over.wait(SECONDS)
            return torch.zeros(len(request))

    actions = torch.tensor([[3, 5], [4, 6], [4, 5], [4, 7]])
    scorer = RewardScorer(Stuck(), Numbers(), max_quarantined=4)
    scores = scorer.begin(actions, torch.ones_like(actions), torch.ones(4, 1, dtype=torch.bool))
    try:
        assert scores()[0] == scores()[2] == 1
        assert scores.failures.keys() == {1, 3}
        seconds = [float(error.split("1 sample within ")[1].split()[0]) for error in scores.failures.values()]
        assert sum(seconds) < 0.21
    finally:
        is_over.set()


def test_a_function_reward_with_a_score_of_its_own_has_a_deadline(make):
    is_over = threading.Event()

    class Own(FunctionReward):
        def score(self, request):
            is_over.wait(SECONDS)
            return torch.zeros(len(request))

    try:
        with pytest.raises(RewardError, match="did not score"):
            make(Own(lambda completions: [0.0] * len(completions), timeout_seconds=0.01))
    finally:
        is_over.set()


def test_a_reward_that_never_ends_does_not_block_the_batches_behind_it():
    is_over, calls = threading.Event(), []

    class StuckOnce(Reward):
        name, is_host_work, timeout_seconds = "stuck", True, 0.3

        def score(self, request):
            calls.append(request)
            if len(calls) == 1:
                is_over.wait(SECONDS)
            return torch.zeros(len(request))

    scorer = RewardScorer(StuckOnce(), Numbers())
    pending = [scorer.begin(PROMPTS, torch.ones_like(PROMPTS), PROMPTS[:, :1].bool()) for _ in range(3)]
    try:
        with pytest.raises(RewardError, match="'stuck' did not score"):
            pending[0]()
        assert [scores().tolist() for scores in pending[1:]] == [[0.0, 0.0]] * 2
    finally:
        is_over.set()


def test_a_reward_that_never_ends_is_retried():
    is_over = threading.Event()
    answers = iter([lambda: is_over.wait(SECONDS), lambda: torch.ones(2)])

    class SlowOnce(Reward):
        name, is_host_work, timeout_seconds = "slow", True, 0.3

        def score(self, request):
            return next(answers)()

    scores = RewardScorer(SlowOnce(), Numbers(), retries=1).begin(
        PROMPTS, torch.ones_like(PROMPTS), PROMPTS[:, :1].bool()
    )
    try:
        assert scores().tolist() == [1.0, 1.0]
        assert scores.num_retries == 1
    finally:
        is_over.set()

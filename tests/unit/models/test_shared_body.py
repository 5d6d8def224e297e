"""Models with one body: one pass, the same bits, and nothing shared that is not the same."""

import copy

import pytest
import torch
from torch import nn

from coati.experience_maker import NaiveExperienceMaker
from coati.experience_maker.model_scores import reward_models_on_device_of, score_with_models
from coati.models import Actor, Critic, RewardModel
from coati.models.shared_body import body_of, take_body_of
from coati.rewards import FunctionReward, ModelReward, RewardScorer, WeightedSum

# Padding on the left, on the right, on both sides, and none.
MASK = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 0, 0], [0, 0, 1, 1, 0], [1, 1, 1, 1, 1]])
SEQUENCES = torch.randint(3, 11, MASK.shape, generator=torch.Generator().manual_seed(0))
BATCH = (SEQUENCES, MASK, MASK[:, 2:].bool(), torch.tensor([1.0, 0.7, 1.0, 1.3]))


def with_head(kind, body, seed):
    model = kind(body)
    nn.init.normal_(model.value_head.weight, generator=torch.Generator().manual_seed(seed))
    return model.eval()


@pytest.fixture
def models(llama):
    """A reference, a critic and two reward models, all with one body."""
    reference = Actor(llama(seed=1)).eval()
    body = reference.model.model
    kinds = (Critic, RewardModel, RewardModel)
    return reference, *(with_head(kind, body, seed) for seed, kind in enumerate(kinds))


def passes_of(body):
    calls = []
    body.register_forward_pre_hook(lambda *_: calls.append(1))
    return calls


@pytest.mark.parametrize(("max_tokens", "num_parts"), [(9, 2), (1000, 1)])
def test_one_pass_gives_the_bits_of_separate_ones(models, max_tokens, num_parts):
    apart = [copy.deepcopy(model) for model in models]  # each with a body of its own
    calls, calls_apart = passes_of(models[0].model.model), [passes_of(body_of(model)) for model in apart]
    for (reference, critic, *rewards), counted in ((models, [calls]), (apart, calls_apart)):
        scores = score_with_models(reference, critic, *BATCH, reward_models=rewards, max_tokens=max_tokens)
        assert [len(count) for count in counted] == [num_parts] * len(counted)
        if reference is models[0]:
            together = scores
    assert all(map(torch.equal, together, scores))
    assert together.rewards.shape == (4, 2)
    assert together.rewards.std(dim=0).min() > 0
    if num_parts == 1:
        assert torch.equal(together.rewards[:, 0], apart[2](SEQUENCES, MASK))


class Louder(Actor):
    """Somebody's own policy: what it says of tokens is not what its body says."""

    def forward(self, *args, **kwargs):
        logprobs, entropies = super().forward(*args, **kwargs)
        return 2 * logprobs, entropies


@pytest.mark.parametrize("kind", ["a subclass", "a hook"])
def test_a_policy_that_does_more_than_ours_is_called(models, kind):
    reference, critic, *rewards = models
    plain = score_with_models(reference, critic, *BATCH)
    if kind == "a subclass":
        reference = Louder(reference.model)
    else:
        reference.register_forward_hook(lambda module, inputs, output: (2 * output[0], output[1]))
    assert body_of(reference) is None
    scores = score_with_models(reference, critic, *BATCH, reward_models=rewards)
    assert torch.equal(scores.reference_logprobs, 2 * plain.reference_logprobs)


@pytest.mark.parametrize("kind", ["the model", "a term", "two terms and a function"])
def test_a_maker_asks_reward_models_with_the_reference(models, llama, kind):
    def made_by(reference, critic, first, second):
        terms = [(ModelReward(first, "first"), 1.0)]
        if kind == "two terms and a function":
            function = FunctionReward(lambda completions: [0.5] * len(completions), name="half")
            terms += [(ModelReward(second, "second"), 2.0), (function, 1.0)]
        reward = first if kind == "the model" else RewardScorer(WeightedSum(terms), Letters())
        maker = NaiveExperienceMaker(Actor(llama(seed=7)), critic, reward, reference)
        prompts, mask = torch.tensor([[3, 4, 5], [0, 0, 6]]), torch.tensor([[1, 1, 1], [0, 0, 1]])
        return maker.make_experience(prompts, mask, max_new_tokens=3)

    class Letters:
        def decode(self, ids, skip_special_tokens):
            return ""

    apart = made_by(*(copy.deepcopy(model) for model in models))
    calls = passes_of(models[0].model.model)
    together = made_by(*models)
    assert len(calls) == 1
    for name in ("reward", "values", "kl", "advantages"):
        assert torch.equal(getattr(together, name), getattr(apart, name)), name
    assert together.reward.std() > 0


def test_only_reward_models_of_ours_are_asked_with_others(models, llama):
    reference, _, shared, _ = models
    alone = RewardModel(llama(seed=5))

    class Squared(RewardModel):
        def forward(self, *args):
            return super().forward(*args) ** 2

    hooked = with_head(RewardModel, shared.body, 5)
    hooked.register_forward_hook(lambda *_: None)
    elsewhere = RewardModel(llama(seed=6)).to("meta")
    others = [Squared(shared.body), hooked, nn.Linear(2, 2), elsewhere]
    assert reward_models_on_device_of(reference, others) == []
    assert reward_models_on_device_of(reference, [*others, shared, alone, shared]) == [shared, alone]


def changed(body):
    body.norm.weight.data[3] += 1e-6
    return body


def other_positions(body):
    body.config.rope_parameters = {**body.config.rope_parameters, "rope_theta": 1234.0}
    return body


@pytest.mark.parametrize(
    ("of_the_reference", "of_the_reward", "is_taken"),
    [
        (lambda body: body, lambda body: body, True),
        (lambda body: body, changed, False),
        (lambda body: body, nn.Module.double, False),
        (lambda body: body, other_positions, False),
    ],
    ids=["the same", "a weight", "dtype", "settings"],
)
def test_a_body_is_taken_only_if_it_is_the_same_to_the_bit(llama, of_the_reference, of_the_reward, is_taken):
    reference, reward = Actor(llama(seed=1)), RewardModel(llama(seed=1))
    of_the_reference(reference.model.model)
    of_the_reward(reward.body)
    lender = take_body_of(reward, [Actor(llama(seed=2)), reference])
    assert (lender is reference) == is_taken
    assert (reward.body is reference.model.model) == is_taken
    assert (lender is None) == (not is_taken)

"""The reference maker compared with the definitions, and every fault that a batch of prompts can have."""

import dataclasses
import inspect
import logging
import math
import pickle

import pytest
import torch
from torch import nn
from transformers import LlamaForSequenceClassification

from coati.config import AlgorithmSettings
from coati.errors import ConfigError, DataError, GenerateOptionError, RewardError
from coati.experience import Sample
from coati.experience_maker import AllSamplesDropped, NaiveExperienceMaker, naive
from coati.experience_maker.pipeline import ExperiencePipeline
from coati.experience_maker.scoring import NoSignal
from coati.models import Actor, Critic, RewardModel, action_values
from coati.prompts.batch import parse_prompts
from coati.rewards import Reward, RewardScorer
from coati.rollout import ReferenceEngine
from coati.weights.served import ServedModels

PROMPTS = [[3, 4, 5], [6], [7, 8, 9, 10], [9, 10]]
NAN, INF = float("nan"), float("inf")


def padded(prompts, extra=0):
    width = max(map(len, prompts)) + extra
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return ids, mask


def randomise_head(model, seed=5):
    nn.init.normal_(model.value_head.weight, generator=torch.Generator().manual_seed(seed))
    return model


class Scores(nn.Module):
    """A reward model that returns fixed scores, whatever the text."""

    def __init__(self, scores):
        super().__init__()
        self.scores = scores

    def forward(self, sequences, attention_mask):
        return self.scores


@pytest.fixture
def make_maker(llama):
    """Return a maker of four different tiny models, any of which can be replaced."""

    def make(**changes):
        settings = {
            "actor": Actor(llama(seed=1)),
            "critic": randomise_head(Critic(llama(seed=2)), 5),
            "reward_model": randomise_head(RewardModel(llama(seed=3)), 6),
            "initial_model": llama(seed=4),
        }
        return NaiveExperienceMaker(**{**settings, **changes})

    return make


def make_experience(maker, prompts=PROMPTS, *, extra=0, **kwargs):
    input_ids, attention_mask = padded(prompts, extra)
    return maker.make_experience(input_ids, attention_mask, **{"max_new_tokens": 6, **kwargs})


def begun(maker, prompts, **options):
    """Generate and score a batch as the loop does, without waiting for rewards."""
    maker.start_samples(prompts, **options)
    while maker.num_generating:
        maker.generate_tokens()
    return maker.score_complete()


def texts(experience):
    """Return prompt and response of each row, without padding."""
    first = experience.num_prompt_tokens
    rows = []
    for row in range(experience.num_samples):
        ids, real = experience.sequences[row], experience.attention_mask[row].bool()
        rows.append((ids[:first][real[:first]].tolist(), ids[first:][experience.action_mask[row]].tolist()))
    return rows


# Every field, compared with a slow computation from the definitions


def log_prob(model, prefix, token, temperature):
    logits = model(torch.tensor([prefix])).logits[0, -1].double() / temperature
    return torch.log_softmax(logits, dim=-1)[token].item()


@pytest.mark.parametrize(("estimator", "temperature"), [("k1", 0.7), ("k3", 1.0)])
@torch.no_grad()
def test_every_field_matches_its_definition(make_maker, estimator, temperature):
    kl_coef, gamma, lam = 0.3, 0.9, 0.8
    maker = make_maker(kl_coef=kl_coef, gamma=gamma, lam=lam, algorithm=AlgorithmSettings(kl_estimator=estimator))
    maker.policy_version = 7
    experience = make_experience(maker, temperature=temperature, eos_token_id=[2, 5, 8])
    experience.validate()
    lengths = []
    for row, (prompt, response) in enumerate(texts(experience)):
        assert prompt == PROMPTS[row]
        # One token at a time, without padding, without a cache: log-probs, values and KL from each prefix.
        prefixes = [prompt + response[:step] for step in range(len(response))]
        pairs = list(zip(prefixes, response, strict=True))
        policy = [log_prob(maker.actor.model, prefix, token, temperature) for prefix, token in pairs]
        initial = [log_prob(maker.initial_model, prefix, token, temperature) for prefix, token in pairs]
        differences = [one - other for one, other in zip(policy, initial, strict=True)]
        kl = differences if estimator == "k1" else [math.exp(-d) - 1 + d for d in differences]
        values = [maker.critic(torch.tensor([prefix]))[0, -1].item() for prefix in prefixes]
        score = maker.reward_model(torch.tensor([prompt + response])).item()
        # The penalty on every token, the score on the last; V = 0 after the end:
        # delta_t = r_t + gamma V_{t+1} - V_t and A_t = sum over l of (gamma lam)^l delta_{t+l}.
        steps = range(len(response))
        rewards = [-kl_coef * kl[t] + (score if t == len(response) - 1 else 0.0) for t in steps]
        deltas = [rewards[t] + gamma * [*values, 0.0][t + 1] - values[t] for t in steps]
        advantages = [sum((gamma * lam) ** (later - t) * deltas[later] for later in steps if later >= t) for t in steps]
        expected = {
            "action_log_probs": policy,
            "values": values,
            "kl": kl,
            "advantages": advantages,
        }
        for name, numbers in expected.items():
            got = getattr(experience, name)[row]
            torch.testing.assert_close(
                got[: len(response)].double(),
                torch.tensor(numbers, dtype=torch.float64),
                atol=1e-5,
                rtol=1e-5,
            )
            assert not got[len(response) :].any()
        assert experience.reward[row].item() == pytest.approx(score, abs=1e-5)  # without the penalty
        lengths.append(len(response))
    assert len(set(lengths)) > 1  # so there was padding that could go wrong
    assert experience.sample_ids.tolist() == [0, 1, 2, 3]
    assert experience.temperatures.tolist() == pytest.approx([temperature] * 4)
    assert experience.policy_versions[experience.action_mask].eq(7).all()
    assert experience.group_ids is None
    assert not any(tensor.requires_grad for _, tensor in experience.tensors())


def test_defaults_are_those_of_the_contract():
    parameters = inspect.signature(NaiveExperienceMaker).parameters
    assert list(parameters)[:7] == [
        "actor",
        "critic",
        "reward_model",
        "initial_model",
        "kl_coef",
        "gamma",
        "lam",
    ]
    assert [parameters[name].default for name in ("kl_coef", "gamma", "lam")] == [0.1, 1.0, 0.95]


def test_extra_left_padding_changes_nothing(make_maker):
    narrow, wide = make_experience(make_maker()), make_experience(make_maker(), extra=5)
    assert texts(narrow) == texts(wide)
    for name in ("action_log_probs", "values", "reward", "kl", "advantages"):
        torch.testing.assert_close(getattr(narrow, name), getattr(wide, name), atol=1e-5, rtol=0)


def test_the_order_of_a_batch_changes_nothing(make_maker):
    order = [2, 0, 3, 1]
    ids = torch.tensor([20, 21, 22, 23])
    straight = make_experience(make_maker(), sample_ids=ids)
    shuffled = make_experience(make_maker(), [PROMPTS[row] for row in order], sample_ids=ids[order])
    assert texts(shuffled) == [texts(straight)[row] for row in order]
    for name, tensor in straight.tensors():
        torch.testing.assert_close(getattr(shuffled, name), tensor[order], atol=1e-5, rtol=0)


def test_without_an_initial_model_no_kl_is_measured_and_all_else_is_the_same(make_maker):
    for name in ("dapo", "vapo"):  # without a KL penalty, without and with a critic
        algorithm = AlgorithmSettings(name=name, dynamic_sampling=False)
        groups = {"group_ids": torch.tensor([0, 0, 1, 1])}
        with_it, without = (
            make_experience(make_maker(algorithm=algorithm, **changes), **groups)
            for changes in ({}, {"initial_model": None})
        )
        assert with_it.kl.abs().max() > 0
        assert without.kl.shape == with_it.kl.shape
        assert not without.kl.any()
        assert without.reference_log_probs is None
        for field in ("sequences", "action_log_probs", "values", "reward", "advantages"):
            assert torch.equal(getattr(without, field), getattr(with_it, field))
    with pytest.raises(ConfigError, match=r"initial_model.*kl_coef"):
        make_maker(initial_model=None)


def test_kl_is_zero_while_the_actor_is_the_initial_model(make_maker, llama):
    actor = llama(seed=1)
    experience = make_experience(make_maker(actor=actor, initial_model=llama(seed=1)))
    assert experience.kl.abs().max() < 1e-5
    assert make_experience(make_maker(actor=actor)).kl.abs().max() > 0.01


def test_the_log_prob_gap_of_the_engine_is_measured(make_maker):
    prompts = [Sample(one, prompt) for one, prompt in enumerate(PROMPTS)]
    batch = begun(make_maker(engine="native"), prompts, max_new_tokens=6)
    assert batch.metrics["rollout/logprob_gap"].weight == int(batch.experience.action_mask[:2].sum())
    assert batch.metrics["rollout/logprob_gap_max"].value < 1e-5


def test_cut_responses_are_those_that_the_engine_cut(make_maker):
    class StopsAtText(ReferenceEngine):
        """Ends some responses without an end token, as stop strings do."""

        def advance(self):
            return [dataclasses.replace(one, is_cut=one.id == 1) for one in super().advance()]

    maker = make_maker()
    maker.engine = StopsAtText(maker.actor)
    pipeline = ExperiencePipeline(
        maker, ServedModels(maker.trained_models), generate_kwargs={"max_new_tokens": 3, "eos_token_id": []}
    )
    input_ids, attention_mask = padded(PROMPTS, 0)
    batch = pipeline.make_batch(parse_prompts({"input_ids": input_ids, "attention_mask": attention_mask}))
    experience = pipeline.finish_batch(batch)
    assert experience.is_cut.tolist() == [False, True, False, False]
    assert experience.sample_metrics()["response/cut_fraction"] == 0.25


def test_models_are_switched_to_evaluation_mode(make_maker, gpt2):
    actor = gpt2(resid_pdrop=0.5, embd_pdrop=0.5).train()
    maker = make_maker(actor=actor, initial_model=gpt2(resid_pdrop=0.5, embd_pdrop=0.5).train())
    assert not any(model.training for model in (maker.actor, maker.critic, maker.reward_model, maker.initial_model))
    assert make_experience(maker).kl.abs().max() < 1e-5


# Which models and modules are accepted


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_four_plain_transformers_models_are_accepted(request, family, llama_config):
    make = request.getfixturevalue(family)
    torch.manual_seed(3)
    reward_model = LlamaForSequenceClassification(llama_config(num_labels=1)).eval()
    maker = NaiveExperienceMaker(make(seed=1), make(seed=2), reward_model, make(seed=4))
    assert isinstance(maker.critic, Critic)
    experience = make_experience(maker)
    assert not experience.values.any()  # a new head starts at zero
    for (prompt, response), reward in zip(texts(experience), experience.reward.tolist(), strict=True):
        if response[-1] != 0:  # transformers scores at the last token that is not the padding token
            expected = reward_model(torch.tensor([prompt + response])).logits.item()
            assert reward == pytest.approx(expected, abs=1e-5)
    assert any(response[-1] != 0 for _, response in texts(experience))


def test_a_classification_model_with_two_labels_is_no_reward_model(make_maker, llama_config):
    with pytest.raises(ConfigError, match="needs one label"):
        make_maker(reward_model=LlamaForSequenceClassification(llama_config(num_labels=2)))


def test_a_hand_written_critic_may_return_a_value_for_each_token_or_for_each_action(make_maker):
    class PerToken(nn.Module):
        def forward(self, sequences, attention_mask):
            return sequences.float()

    class PerAction(nn.Module):
        def forward(self, sequences, attention_mask):
            return sequences[:, 3:-1].float()  # prompts are padded to 4 tokens

    for critic in (PerToken(), PerAction()):
        experience = make_experience(make_maker(critic=critic))
        # The value before a token is read at the token before it: here, its id.
        before = experience.sequences[:, 3:-1].float().masked_fill(~experience.action_mask, 0.0)
        assert torch.equal(experience.values, before)


@pytest.mark.parametrize(
    "returned",
    [torch.zeros(4), torch.zeros(4, 3), torch.zeros(4, 8, 1), [0.0], None],
    ids=["B", "B3", "BS1", "list", "none"],
)
def test_a_critic_that_returns_something_else_is_an_error_that_says_what(returned):
    class Odd(nn.Module):
        def forward(self, sequences, attention_mask):
            return returned

    with pytest.raises(DataError, match=r"the critic Odd must return \[4, 8\].* or \[4, 2\].*, got "):
        action_values(Odd(), torch.zeros(4, 8, dtype=torch.long), None, 2)


def test_values_of_no_actions_are_empty(llama):
    assert action_values(Critic(llama()), torch.zeros(2, 3, dtype=torch.long), None, 0).shape == (2, 0)


@pytest.mark.parametrize("shape", [(4,), (4, 1)])
def test_a_hand_written_reward_model_returns_one_score_per_sample(make_maker, shape):
    scores = torch.tensor([1.0, 2.0, -3.0, 0.5], dtype=torch.float64)
    experience = make_experience(make_maker(reward_model=Scores(scores.reshape(shape))))
    assert experience.reward.tolist() == [1.0, 2.0, -3.0, 0.5]
    assert experience.reward.dtype == torch.float32


@pytest.mark.parametrize(
    ("scores", "came"),
    [
        (torch.zeros(3), r"shape \[3\]"),
        (torch.zeros(4, 9), r"shape \[4, 9\]"),
        (torch.tensor(1.0), r"shape \[\]"),
        ([0.0] * 4, "list"),
        (None, "NoneType"),
    ],
)
def test_the_wrong_number_of_scores_is_a_reward_error(make_maker, scores, came):
    with pytest.raises(RewardError, match=f"'Scores' must return one score for each of 4 sequences, got {came}"):
        make_experience(make_maker(reward_model=Scores(scores)))


def test_an_output_with_logits_is_a_score(make_maker):
    experience = make_experience(make_maker(reward_model=Scores({"logits": torch.arange(4.0).unsqueeze(1)})))
    assert experience.reward.tolist() == [0.0, 1.0, 2.0, 3.0]


class Letters:
    """A minimal tokenizer for a scorer: token ids as text."""

    def decode(self, ids, skip_special_tokens):
        return " ".join(map(str, ids))


class Remembering(Reward):
    """A reward that records its requests and scores the length of the text."""

    name = "remembering"

    def __init__(self):
        self.requests = []

    def score(self, request):
        self.requests.append(request)
        return torch.tensor([float(len(text.split())) for text in request.completions])


def test_columns_and_texts_reach_a_reward_scorer(make_maker):
    reward = Remembering()
    maker = make_maker(reward_model=RewardScorer(reward, Letters()))
    columns = {"answer": ["a", "b", "c", "d"], "level": torch.arange(4)}
    experience = make_experience(maker, columns=columns)
    (request,) = reward.requests
    assert request.columns == {"answer": ["a", "b", "c", "d"], "level": [0, 1, 2, 3]}
    assert request.prompts == ["3 4 5", "6", "7 8 9 10", "9 10"]
    responses = [response for _, response in texts(experience)]
    assert [text.split() for text in request.completions] == [list(map(str, response)) for response in responses]
    assert experience.reward.tolist() == [len(response) for response in responses]


def test_columns_follow_their_prompts_when_some_are_dropped(make_maker):
    reward = Remembering()
    maker = make_maker(reward_model=RewardScorer(reward, Letters()))
    experience = make_experience(
        maker,
        max_length=4,
        max_new_tokens=None,
        columns={"answer": ["a", "b", "c", "d"]},
        sample_ids=torch.tensor([5, 6, 7, 8]),
        group_ids=torch.tensor([1, 2, 3, 4]),
    )
    assert reward.requests[0].columns == {"answer": ["a", "b", "d"]}
    assert experience.sample_ids.tolist() == [5, 6, 8]
    assert experience.group_ids.tolist() == [1, 2, 4]


# Ids


def test_samples_without_ids_are_numbered_in_the_order_they_come(make_maker):
    maker = make_maker()
    assert make_experience(maker).sample_ids.tolist() == [0, 1, 2, 3]
    assert make_experience(maker, PROMPTS[:2]).sample_ids.tolist() == [4, 5]


def test_ids_key_the_text_and_the_seed_changes_it(make_maker):
    same = [PROMPTS[0]] * 2
    first, third = (text for _, text in texts(make_experience(make_maker(), same, sample_ids=torch.tensor([9, 4]))))
    ((_, second),) = texts(make_experience(make_maker(), same[:1], sample_ids=torch.tensor([9])))
    assert first == second != third
    other = texts(make_experience(make_maker(seed=1), same, sample_ids=torch.tensor([9, 4])))
    assert other[0][1] != first
    with pytest.raises(DataError, match="unique"):
        make_experience(make_maker(), same, sample_ids=torch.tensor([9, 9]))


@pytest.mark.parametrize("name", ["sample_ids", "group_ids"])
def test_ids_must_be_one_for_each_prompt(make_maker, name):
    with pytest.raises(DataError, match=f"'{name}' of a batch .* each of its 4 prompts, got 3"):
        make_experience(make_maker(), **{name: torch.arange(3)})


# Rewards that are not finite numbers


def test_a_sample_without_a_finite_reward_is_dropped_with_a_warning(make_maker, caplog):
    maker = make_maker(reward_model=Scores(torch.tensor([1.0, NAN, INF, 2.0])))
    with caplog.at_level(logging.WARNING, logger="coati.experience_maker.scoring"):
        experience = make_experience(maker, sample_ids=torch.tensor([11, 12, 13, 14]))
    assert experience.sample_ids.tolist() == [11, 14]
    assert experience.reward.tolist() == [1.0, 2.0]
    assert [prompt for prompt, _ in texts(experience)] == [PROMPTS[0], PROMPTS[3]]
    assert all(tensor.isfinite().all() for _, tensor in experience.tensors())
    assert "no score by 'Scores': 2 of 4 samples (sample ids [12, 13])" in caplog.text


def test_a_batch_without_a_finite_reward_is_dropped_whole(make_maker):
    maker = make_maker(reward_model=Scores(torch.full((4,), NAN)))
    with pytest.raises(AllSamplesDropped, match=r"4 of 4 samples .*\[0, 1, 2, 3\].*finite number") as caught:
        make_experience(maker)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize(("number", "kl_coef"), [("log-prob", 0.1), ("value", 0.1), ("KL", 0.1), ("KL", 0.0)])
def test_a_number_of_the_models_that_is_not_finite_costs_its_sample(make_maker, monkeypatch, caplog, number, kl_coef):
    maker = make_maker(kl_coef=kl_coef)
    advance = maker.engine.advance

    def poisoned(score, name):
        def scored(*args):
            tensor = score(*args).clone()
            tensor[2, 0] = NAN if name == number else tensor[2, 0]
            return tensor

        return scored

    def advance_poisoned():
        bad = NAN if number == "log-prob" else 1.0
        return [dataclasses.replace(one, log_probs=one.log_probs * (bad if one.id == 2 else 1.0)) for one in advance()]

    monkeypatch.setattr(maker.engine, "advance", advance_poisoned)
    monkeypatch.setattr(naive, "logprobs_of", poisoned(naive.logprobs_of, "KL"))
    monkeypatch.setattr(naive, "values_of", poisoned(naive.values_of, "value"))
    batch = begun(
        maker,
        [Sample(one, prompt) for one, prompt in enumerate(PROMPTS)],
        max_new_tokens=6,
    )
    maker.finalize(batch)
    is_dropped = number != "KL" or kl_coef > 0  # without a penalty, the KL is not used
    assert batch.experience.sample_ids.tolist() == ([0, 1, 3] if is_dropped else [0, 1, 2, 3])
    # The KL is computed from the log-probs; the reason names the first fault.
    lost = {sample.id: sample.drop_reason for sample in batch.samples if sample.drop_reason}
    assert lost == ({2: f"no finite {number}"} if is_dropped else {})


# Prompts that do not fit, and limits


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_prompt_that_fills_the_context_is_dropped_and_its_neighbours_are_not_cut(request, make_maker, family, caplog):
    # A context of 8 tokens and at most 4 new ones: prompts of 8 (no room), 6 (room for 2), 5 (3), 2, 1 (4).
    limit = "n_positions" if family == "gpt2" else "max_position_embeddings"
    actor = request.getfixturevalue(family)(seed=1, **{limit: 8})
    maker = make_maker(actor=actor)
    prompts = [[3] * 8, [4] * 6, [5] * 5, [6, 7], [8]]
    with caplog.at_level(logging.WARNING, logger="coati.experience_maker.naive"):
        experience = make_experience(maker, prompts, max_new_tokens=4, eos_token_id=[])
    assert "dropped 1 of 5 prompts: no room for a response (longest 8 tokens; context 8" in caplog.text
    assert [prompt for prompt, _ in texts(experience)] == prompts[1:]
    assert [len(response) for _, response in texts(experience)] == [2, 3, 4, 4]
    assert experience.sample_ids.tolist() == [1, 2, 3, 4]


def test_when_no_prompt_fits_the_batch_is_dropped_whole(make_maker, gpt2):
    maker = make_maker(actor=gpt2(n_positions=4))
    with pytest.raises(AllSamplesDropped, match=r"2 of 2 prompts leave no room .*Shorten the prompts"):
        make_experience(maker, [[3] * 4, [4] * 5])


def test_max_length_counts_each_prompt_without_its_padding(make_maker):
    # max_length 6: prompts of 3, 1, 4 and 2 tokens leave room for 3, 5, 2 and 4
    experience = make_experience(make_maker(), max_length=6, max_new_tokens=None, eos_token_id=[])
    assert [len(response) for _, response in texts(experience)] == [3, 5, 2, 4]
    assert torch.equal(experience.attention_mask[:, 4:].bool(), experience.action_mask)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_text_and_numbers_do_not_depend_on_neighbours_with_other_limits(request, make_maker, family):
    actor = request.getfixturevalue(family)(seed=1)
    options = {"max_length": 6, "max_new_tokens": None}
    ids = torch.tensor([3, 4, 5, 6])
    together = make_experience(make_maker(actor=actor), sample_ids=ids, **options)
    for row, prompt in enumerate(PROMPTS):
        alone = make_experience(make_maker(actor=actor), [prompt], sample_ids=ids[row : row + 1], **options)
        assert texts(alone) == [texts(together)[row]]
        count = alone.num_actions
        for name in ("action_log_probs", "values", "kl", "advantages"):
            torch.testing.assert_close(getattr(alone, name)[0], getattr(together, name)[row, :count], atol=1e-5, rtol=0)


def test_prompts_with_equal_limits_are_generated_in_one_call(make_maker):
    class Counting(ReferenceEngine):
        num_calls = 0

        def submit(self, samples):
            self.num_calls += 1
            super().submit(samples)

    maker = make_maker()
    maker.engine = Counting(maker.actor)
    make_experience(maker)
    make_experience(maker, max_length=6, max_new_tokens=None)
    assert maker.engine.num_calls == 2


def test_a_model_without_a_known_context_length_has_no_limit(make_maker, monkeypatch):
    monkeypatch.setattr("coati.experience_maker.naive.context_length_of", lambda model: None)
    experience = make_experience(make_maker(), max_new_tokens=3, eos_token_id=[])
    assert experience.num_actions == 3


def test_padding_equal_to_end_of_sequence_is_told_apart_by_position(make_maker):
    plain = make_experience(make_maker(), max_new_tokens=12)
    same_token = make_experience(make_maker(), max_new_tokens=12, pad_token_id=2, eos_token_id=2)
    assert texts(plain) == texts(same_token)
    assert torch.equal(plain.action_mask, same_token.action_mask)


# Bad prompts and options


def test_prompts_without_a_mask_are_taken_as_unpadded(make_maker):
    ids = torch.tensor([[3, 4], [5, 6]])
    bare = make_maker().make_experience(ids, max_new_tokens=3)
    masked = make_maker().make_experience(ids, torch.ones_like(ids), max_new_tokens=3)
    assert torch.equal(bare.sequences, masked.sequences)
    assert torch.equal(bare.attention_mask, masked.attention_mask)


def test_right_padded_prompts_are_refused_with_the_remedy(make_maker):
    ids, mask = torch.tensor([[3, 4], [5, 0]]), torch.tensor([[1, 1], [1, 0]])
    with pytest.raises(DataError, match=r"padded on the left.*padding_side = 'left'"):
        make_maker().make_experience(ids, mask)


@pytest.mark.parametrize("shape", [(3,), (0, 3), (3, 0), (1, 2, 3)])
def test_prompts_of_the_wrong_shape_are_refused(make_maker, shape):
    ids = torch.zeros(shape, dtype=torch.long)
    with pytest.raises(DataError, match=r"input_ids .*must be \[B, P\]"):
        make_maker().make_experience(ids, torch.ones_like(ids))


def test_a_mask_of_another_shape_is_refused(make_maker):
    with pytest.raises(DataError, match=r"attention_mask must have the shape of input_ids, \[1, 2\], got \[1, 3\]"):
        make_maker().make_experience(torch.tensor([[3, 4]]), torch.ones(1, 3))


def test_a_column_of_another_length_is_refused(make_maker):
    with pytest.raises(DataError, match="'answer' of a batch"):
        make_experience(make_maker(), columns={"answer": ["a"]})


def test_an_unknown_generate_option_is_an_error_before_anything_runs(make_maker):
    maker = make_maker(reward_model=Scores(None))
    with pytest.raises(GenerateOptionError, match=r"temprature.*Did you mean temperature"):
        make_experience(maker, temprature=0.5)
    assert make_experience(make_maker()).sample_ids.tolist() == [0, 1, 2, 3]


# Algorithms that compare the samples of a prompt

GROUPS = torch.tensor([8, 8, 5, 5])
TWICE = [[3, 4, 5], [3, 4, 5], [6], [6]]


def grouped(maker, **kwargs):
    return make_experience(maker, TWICE, **{"group_ids": GROUPS, **kwargs})


def scored_maker(make_maker, scores, algorithm="grpo"):
    return make_maker(
        critic=None, reward_model=Scores(torch.tensor(scores)), algorithm=AlgorithmSettings(name=algorithm)
    )


def test_grpo_needs_no_critic_and_keeps_the_reference_for_the_loss(make_maker):
    maker = scored_maker(make_maker, [1.0, 3.0, 2.0, 2.0])
    experience = grouped(maker)
    assert torch.equal(experience.values, torch.zeros_like(experience.values))
    mask = experience.action_mask
    expected = torch.tensor([-1.0, 1.0, 0.0, 0.0])[:, None] * mask
    torch.testing.assert_close(experience.advantages, expected, atol=1e-5, rtol=0)
    # The KL estimate (k3) uses the log-probs that are kept.
    difference = (experience.action_log_probs - experience.reference_log_probs)[mask]
    expected = (-difference).exp() - 1 + difference
    torch.testing.assert_close(expected, experience.kl[mask], atol=1e-5, rtol=1e-5)
    assert set(maker.trained_models) == {"actor"}
    assert make_experience(make_maker()).reference_log_probs is None  # PPO's penalty is in the reward


def test_one_bad_reward_drops_its_group(make_maker):
    maker = scored_maker(make_maker, [1.0, 3.0, NAN, 2.0])
    experience = grouped(maker, sample_ids=torch.tensor([10, 11, 12, 13]))
    assert experience.sample_ids.tolist() == [10, 11]
    with pytest.raises(AllSamplesDropped, match="none is left"):
        grouped(scored_maker(make_maker, [NAN, 3.0, NAN, 2.0]))


def test_dynamic_sampling_drops_groups_without_signal(make_maker):
    maker = scored_maker(make_maker, [2.0, 2.0, 0.0, 1.0], "dapo")
    assert grouped(maker).group_ids.tolist() == [5, 5]
    assert grouped(scored_maker(make_maker, [2.0, 2.0, 0.0, 1.0])).num_samples == 4  # GRPO keeps them
    with pytest.raises(NoSignal, match="scored the same"):
        grouped(scored_maker(make_maker, [2.0, 2.0, 1.0, 1.0], "dapo"))


def test_samples_without_signal_are_reported_with_the_next_batch_that_has_signal(make_maker):
    maker = scored_maker(make_maker, [2.0, 2.0, 1.0, 1.0], "dapo")
    prompts = [Sample(one, prompt, group=[3, 3, 5, 5][one]) for one, prompt in enumerate(PROMPTS)]
    with pytest.raises(NoSignal):
        maker.finalize(begun(maker, prompts, max_new_tokens=2))
    maker.reward_model = Scores(torch.tensor([2.0, 2.0, 0.0, 1.0]))
    for expected in (4 + 2, 2):
        batch = begun(maker, prompts, max_new_tokens=2)
        maker.finalize(batch)
        assert batch.metrics["maker/no_signal"].value == expected


@pytest.mark.parametrize(
    ("group_ids", "message"),
    [(None, "got no group_ids"), (torch.tensor([1, 1, 2, 3]), "got 2 of 3 groups with only one")],
)
def test_samples_that_cannot_be_compared_are_refused_before_generation(make_maker, group_ids, message):
    maker = scored_maker(make_maker, [1.0, 3.0, 2.0, 2.0])
    maker.engine = None  # must not be used
    with pytest.raises(DataError, match=message):
        grouped(maker, group_ids=group_ids)


def test_a_prompt_with_a_hole_is_refused(make_maker):
    input_ids, attention_mask = padded(PROMPTS)
    attention_mask[2, 1] = 0
    with pytest.raises(DataError, match="zeros and then ones"):
        make_maker().make_experience(input_ids, attention_mask, max_new_tokens=2)


def test_ppo_needs_a_critic(make_maker):
    with pytest.raises(ConfigError, match="critic must be a model"):
        make_maker(critic=None)

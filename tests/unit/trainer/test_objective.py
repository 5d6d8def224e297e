"""The policy's objective and the learner without a critic: against slow sums over single tokens, in float64."""

import copy
import math

import pytest
import torch
from transformers import LlamaConfig

from coati.config import AlgorithmSettings, TrainSettings
from coati.errors import ConfigError, DataError
from coati.experience_maker import Experience
from coati.models import Actor
from coati.trainer.objective import StepCounts, policy_objective
from coati.trainer.ppo import PPOLearner
from coati.trainer.strategies import DDPStrategy

LENGTHS = [3, 1, 2]
MASK = torch.tensor([[position < length for position in range(3)] for length in LENGTHS])
IN_LOSS = {"kl_in": "loss", "kl_coef": 1.0, "kl_estimator": "k3", "correction": "none"}
DECOUPLED = {"correction": "decoupled", "importance_cap": 1.5}


def numbers(seed, low=-1.0, high=1.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(3, 3, generator=generator, dtype=torch.float64) * (high - low) + low


def make_part():
    floats = {"action_log_probs": numbers(1), "values": numbers(2) * 0, "kl": numbers(3), "advantages": numbers(4)}
    return Experience(
        sequences=torch.ones(3, 5, dtype=torch.long),
        reward=torch.zeros(3),
        attention_mask=None,
        action_mask=MASK,
        proximal_log_probs=numbers(5),
        reference_log_probs=numbers(6),
        **floats,
    )


def slow_objective(current, part, advantages, settings):
    """The loss and the KL term, one token after the other."""
    num_tokens, num_sequences = sum(LENGTHS), len(LENGTHS)
    loss = kl_term = 0.0
    for row, length in enumerate(LENGTHS):
        base = part.action_log_probs if settings.correction == "none" else part.proximal_log_probs
        mean_log_ratio = sum(float(current[row, t] - base[row, t]) for t in range(length)) / length
        for t in range(length):
            share = {
                "token": 1 / num_tokens,
                "sequence": 1 / (length * num_sequences),
                "constant": 1 / (8 * num_sequences),
            }[settings.normalization]
            log_ratio = float(current[row, t] - base[row, t]) if settings.ratio == "token" else mean_log_ratio
            ratio, gain = math.exp(log_ratio), float(advantages[row, t])
            if settings.correction != "none":
                age = math.exp(float(part.proximal_log_probs[row, t] - part.action_log_probs[row, t]))
                gain *= min(age, settings.importance_cap)
            clipped = min(max(ratio, 1 - settings.eps_clip), 1 + settings.eps_clip_high)
            loss -= share * min(ratio * gain, clipped * gain)
            difference = float(current[row, t] - part.reference_log_probs[row, t])
            kl_term += share * (math.exp(-difference) - 1 + difference)
    return loss, kl_term


OBJECTIVES = [
    AlgorithmSettings(**IN_LOSS),
    AlgorithmSettings(**IN_LOSS, eps_clip_high=0.5),
    AlgorithmSettings(**IN_LOSS, normalization="sequence"),
    AlgorithmSettings(**IN_LOSS, normalization="constant", eps_clip_high=0.28),
    AlgorithmSettings(**IN_LOSS, name="gspo", eps_clip=0.05, eps_clip_high=0.1),
]
OBJECTIVES += [settings.model_copy(update=DECOUPLED) for settings in OBJECTIVES]
COUNTS = StepCounts(torch.tensor(sum(LENGTHS)), torch.tensor(len(LENGTHS)), max_response_tokens=8)


@pytest.mark.parametrize("settings", OBJECTIVES)
def test_loss_and_kl_term_are_what_their_definitions_say(settings):
    part, advantages, current = make_part(), numbers(7, -2, 2), numbers(9)
    found = policy_objective(current, part, advantages, COUNTS, settings)
    loss, kl_term = slow_objective(current, part, advantages, settings)
    assert float(found.loss) == pytest.approx(loss, abs=1e-12)
    assert float(found.kl_term) == pytest.approx(kl_term, abs=1e-12)
    assert float(found.clip_fraction) > 0  # the range was reached, so the test can tell


@pytest.mark.parametrize("settings", OBJECTIVES)
def test_micro_batches_add_up_and_padding_cannot_matter(settings):

    def gradient(rows_of_parts, part):
        current = numbers(9).requires_grad_()
        for rows in rows_of_parts:
            out = policy_objective(current[rows], part.select(rows), numbers(7, -2, 2)[rows], COUNTS, settings)
            (out.loss + out.kl_term).backward()
        return current.grad

    whole = gradient([slice(0, 3)], make_part())
    poisoned = make_part()
    for name in ("action_log_probs", "proximal_log_probs", "reference_log_probs"):
        setattr(poisoned, name, getattr(poisoned, name).masked_fill(~MASK, float("nan")))
    torch.testing.assert_close(gradient([slice(0, 1), slice(1, 3)], poisoned), whole, atol=1e-14, rtol=0)
    assert not whole[~MASK].any()
    assert whole[MASK].any()


def test_the_kl_to_watch_is_from_the_policy_that_wrote_the_tokens_whatever_the_ratio():
    part, current = make_part(), numbers(9)
    for settings in (OBJECTIVES[4], OBJECTIVES[9]):  # GSPO, plain and decoupled
        expected = 0.0
        for row, length in enumerate(LENGTHS):
            for t in range(length):
                log_ratio = float(current[row, t] - part.action_log_probs[row, t])
                expected += (math.exp(log_ratio) - 1 - log_ratio) / sum(LENGTHS)
        found = policy_objective(current, part, numbers(7, -2, 2), COUNTS, settings)
        assert float(found.approx_kl) == pytest.approx(expected, abs=1e-12)


def test_a_kl_term_needs_the_reference():
    part = make_part()
    part.reference_log_probs = None
    with pytest.raises(DataError, match="no reference_log_probs"):
        policy_objective(numbers(8), part, numbers(7), COUNTS, AlgorithmSettings(**IN_LOSS))


@pytest.fixture(scope="module")
def actor():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=13, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, max_position_embeddings=16,
    )  # fmt: skip
    return Actor.from_config(config).double()


def learner_of(actor, **settings):
    train, algorithm = TrainSettings(actor_lr=1e-2), AlgorithmSettings(whiten_advantages=False, **settings)
    return PPOLearner(copy.deepcopy(actor), None, DDPStrategy(seed=0, device="cpu"), train, algorithm)


def weights(learner):
    return torch.cat([parameter.detach().flatten() for parameter in learner.actor.parameters()])


def test_without_a_critic_the_actor_learns_and_nothing_is_said_of_values(actor):
    learner = learner_of(actor, normalization="sequence", **IN_LOSS)
    before = weights(learner)
    metrics = learner.step(make_part())
    assert not torch.equal(weights(learner), before)
    assert learner.critic is None
    assert list(learner.models) == ["actor"]
    assert not any(name.startswith("value/") or "critic" in name for name in metrics)
    assert metrics["policy/kl_loss"] > 0


@pytest.mark.parametrize("settings", OBJECTIVES[2:])
def test_steps_in_micro_batches_are_the_same_steps(actor, settings):
    learners = [
        PPOLearner(
            copy.deepcopy(actor),
            None,
            DDPStrategy(seed=0, device="cpu"),
            TrainSettings(actor_lr=1e-2, micro_batch_size=size),
            settings.model_copy(update={"whiten_advantages": False}),
            max_response_tokens=8,
        )
        for size in (0, 1, 2)
    ]
    whole, *others = ([learner.step(make_part()) for _ in range(2)] and weights(learner) for learner in learners)
    # The rows have a prompt in common, computed once for the whole batch; the model's norms round to float32.
    for other in others:
        torch.testing.assert_close(other, whole, atol=1e-7, rtol=0)


def test_a_kl_term_alone_pulls_the_policy_to_the_reference(actor):
    learner = learner_of(actor, **IN_LOSS)
    part = make_part()
    part.advantages.zero_()
    part.reference_log_probs.fill_(math.log(1 / 13) - 0.5)
    terms = [learner.step(copy.deepcopy(part))["policy/kl_loss"] for _ in range(10)]
    assert terms[-1] < terms[0]


def test_settings_that_cannot_be_are_refused(actor):
    with pytest.raises(ConfigError, match="max_response_tokens must be 1 or more"):
        learner_of(actor, normalization="constant")

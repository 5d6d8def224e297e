"""The policy's objective and the learner without a critic, compared with token-by-token sums in float64."""

import copy
import math
import sys

import pytest
import torch
from transformers import LlamaConfig

from coati.algos.losses import clipped, kl_estimate, kl_penalty, policy_loss
from coati.config import AlgorithmSettings, TrainSettings
from coati.config.algorithm import LOSSES as KNOWN_LOSSES
from coati.errors import ConfigError, DataError
from coati.experience_maker import Experience
from coati.experience_maker.scoring import estimate_advantages
from coati.models import Actor, action_logprobs
from coati.trainer.objective import StepCounts, load_loss, measure_off_policy, policy_objective, token_weights
from coati.trainer.ppo import PPOLearner
from coati.trainer.steps import StepNumbers
from coati.trainer.strategies import DDPStrategy

LENGTHS = [3, 1, 2]
MASK = torch.tensor([[position < length for position in range(3)] for length in LENGTHS])
POSITIVE = 3  # tokens of the responses with a positive reward
IN_LOSS = {"kl_in": "loss", "kl_coef": 1.0, "kl_estimator": "k3", "correction": "none"}
DECOUPLED = {"correction": "decoupled", "importance_cap": 1.5}


def numbers(seed, low=-1.0, high=1.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(3, 3, generator=generator, dtype=torch.float64) * (high - low) + low


def make_part():
    floats = {"action_log_probs": numbers(1), "values": numbers(2) * 0, "kl": numbers(3), "advantages": numbers(4)}
    return Experience(
        sequences=torch.ones(3, 5, dtype=torch.long),
        reward=torch.tensor([0.0, 0.5, 2.0]),
        attention_mask=None,
        action_mask=MASK,
        proximal_log_probs=numbers(5),
        reference_log_probs=numbers(6),
        **floats,
    )


def slow_weight(row, t, part, settings):
    ages = [float(part.proximal_log_probs[row, s] - part.action_log_probs[row, s]) for s in range(LENGTHS[row])]
    is_geometric = settings.importance_level == "geometric"
    weight = math.exp(sum(ages) / len(ages) if is_geometric else ages[t])
    if settings.importance == "mask":
        return weight if settings.importance_floor <= weight <= settings.importance_cap else 0.0
    return min(weight, settings.importance_cap)


def slow_surrogate(log_ratio, logprob, gain, settings):
    ratio = math.exp(log_ratio)
    clipped = min(max(ratio, 1 - settings.eps_clip), 1 + settings.eps_clip_high)
    if settings.loss == "cispo":
        return clipped * gain * logprob
    if settings.loss == "dppo":
        moved = math.exp(logprob) - math.exp(logprob - log_ratio)
        is_masked = moved > settings.eps_clip_high if gain > 0 else moved < -settings.eps_clip
        return 0.0 if is_masked else min(ratio, settings.importance_cap) * gain * logprob
    if settings.loss == "sapo":
        tau = settings.sapo_tau if gain > 0 else settings.sapo_tau_negative
        return gain / (1 + math.exp(-tau * (ratio - 1))) * 4 / tau
    return min(ratio * gain, clipped * gain)


def slow_objective(current, part, advantages, settings):
    """Compute the loss and the KL term token by token."""
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
            log_ratio = mean_log_ratio if settings.loss == "gspo" else float(current[row, t] - base[row, t])
            gain = float(advantages[row, t])
            if settings.correction != "none":
                gain *= slow_weight(row, t, part, settings)
            loss -= share * slow_surrogate(log_ratio, float(current[row, t]), gain, settings)
            loss += share * settings.behavior_kl_coef * float(current[row, t] - part.action_log_probs[row, t]) ** 2
            if settings.nll_coef and float(part.reward[row]) > 0:
                loss -= settings.nll_coef * float(current[row, t]) / POSITIVE
            difference = float(current[row, t] - part.reference_log_probs[row, t])
            kl_term += share * (math.exp(-difference) - 1 + difference)
    return loss, kl_term


OBJECTIVES = [
    AlgorithmSettings(**IN_LOSS),
    AlgorithmSettings(**IN_LOSS, eps_clip_high=0.5),
    AlgorithmSettings(**IN_LOSS, normalization="sequence"),
    AlgorithmSettings(**IN_LOSS, normalization="constant", eps_clip_high=0.28),
    AlgorithmSettings(**IN_LOSS, loss="gspo", eps_clip=0.05, eps_clip_high=0.1),
]
OBJECTIVES += [settings.model_copy(update=DECOUPLED) for settings in OBJECTIVES]
ON_ITS_OWN = [
    AlgorithmSettings(**IN_LOSS, loss="cispo", eps_clip=0.5, eps_clip_high=0.5),
    AlgorithmSettings(**IN_LOSS, loss="dppo", importance_cap=1.5, behavior_kl_coef=0.5, normalization="sequence"),
    AlgorithmSettings(**IN_LOSS, loss="sapo", normalization="sequence"),
    AlgorithmSettings(**IN_LOSS | {"correction": "decoupled"}, loss="sapo"),
    AlgorithmSettings(**IN_LOSS, nll_coef=0.5),
    AlgorithmSettings(**IN_LOSS | {"correction": "auto"}, loss="icepop", importance_cap=1.5).resolved(0),
    AlgorithmSettings(
        **IN_LOSS | {"correction": "auto"}, loss="geometric_mask", importance_floor=0.8, importance_cap=1.3
    ).resolved(0),
]
LOSSES = OBJECTIVES + ON_ITS_OWN
COUNTS = StepCounts(
    torch.tensor(sum(LENGTHS)), torch.tensor(len(LENGTHS)), max_response_tokens=8, positive_tokens=POSITIVE
)


@pytest.mark.parametrize("settings", LOSSES)
def test_loss_and_kl_term_match_their_definitions(settings):
    part, advantages, current = make_part(), numbers(7, -2, 2), numbers(9)
    found = policy_objective(current, part, advantages, COUNTS, settings)
    loss, kl_term = slow_objective(current, part, advantages, settings)
    assert float(found.loss) == pytest.approx(loss, abs=1e-12)
    assert float(found.kl_term) == pytest.approx(kl_term, abs=1e-12)
    if settings.loss == "sapo":
        return
    assert float(found.clip_fraction) > 0  # some tokens are clipped, so the test covers clipping


def test_masks_drop_some_of_these_tokens_and_keep_some():
    for settings in ON_ITS_OWN[-2:]:
        weights = token_weights(make_part(), settings)[MASK]
        assert settings.correction == "decoupled"
        assert 0 < int((weights == 0).sum()) < len(weights)


@pytest.mark.parametrize("settings", LOSSES)
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


def test_approx_kl_is_relative_to_the_behavior_policy_for_any_ratio():
    part, current = make_part(), numbers(9)
    for settings in (OBJECTIVES[4], OBJECTIVES[9]):  # GSPO, plain and decoupled
        expected = 0.0
        for row, length in enumerate(LENGTHS):
            for t in range(length):
                log_ratio = float(current[row, t] - part.action_log_probs[row, t])
                expected += (math.exp(log_ratio) - 1 - log_ratio) / sum(LENGTHS)
        found = policy_objective(current, part, numbers(7, -2, 2), COUNTS, settings)
        assert float(found.approx_kl) == pytest.approx(expected, abs=1e-12)


def test_off_policy_metrics_by_hand():
    # weights 4, 0.5 and 2 of tokens, cap 1.9: two of three above, which the mask drops; |log| = 2 log 2, log 2, log 2
    part = make_part().select(slice(0, 2))
    part.action_mask = torch.tensor([[True, True, False], [True, False, False]])
    weights = torch.tensor([[4.0, 0.5, float("nan")], [2.0, float("nan"), float("nan")]], dtype=torch.float64)
    part.proximal_log_probs = part.action_log_probs + weights.log()
    found = StepNumbers()
    settings = AlgorithmSettings(correction="decoupled", importance="mask", importance_cap=1.9)
    measure_off_policy(found, part, settings, num_tokens=torch.tensor(3))
    assert found.values() == pytest.approx(
        {
            "off_policy/above_cap": 2 / 3,
            "off_policy/log_ratio": 4 / 3 * math.log(2),
            "off_policy/dropped": 2 / 3,
            "off_policy/ratio_max": 4.0,
        }
    )


def clip_of_ones_own(log_ratio, advantages, *, low=0.2):
    """PPO's clipped loss, as a user would write it."""
    ratio = log_ratio.exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1.2) * advantages)


def everything(logprobs, log_ratio, behavior_logprobs, advantages, rewards, mask):
    torch.testing.assert_close(log_ratio, logprobs - behavior_logprobs)
    assert rewards.shape == mask.shape[:1]
    return -advantages * logprobs + (logprobs - behavior_logprobs) * rewards.unsqueeze(1)


def mean_loss(logprobs, advantages):
    return -(logprobs * advantages).mean()


def unknown_name(logprobs, weights):
    return logprobs * weights


def own(name, **settings):
    return AlgorithmSettings(**IN_LOSS, loss=f"{__name__}:{name}", **settings)


@pytest.mark.parametrize("normalization", ["token", "sequence"])
def test_a_custom_loss_trains_like_the_built_in_loss_of_the_same_formula(normalization):
    found, expected = [], []
    for settings, results in [
        (own("clip_of_ones_own", normalization=normalization), found),
        (AlgorithmSettings(**IN_LOSS, normalization=normalization), expected),
    ]:
        current = numbers(9).requires_grad_()
        out = policy_objective(current, make_part(), numbers(7, -2, 2), COUNTS, settings)
        out.loss.backward()
        results += [out.loss.item(), out.approx_kl.item(), out.ratio_max.item(), *current.grad.flatten().tolist()]
    assert found == pytest.approx(expected, rel=1e-12)


def test_a_custom_loss_gets_every_tensor_that_it_names_without_padding():
    part, advantages, current = make_part(), numbers(7, -2, 2), numbers(9)
    part.reward = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    terms = -advantages * current + (current - part.action_log_probs) * part.reward.unsqueeze(1)
    part.action_log_probs = part.action_log_probs.masked_fill(~MASK, float("nan"))
    found = policy_objective(current, part, advantages, COUNTS, own("everything"))
    assert found.loss.item() == pytest.approx(float(terms[MASK].sum()) / sum(LENGTHS), rel=1e-12)


def test_a_loss_next_to_the_settings_is_found_by_name_once_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "loss_beside.py").write_text("def plain(logprobs, advantages):\n    return -logprobs * advantages\n")
    with pytest.raises(ConfigError, match=r"algorithm\.loss: .*loss_beside"):
        load_loss("loss_beside:plain")
    load_loss("loss_beside:plain", (tmp_path,))
    settings = AlgorithmSettings(**IN_LOSS, loss="loss_beside:plain")
    found = policy_objective(numbers(9), make_part(), numbers(7), COUNTS, settings)
    assert found.loss.item() == pytest.approx(-float((numbers(9) * numbers(7))[MASK].sum()) / sum(LENGTHS))


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("mean_loss", DataError, "loss of each token"),
        ("unknown_name", ConfigError, "'weights'"),
        ("missing", ConfigError, "missing"),
    ],
)
def test_an_unusable_custom_loss_is_refused(name, error, message):
    with pytest.raises(error, match=message):
        policy_objective(numbers(9), make_part(), numbers(7), COUNTS, own(name))


def learning_curve(settings, *, staleness, seed):
    """Train a one-token policy on 64 samples per version; return the probability of the correct token in each."""
    generator = torch.Generator().manual_seed(seed)
    settings = settings.resolved(staleness)
    logits = torch.zeros(8, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=0.2)
    versions, chances = [], []
    for _ in range(20):
        versions.append(logits.detach().log_softmax(0))
        chances.append(float(versions[-1][3].exp()))
        behavior = versions[max(0, len(versions) - 1 - staleness)]
        tokens = torch.multinomial(behavior.exp(), 64, replacement=True, generator=generator)
        mask, zeros = torch.ones(64, 1, dtype=torch.bool), torch.zeros(64, 1, dtype=torch.float64)
        reward = (tokens == 3).double()
        part = Experience(
            *(torch.stack([tokens, tokens], 1), behavior[tokens].unsqueeze(1), zeros, reward, zeros, zeros, None, mask),
            group_ids=torch.arange(64) // 8,
            proximal_log_probs=versions[-1][tokens].unsqueeze(1),
        )
        advantages, _ = estimate_advantages(part, settings)
        counts = StepCounts(torch.tensor(64), torch.tensor(64), 1, reward.sum())
        for _ in range(2):
            optimizer.zero_grad()
            current = logits.log_softmax(0)[tokens].unsqueeze(1)
            policy_objective(current, part, advantages, counts, settings).loss.backward()
            optimizer.step()
    return chances


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("loss", [*KNOWN_LOSSES, f"{__name__}:clip_of_ones_own"])
def test_every_loss_learns(loss, staleness):
    chances = learning_curve(AlgorithmSettings(name="grpo", kl_coef=0, loss=loss), staleness=staleness, seed=0)
    assert chances[0] == pytest.approx(1 / 8)
    assert chances[10] > chances[3] > chances[0]
    if loss == "geometric_mask" and staleness:  # learns slowly: off-policy data exceeds the tight range
        assert 0.2 < chances[-1] < 0.9
    else:
        assert chances[-1] > 0.9


@pytest.mark.parametrize("settings", [{"name": "maxrl"}, {"name": "grpo", "kl_coef": 0, "nll_coef": 0.1}], ids=str)
def test_other_advantages_and_terms_learn(settings):
    assert learning_curve(AlgorithmSettings(**settings), staleness=1, seed=0)[-1] > 0.8


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


def learner_of(actor, train=None, **settings):
    train, algorithm = train or TrainSettings(actor_lr=1e-2), AlgorithmSettings(whiten_advantages=False, **settings)
    return PPOLearner(copy.deepcopy(actor), None, DDPStrategy(seed=0, device="cpu"), train, algorithm)


def weights(learner):
    return torch.cat([parameter.detach().flatten() for parameter in learner.actor.parameters()])


@pytest.mark.parametrize("normalization", ["token", "sequence"])
def test_masked_cut_responses_have_no_influence(actor, normalization):
    part = make_part()
    part.is_cut = torch.tensor([False, True, False])
    masking = learner_of(actor, normalization=normalization, mask_cut_responses=True, **IN_LOSS)
    plain = learner_of(actor, normalization=normalization, **IN_LOSS)
    found, expected = masking.step(copy.deepcopy(part)), plain.step(part.select(~part.is_cut))
    torch.testing.assert_close(weights(masking), weights(plain), atol=1e-7, rtol=0)
    assert found["train/tokens"] == expected["train/tokens"] == 5
    unmasked = learner_of(actor, normalization=normalization, **IN_LOSS)
    assert unmasked.step(part)["train/tokens"] == 6
    mask = part.full_action_mask().clone()
    masking.step(part)
    assert torch.equal(part.full_action_mask(), mask)  # later metrics and epochs see the whole batch


def test_without_a_critic_the_actor_learns_and_value_metrics_are_absent(actor):
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
        for size in (0, 2)
    ]
    batch = make_part()
    batch.sequences = torch.randint(13, (3, 5), generator=torch.Generator().manual_seed(0))
    batch.sequences[:, :2] = 1  # the rows share a prompt, computed once for the whole batch
    (norms, whole), (norms_of_parts, parts) = (
        ([learner.step(batch)["policy/grad_norm"] for _ in range(2)], weights(learner)) for learner in learners
    )
    # The model's norms round to float32. Adam hides a wrong scale of the gradients.
    torch.testing.assert_close(parts, whole, atol=1e-7, rtol=0)
    assert norms_of_parts == pytest.approx(norms, rel=1e-6)


def test_distillation_as_a_reward_and_as_a_loss_is_the_gradient_of_the_reverse_kl():
    # One position and four tokens: all of them, as samples with their own probability as share
    generator = torch.Generator().manual_seed(0)
    logits, teacher = torch.randn(2, 4, generator=generator, dtype=torch.float64)
    logits.requires_grad_()
    policy, teacher = logits.log_softmax(0), teacher.log_softmax(0)
    (expected,) = torch.autograd.grad((policy.exp() * (policy - teacher)).sum(), logits, retain_graph=True)
    mask = torch.ones(4, 1, dtype=torch.bool)
    column = policy.detach().unsqueeze(1)
    settings = AlgorithmSettings(name="distill")
    kl = kl_estimate(column, teacher.unsqueeze(1), mask, kind=settings.kl_estimator)
    tokens = torch.zeros(4, 2, dtype=torch.long)
    batch = Experience(tokens, column, column * 0, torch.zeros(4), kl, column * 0, None, mask)
    advantages, _ = estimate_advantages(batch, settings)
    as_reward = policy_loss(
        policy.unsqueeze(1), column, advantages, mask, surrogate=clipped(0.2, 0.2), num_tokens=1, reduction=column.exp()
    ).loss
    as_loss = kl_penalty(policy.unsqueeze(1), teacher.unsqueeze(1), mask, kind="k2", weights=column.exp())
    for loss in (as_reward, as_loss):
        (found,) = torch.autograd.grad(loss, logits, retain_graph=True)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def test_in_distillation_each_token_gets_only_its_own_signal():
    kl = torch.tensor([[0.5, -0.25, 1.0], [2.0, 0.0, 0.0]])
    mask = torch.tensor([[True, True, True], [True, False, False]])
    tokens = torch.zeros(2, 4, dtype=torch.long)
    batch = Experience(tokens, kl * 0, kl * 0, torch.tensor([0.0, 3.0]), kl, kl * 0, None, mask)
    advantages, _ = estimate_advantages(batch, AlgorithmSettings(name="distill"))
    assert advantages.tolist() == [[-0.5, 0.25, -1.0], [1.0, 0.0, 0.0]]  # the score goes to the last token


def test_the_nll_term_is_of_the_rewarded_responses_of_the_whole_batch(actor):
    part, plain = make_part(), learner_of(actor, **IN_LOSS)
    with torch.no_grad():
        logprobs, _ = action_logprobs(plain.actor, part.sequences, None, 3)
    expected = -0.5 * float(logprobs[1:][MASK[1:]].mean())
    before = plain.step(copy.deepcopy(part))["policy/loss"]
    for size in (0, 1):
        found = learner_of(actor, TrainSettings(actor_lr=1e-2, micro_batch_size=size), nll_coef=0.5, **IN_LOSS)
        assert found.step(copy.deepcopy(part))["policy/loss"] - before == pytest.approx(expected, rel=1e-6)


def test_the_kl_coefficient_follows_its_target_and_is_part_of_a_checkpoint(actor):
    learner = learner_of(actor, kl_target=1e-3, **IN_LOSS)
    metrics = [learner.step(make_part()) for _ in range(2)]
    assert metrics[0]["policy/kl_loss"] > 0.0012  # so far above the target that the relative error is clipped at 20 %
    assert [row["policy/kl_coef"] for row in metrics] == pytest.approx([1.0, 1.02])
    resumed = learner_of(actor, kl_target=1e-3, **IN_LOSS)
    resumed.restore(learner.state())
    assert resumed.step(make_part())["policy/kl_coef"] == pytest.approx(1.02**2)
    older = {"counts": learner.state()["counts"]}  # a state saved before kl_coef existed
    resumed = learner_of(actor, kl_target=1e-3, **IN_LOSS)
    resumed.restore(older)
    assert resumed.step(make_part())["policy/kl_coef"] == 1.0


def test_a_kl_term_alone_pulls_the_policy_to_the_reference(actor):
    learner = learner_of(actor, **IN_LOSS)
    part = make_part()
    part.advantages.zero_()
    part.reference_log_probs.fill_(math.log(1 / 13) - 0.5)
    terms = [learner.step(copy.deepcopy(part))["policy/kl_loss"] for _ in range(10)]
    assert terms[-1] < terms[0]


def test_impossible_settings_are_refused(actor):
    with pytest.raises(ConfigError, match="max_response_tokens must be 1 or more"):
        learner_of(actor, normalization="constant")

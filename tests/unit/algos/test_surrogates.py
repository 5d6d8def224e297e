"""CISPO, DPPO and SAPO: worked by hand, against finite differences, and where they equal PPO."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coati.algos.losses import cispo, clipped, dppo, policy_loss, sapo

SURROGATES = {
    "clipped": clipped(0.2, 0.2),
    "cispo": cispo(1.0, 4.0),
    "dppo": dppo(0.2, 0.2, cap=20.0),
    "sapo": sapo(1.0, 1.05),
}


def loss_and_gradient(surrogate, policy, behavior, advantages):
    """Return loss, clip fraction and the gradient of log-probs, for one row of probabilities."""
    policy, behavior, advantages = (torch.tensor([row], dtype=torch.float64) for row in (policy, behavior, advantages))
    logprobs = policy.log().requires_grad_()
    mask = torch.ones_like(policy, dtype=torch.bool)
    out = policy_loss(logprobs, behavior.log(), advantages, mask, surrogate=surrogate, num_tokens=1)
    out.loss.backward()
    return out.loss.item(), out.clip_fraction.item(), logprobs.grad[0].tolist()


def test_cispo_by_hand():
    # ratios 0.8 / 0.1 = 8 and 0.1 / 0.8 = 0.125, clipped to [0.5, 5]; ratio 1.25 is free
    #   8 → 5,       A = 2:  5 · 2 · log 0.8      gradient 10
    #   0.125 → 0.5, A = -1: 0.5 · -1 · log 0.1   gradient -0.5
    #   1.25,        A = 4:  1.25 · 4 · log 0.5   gradient 5
    loss, clip_fraction, gradient = loss_and_gradient(
        cispo(0.5, 4.0), [0.8, 0.1, 0.5], [0.1, 0.8, 0.4], [2.0, -1.0, 4.0]
    )
    log = [torch.tensor(p, dtype=torch.float64).log().item() for p in (0.8, 0.1, 0.5)]
    assert loss == pytest.approx(-(10 * log[0] - 0.5 * log[1] + 5 * log[2]), rel=1e-12)
    assert clip_fraction == 2
    assert gradient == pytest.approx([-10, 0.5, -5], rel=1e-12)


def test_dppo_by_hand():
    # a token is masked where its probability moved by more than 0.2 up (A > 0) or 0.1 down (A < 0); ratios up to 20
    #   0.5  → 0.8,   A > 0: moved +0.3     masked, though the ratio is only 1.6
    #   0.01 → 0.2,   A > 0: moved +0.19    kept, ratio 20
    #   0.01 → 0.205, A > 0: moved +0.195   kept, ratio 20.5 → 20
    #   0.5  → 0.35,  A < 0: moved -0.15    masked
    #   0.5  → 0.35,  A > 0: moved -0.15    kept: the gradient brings it back; ratio 0.7
    #   0.5  → 0.8,   A < 0: moved +0.3     kept, ratio 1.6
    policy, behavior = [0.8, 0.2, 0.205, 0.35, 0.35, 0.8], [0.5, 0.01, 0.01, 0.5, 0.5, 0.5]
    advantages = [1.0, 1.0, 1.0, -1.0, 1.0, -1.0]
    loss, clip_fraction, gradient = loss_and_gradient(dppo(0.1, 0.2, cap=20.0), policy, behavior, advantages)
    weights = [0.0, 20.0, 20.0, 0.0, 0.7, 1.6]
    logs = torch.tensor(policy, dtype=torch.float64).log().tolist()
    expected = [w * a for w, a in zip(weights, advantages, strict=True)]
    assert loss == pytest.approx(-sum(x * log for x, log in zip(expected, logs, strict=True)), rel=1e-12)
    assert clip_fraction == 2
    assert gradient == pytest.approx([-x for x in expected], rel=1e-12)


def test_sapo_by_hand():
    # τ = 2 where A > 0, 4 where A < 0
    #   r = 1.5, A = 3:  σ(2 · 0.5) · 4/2 · 3 = 6σ(1);      gradient 4σ(1)(1 - σ(1)) · 1.5 · 3
    #   r = 0.5, A = -1: σ(4 · -0.5) · 4/4 · -1 = -σ(-2);   gradient 4σ(-2)(1 - σ(-2)) · 0.5 · -1
    sigma = torch.tensor([1.0, -2.0], dtype=torch.float64).sigmoid().tolist()
    loss, clip_fraction, gradient = loss_and_gradient(sapo(2.0, 4.0), [0.6, 0.2], [0.4, 0.4], [3.0, -1.0])
    assert loss == pytest.approx(-(6 * sigma[0] - sigma[1]), rel=1e-12)
    assert clip_fraction == 0
    by_hand = [-4 * sigma[0] * (1 - sigma[0]) * 1.5 * 3, 4 * sigma[1] * (1 - sigma[1]) * 0.5]
    assert gradient == pytest.approx(by_hand, rel=1e-12)


@given(seed=st.integers(0, 2**31))
def test_on_policy_all_surrogates_have_the_gradient_of_ppo(seed):
    generator = torch.Generator().manual_seed(seed)
    behavior = torch.rand(1, 6, generator=generator, dtype=torch.float64).tolist()[0]
    advantages = torch.randn(1, 6, generator=generator, dtype=torch.float64).tolist()[0]
    for surrogate in SURROGATES.values():
        _, clip_fraction, gradient = loss_and_gradient(surrogate, behavior, behavior, advantages)
        assert gradient == pytest.approx([-a for a in advantages], rel=1e-9)
        assert clip_fraction == 0


@pytest.mark.parametrize("name", ["cispo", "dppo"])
@given(seed=st.integers(0, 2**31))
def test_gradients_match_finite_differences_with_frozen_weights(name, seed):
    generator = torch.Generator().manual_seed(seed)
    policy, behavior = torch.rand(2, 1, 5, generator=generator, dtype=torch.float64) * 0.98 + 0.01
    advantages = torch.randn(1, 5, generator=generator, dtype=torch.float64)
    mask = torch.ones(1, 5, dtype=torch.bool)
    held = (policy / behavior).clamp(max=5.0 if name == "cispo" else 20.0)
    if name == "dppo":
        moved = policy - behavior
        held[((advantages > 0) & (moved > 0.2)) | ((advantages < 0) & (moved < -0.2))] = 0.0

    def frozen(logprobs):
        return float(-(held * advantages * logprobs).sum() / 5)

    logprobs = policy.log().requires_grad_()
    out = policy_loss(logprobs, behavior.log(), advantages, mask, surrogate=SURROGATES[name], num_tokens=5)
    out.loss.backward()
    for t, step in enumerate(torch.eye(5, dtype=torch.float64) * 1e-4):
        difference = (frozen(policy.log() + step) - frozen(policy.log() - step)) / 2e-4
        assert logprobs.grad[0, t].item() == pytest.approx(difference, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("name", SURROGATES)
@pytest.mark.parametrize("advantage", [1.0, 0.0])
def test_a_ratio_that_overflows_gives_no_nan(name, advantage):
    logprobs = torch.tensor([[1000.0, 1000.0]], requires_grad=True)
    advantages, mask = torch.full((1, 2), advantage), torch.ones(1, 2, dtype=torch.bool)
    out = policy_loss(logprobs, torch.zeros(1, 2), advantages, mask, surrogate=SURROGATES[name], num_tokens=2)
    out.loss.backward()
    assert out.loss.isfinite()
    assert logprobs.grad.isfinite().all()


def test_sapo_closes_its_gate_on_a_ratio_that_overflows():
    logprobs = torch.tensor([[1000.0, 1000.0]], requires_grad=True)
    advantages, mask = torch.tensor([[1.0, -1.0]]), torch.ones(1, 2, dtype=torch.bool)
    policy_loss(
        logprobs, torch.zeros(1, 2), advantages, mask, surrogate=SURROGATES["sapo"], num_tokens=2
    ).loss.backward()
    assert logprobs.grad.tolist() == [[0.0, 0.0]]

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coati.algos.advantages import gae
from coati.algos.importance import vtrace
from coati.errors import ConfigError, DataError

NAN, INF = float("nan"), float("inf")
GARBAGE = [NAN, INF, -INF, 1e308]

rates = st.floats(0, 1)


@st.composite
def episodes(draw):
    """Rewards, values and log-ratios [B, T] with a prefix mask; empty and full rows included."""
    lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=4))
    width = max(lengths) + draw(st.integers(0, 2))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    tensors = torch.randn(3, len(lengths), width, generator=generator, dtype=torch.float64)
    return *tensors, torch.arange(width) < torch.tensor(lengths).unsqueeze(-1)


def test_vtrace_by_hand():
    # γ = 0.5, λ = 0.5; rewards 1, 2; values 4, 8; ratios 3, 0.5; rho_bar 2, c_bar 1
    #   δ_1 = 2 + 0 - 8 = -6         D_1 = 0.5 · (-6) = -3                     target 8 - 3 = 5
    #   δ_0 = 1 + 0.5 · 8 - 4 = 1    D_0 = 2 · 1 + 0.25 · 1 · (-3) = 1.25      target 4 + 1.25 = 5.25
    #   A_1 = -6                     A_0 = 1 + 0.25 · (-3) = 0.25
    rewards = torch.tensor([[1.0, 2.0, NAN]], dtype=torch.float64)
    values = torch.tensor([[4.0, 8.0, INF]], dtype=torch.float64)
    log_ratios = torch.tensor([[math.log(3), math.log(0.5), NAN]], dtype=torch.float64)
    mask = torch.tensor([[True, True, False]])
    out = vtrace(rewards, values, log_ratios, mask, gamma=0.5, lam=0.5, rho_bar=2.0, c_bar=1.0)
    assert out.targets.tolist() == [pytest.approx([5.25, 5.0, 0.0])]
    assert out.advantages.tolist() == [pytest.approx([0.25, -6.0, 0.0])]


@given(episode=episodes(), gamma=rates, lam=rates, rho_bar=st.floats(0.5, 5), c_share=rates)
def test_vtrace_equals_its_double_sum(episode, gamma, lam, rho_bar, c_share):
    rewards, values, log_ratios, mask = episode
    c_bar = rho_bar * c_share
    targets, advantages = torch.zeros_like(rewards), torch.zeros_like(rewards)
    for b, length in enumerate(mask.sum(-1).tolist()):
        value = [*values[b, :length].tolist(), 0.0]
        ratio = log_ratios[b, :length].exp().tolist()
        delta = [rewards[b, t].item() + gamma * value[t + 1] - value[t] for t in range(length)]

        def correction(t, length=length, ratio=ratio, delta=delta):
            return sum(
                (gamma * lam) ** (s - t)
                * math.prod(min(c_bar, ratio[i]) for i in range(t, s))
                * min(rho_bar, ratio[s])
                * delta[s]
                for s in range(t, length)
            )

        for t in range(length):
            targets[b, t] = value[t] + correction(t)
            # the bootstrap mixes the value and the target of the next state
            next_target = value[t + 1] + correction(t + 1)
            bootstrap = (1 - lam) * value[t + 1] + lam * next_target
            advantages[b, t] = rewards[b, t] + gamma * bootstrap - value[t]
    out = vtrace(rewards, values, log_ratios, mask, gamma=gamma, lam=lam, rho_bar=rho_bar, c_bar=c_bar)
    torch.testing.assert_close(out.targets, targets, rtol=0, atol=1e-10)
    torch.testing.assert_close(out.advantages, advantages, rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@given(episode=episodes(), gamma=rates, lam=rates, bar=st.floats(1, 5) | st.just(INF))
def test_on_policy_vtrace_is_gae_bit_for_bit(dtype, episode, gamma, lam, bar):
    rewards, values, _, mask = episode
    rewards, values = rewards.to(dtype), values.to(dtype)
    expected = gae(rewards, values, mask, gamma=gamma, lam=lam)
    # float32 ratios too, whatever the rewards and values are
    out = vtrace(rewards, values, torch.zeros(mask.shape), mask, gamma=gamma, lam=lam, rho_bar=bar, c_bar=bar)
    assert torch.equal(out.advantages, expected)
    assert torch.equal(out.targets[mask], (expected + values)[mask])
    assert out.advantages.dtype == expected.dtype


@given(episode=episodes(), garbage=st.sampled_from(GARBAGE), data=st.data())
def test_vtrace_ignores_padding_and_the_order_of_rows(episode, garbage, data):
    *tensors, mask = episode
    settings_used = {"gamma": 0.9, "lam": 0.8, "rho_bar": 1.5, "c_bar": 1.0}
    order = torch.tensor(data.draw(st.permutations(range(len(mask)))))
    clean = vtrace(*tensors, mask, **settings_used)
    dirty = vtrace(*(torch.where(mask, x, garbage)[order] for x in tensors), mask[order], **settings_used)
    for a, b in zip(clean, dirty, strict=True):
        assert torch.equal(a[order], b)
        assert torch.equal(a[~mask], torch.zeros_like(a[~mask]))


def test_vtrace_targets_estimate_the_value_of_the_other_policy():
    # One token of three, true values known: without cuts the target is unbiased for the proximal policy,
    # whatever the critic says.
    proximal = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    behavior = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    rewards = torch.tensor([[1.0], [4.0], [-2.0]], dtype=torch.float64)
    values = torch.full((3, 1), 7.0, dtype=torch.float64)
    mask = torch.ones(3, 1, dtype=torch.bool)
    log_ratios = (proximal / behavior).log().unsqueeze(-1)
    out = vtrace(rewards, values, log_ratios, mask, gamma=1.0, lam=1.0, rho_bar=INF, c_bar=INF)
    expected = 0.2 * 1 + 0.3 * 4 - 0.5 * 2
    assert (behavior * out.targets.squeeze(-1)).sum().item() == pytest.approx(expected)


def test_a_ratio_that_overflows_is_cut_without_nan():
    log_ratios, mask = torch.tensor([[1000.0, INF, -INF]]), torch.ones(1, 3, dtype=torch.bool)
    zero = torch.zeros(1, 3)
    for bar in (1.0, INF):
        out = vtrace(zero, zero, log_ratios, mask, gamma=1.0, lam=1.0, rho_bar=bar, c_bar=bar)
        assert all(torch.equal(x, zero) for x in out)


def test_vtrace_gradients_match_finite_differences_and_skip_the_ratios():
    torch.manual_seed(0)
    mask = torch.tensor([[True, True, False], [True, True, True]])
    rewards, values, log_ratios = torch.randn(3, 2, 3, dtype=torch.float64)
    values.requires_grad_()
    options = {"gamma": 0.9, "lam": 0.7, "rho_bar": 1.2, "c_bar": 1.0}
    assert torch.autograd.gradcheck(lambda v: vtrace(rewards, v, log_ratios, mask, **options), values)
    out = vtrace(rewards, values.detach(), log_ratios.requires_grad_(), mask, **options)
    assert not any(x.requires_grad for x in out)


def test_vtrace_refuses_bars_out_of_order_and_a_hole_in_the_mask():
    zero, mask = torch.zeros(1, 3), torch.ones(1, 3, dtype=torch.bool)
    for rho_bar, c_bar in ((1.0, 2.0), (1.0, -1.0), (NAN, 1.0)):
        with pytest.raises(ConfigError, match=f"rho_bar ≥ c_bar ≥ 0, got rho_bar {rho_bar} and c_bar {c_bar}"):
            vtrace(zero, zero, zero, mask, gamma=1.0, lam=1.0, rho_bar=rho_bar, c_bar=c_bar)
    hole = torch.tensor([[True, False, True]])
    with pytest.raises(DataError, match="True on a prefix of each row"):
        vtrace(zero, zero, zero, hole, gamma=1.0, lam=1.0, rho_bar=1.0, c_bar=1.0)


@pytest.mark.parametrize("shape", [(2, 3), (2, 0), (0, 3)])
def test_no_response_tokens_give_zero(shape):
    garbage, mask = torch.full(shape, NAN), torch.zeros(shape, dtype=torch.bool)
    result = vtrace(garbage, garbage, garbage, mask, gamma=0.9, lam=0.9, rho_bar=1.0, c_bar=1.0)
    assert all(torch.equal(x, torch.zeros(shape)) for x in result)

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coati.algos.advantages import grpo_advantages, has_signal, reinforce_returns, rloo_advantages
from coati.algos.masked import masked_whiten, spread
from coati.errors import DataError

NAN, INF = float("nan"), float("inf")


def dr_grpo_advantages(scores, group_ids):
    return grpo_advantages(scores, group_ids, divide_by="nothing")


def reinforce_plus_plus_advantages(token_rewards, mask, *, gamma, group_ids=None, eps=1e-8):
    """Compute returns like the makers, and whiten them like the learner."""
    return masked_whiten(reinforce_returns(token_rewards, mask, gamma=gamma, group_ids=group_ids), mask, eps=eps)


def maxrl_advantages(scores, group_ids):
    return grpo_advantages(scores, group_ids, divide_by="mean")


ESTIMATORS = [grpo_advantages, dr_grpo_advantages, rloo_advantages, has_signal]
ALL = pytest.mark.parametrize("estimator", ESTIMATORS)


@st.composite
def grouped_scores(draw):
    """Scores [B], some of them equal, and group ids [B] in any order, for at least one response."""
    ids = draw(st.lists(st.sampled_from([-5, 0, 3, 10**12]), min_size=1, max_size=10))
    scores = draw(st.lists(st.sampled_from([0.0, 1.0]) | st.floats(-10, 10), min_size=len(ids), max_size=len(ids)))
    return torch.tensor(scores, dtype=torch.float64), torch.tensor(ids)


def test_by_hand():
    # group 7: 1, 2, 6, mean 3, variance (4 + 1 + 9) / 3 = 14/3;  group 2: 5, 5;  group 9: 4 alone
    scores = torch.tensor([1.0, 5.0, 2.0, 4.0, 6.0, 5.0], dtype=torch.float64)
    group_ids = torch.tensor([7, 2, 7, 9, 7, 2])
    std = math.sqrt(14 / 3)
    expected = [-2 / std, 0.0, -1 / std, 0.0, 3 / std, 0.0]
    assert grpo_advantages(scores, group_ids, eps=0.0).tolist() == pytest.approx(expected)
    # eps is added to the standard deviation
    by_eps = grpo_advantages(scores, group_ids, eps=0.5)[0].item()
    assert by_eps == pytest.approx(-2 / (std + 0.5))
    assert dr_grpo_advantages(scores, group_ids).tolist() == pytest.approx([-2, 0, -1, 0, 3, 0])
    # 1 - (2 + 6) / 2,  2 - (1 + 6) / 2,  6 - (1 + 2) / 2
    assert rloo_advantages(scores, group_ids).tolist() == pytest.approx([-3.0, 0, -1.5, 0, 4.5, 0])
    assert has_signal(scores, group_ids).tolist() == [True, False, True, False, True, False]
    # divided by the mean 3
    assert maxrl_advantages(scores, group_ids).tolist() == pytest.approx([-2 / 3, 0, -1 / 3, 0, 1, 0])


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("n", [2, 3, 5])
def test_maxrl_follows_the_log_of_the_success_rate(p, n):
    # A policy that is right with probability p = σ(x): d log π / dx is 1 - p if right, -p if wrong. And log p is
    # -Σ (1 - p)^k / k, whose derivative by x up to k = n - 1 is (1 - p) - (1 - p)^n.
    expected = 0.0
    for outcome in itertools.product([0.0, 1.0], repeat=n):
        chance = math.prod(p if right else 1 - p for right in outcome)
        advantages = maxrl_advantages(torch.tensor(outcome, dtype=torch.float64), torch.zeros(n, dtype=torch.long))
        slopes = [1 - p if right else -p for right in outcome]
        expected += chance * sum(a * s for a, s in zip(advantages.tolist(), slopes, strict=True)) / n
    assert expected == pytest.approx((1 - p) - (1 - p) ** n, rel=1e-9)


def test_maxrl_rejects_negative_scores():
    zeros, ids = torch.zeros(4), torch.tensor([0, 0, 1, 1])
    assert torch.equal(maxrl_advantages(zeros, ids), zeros)
    with pytest.raises(DataError, match="0 or more"):
        maxrl_advantages(torch.tensor([1.0, 0.0, -0.5, 1.0]), ids)


@given(grouped=grouped_scores())
def test_estimators_equal_their_definitions(grouped):
    scores, group_ids = grouped
    results = [estimator(scores, group_ids).tolist() for estimator in ESTIMATORS]
    for i, (score, group) in enumerate(zip(scores.tolist(), group_ids.tolist(), strict=True)):
        members = [s for s, g in zip(scores.tolist(), group_ids.tolist(), strict=True) if g == group]
        n, mean = len(members), math.fsum(members) / len(members)
        std = math.sqrt(math.fsum((s - mean) ** 2 for s in members) / n)
        grpo, dr_grpo, rloo, signal = (result[i] for result in results)
        assert dr_grpo == pytest.approx(score - mean, abs=1e-12)
        assert grpo == pytest.approx((score - mean) / (std + 1e-6), abs=1e-6)
        others = (math.fsum(members) - score) / (n - 1) if n > 1 else score
        assert rloo == pytest.approx(score - others, abs=1e-12)
        assert signal == (len(set(members)) > 1)
        # leaving out the response itself scales its deviation from the mean by n / (n - 1)
        assert n == 1 or rloo == pytest.approx(dr_grpo * n / (n - 1), abs=1e-11)


@given(grouped=grouped_scores(), offset=st.floats(-3, 3), data=st.data())
def test_order_group_ids_and_a_constant_offset_do_not_matter(grouped, offset, data):
    scores, group_ids = grouped
    order = torch.tensor(data.draw(st.permutations(range(len(scores)))))
    _, renamed = torch.unique(group_ids, return_inverse=True)
    for estimator in ESTIMATORS:
        here = estimator(scores, group_ids)
        there = estimator(scores[order], (100 - renamed)[order])
        torch.testing.assert_close(there, here[order], rtol=0, atol=1e-9)
    for estimator in (dr_grpo_advantages, rloo_advantages):
        shifted = estimator(scores + offset, group_ids)
        torch.testing.assert_close(shifted, estimator(scores, group_ids), rtol=0, atol=1e-12)
        sums = torch.zeros_like(scores).index_add(0, renamed, shifted)
        torch.testing.assert_close(sums, torch.zeros_like(sums), rtol=0, atol=1e-11)


@pytest.mark.parametrize("constant", [0.1, 1000.1, -77777.7, 1e30])
@pytest.mark.parametrize("size", [1, 3, 7, 1000])
@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_equal_scores_give_exact_zeros(constant, size, eps):
    scores = torch.full((size,), constant)
    group_ids = torch.zeros(size, dtype=torch.long)
    assert torch.equal(grpo_advantages(scores, group_ids, eps=eps), torch.zeros(size))
    assert torch.equal(rloo_advantages(scores, group_ids), torch.zeros(size))
    assert not has_signal(scores, group_ids).any()
    # one score that differs in the last place is a signal
    if size > 1:
        scores[0] = torch.nextafter(scores[0], torch.tensor(INF))
        assert has_signal(scores, group_ids).all()


def test_reinforce_plus_plus_by_hand():
    # γ = 0.5; rewards 1, 2 and 5: returns 1 + 0.5 · 2 = 2, 2 and 5; mean 3, variance (1 + 1 + 4) / 3 = 2
    rewards = torch.tensor([[1.0, 2.0, NAN], [5.0, INF, NAN]], dtype=torch.float64)
    mask = torch.tensor([[True, True, False], [True, False, False]])
    result = reinforce_plus_plus_advantages(rewards, mask, gamma=0.5, eps=0.0)
    expected = torch.tensor([[-1.0, -1.0, 0.0], [2.0, 0.0, 0.0]], dtype=torch.float64) / math.sqrt(2)
    torch.testing.assert_close(result, expected)


def test_reinforce_plus_plus_with_a_group_baseline_by_hand():
    # γ = 1; group 4: returns 1 + 2 = 3, 2 and 5: mean of the first tokens' (3 + 5) / 2 = 4; the row without a
    # token does not count. Group 6: return 9, its own mean.
    # 3 - 4, 2 - 4, 5 - 4, 9 - 9 = -1, -2, 1, 0: mean -0.5, variance (0.25 + 2.25 + 2.25 + 0.25) / 4 = 1.25
    rewards = torch.tensor([[1.0, 2.0], [9.0, NAN], [NAN, NAN], [5.0, NAN]], dtype=torch.float64)
    mask = torch.tensor([[True, True], [True, False], [False, False], [True, False]])
    group_ids = torch.tensor([4, 6, 4, 4])
    returns = reinforce_returns(rewards, mask, gamma=1.0, group_ids=group_ids)
    assert returns.tolist() == [[-1.0, -2.0], [0.0, 0.0], [0.0, 0.0], [1.0, 0.0]]  # padding stays 0
    result = reinforce_plus_plus_advantages(rewards, mask, gamma=1.0, group_ids=group_ids, eps=0.0)
    expected = torch.tensor([[-0.5, -1.5], [0.5, 0], [0, 0], [1.5, 0]], dtype=torch.float64) / math.sqrt(1.25)
    torch.testing.assert_close(result, expected)


def test_with_scores_only_at_the_end_the_baseline_variant_is_whitened_dr_grpo():
    generator = torch.Generator().manual_seed(2)
    scores = torch.randn(6, generator=generator, dtype=torch.float64)
    group_ids = torch.tensor([0, 1, 0, 1, 2, 0])
    lengths = torch.tensor([3, 1, 2, 4, 2, 1])
    mask = torch.arange(4) < lengths.unsqueeze(-1)
    rewards = torch.zeros(6, 4, dtype=torch.float64)
    rewards[torch.arange(6), lengths - 1] = scores
    result = reinforce_plus_plus_advantages(rewards, mask, gamma=1.0, group_ids=group_ids)
    expected = masked_whiten(spread(dr_grpo_advantages(scores, group_ids), mask), mask)
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-12)


@given(seed=st.integers(0, 2**31), garbage=st.sampled_from([NAN, INF, -INF, 1e308]), grouped=st.booleans())
def test_reinforce_plus_plus_ignores_padding_and_order(seed, garbage, grouped):
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    mask = torch.arange(4) < torch.randint(0, 5, (5, 1), generator=generator)
    group_ids = torch.randint(3, (5,), generator=generator)
    order = torch.randperm(5, generator=generator)
    clean = reinforce_plus_plus_advantages(rewards, mask, gamma=0.9, group_ids=group_ids if grouped else None)
    dirty = reinforce_plus_plus_advantages(
        torch.where(mask, rewards, garbage)[order],
        mask[order],
        gamma=0.9,
        group_ids=group_ids[order] if grouped else None,
    )
    torch.testing.assert_close(dirty, clean[order], rtol=0, atol=1e-12)
    assert torch.equal(clean[~mask], torch.zeros_like(clean[~mask]))
    if not grouped:
        returns = reinforce_returns(rewards, mask, gamma=0.9)
        assert torch.equal(clean, masked_whiten(returns, mask))


def test_spread_by_hand():
    mask = torch.tensor([[True, True, False], [False, False, False], [True, True, True]])
    result = spread(torch.tensor([2.0, NAN, -1.0]), mask)
    assert result.tolist() == [[2.0, 2.0, 0.0], [0.0, 0.0, 0.0], [-1.0, -1.0, -1.0]]


def test_empty_batches():
    nothing, ids = torch.zeros(0), torch.zeros(0, dtype=torch.long)
    assert [estimator(nothing, ids).shape for estimator in ESTIMATORS] == [(0,)] * 4
    for shape, grouped in itertools.product([(2, 3), (2, 0), (0, 3)], [False, True]):
        mask = torch.zeros(shape, dtype=torch.bool)
        group_ids = torch.zeros(shape[0], dtype=torch.long) if grouped else None
        result = reinforce_plus_plus_advantages(torch.full(shape, NAN), mask, gamma=0.9, group_ids=group_ids)
        assert torch.equal(result, torch.zeros(shape))


def test_results_are_detached_and_half_precision_is_widened():
    scores = torch.tensor([256.0, 255.0, 1.0], dtype=torch.bfloat16, requires_grad=True)
    group_ids = torch.tensor([0, 0, 0], dtype=torch.int32)
    for estimator in (grpo_advantages, dr_grpo_advantages, rloo_advantages):
        result = estimator(scores, group_ids)
        assert result.dtype == torch.float32
        assert torch.equal(result, estimator(scores.float(), group_ids))
        assert not result.requires_grad
        assert estimator(scores.double(), group_ids).dtype == torch.float64
    rewards = torch.randn(3, 2, requires_grad=True)
    mask = torch.ones(3, 2, dtype=torch.bool)
    assert not reinforce_plus_plus_advantages(rewards, mask, gamma=1.0, group_ids=group_ids).requires_grad


def test_reinforce_plus_plus_rejects_a_mask_with_a_hole():
    with pytest.raises(DataError, match="True on a prefix of each row"):
        reinforce_plus_plus_advantages(torch.zeros(1, 2), torch.tensor([[False, True]]), gamma=1.0)

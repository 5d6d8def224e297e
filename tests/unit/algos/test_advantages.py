import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coati.algos.advantages import adaptive_lambda, gae, reinforce_returns, shaped_rewards
from coati.errors import DataError

NAN, INF = float("nan"), float("inf")

rates = st.floats(0, 1)


@st.composite
def episodes(draw):
    """Rewards and values [B, T] with a prefix mask; empty and full rows included."""
    lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=4))
    width = max(lengths) + draw(st.integers(0, 2))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    rewards, values = torch.randn(2, len(lengths), width, generator=generator, dtype=torch.float64)
    mask = torch.arange(width) < torch.tensor(lengths).unsqueeze(-1)
    return rewards, values, mask


def test_shaped_rewards_by_hand():
    # coefficient 0.1
    #   row 0, 2 tokens, score 1:  -0.1 · 2 = -0.2,  -0.1 · 4 + 1 = 0.6
    #   row 1, 1 token, score -3:  -0.1 · 5 - 3 = -3.5
    #   row 2, no token: zeros, regardless of its score
    #   row 3, all tokens, score 2: -0.1, -0.2, -0.3 + 2 = 1.7
    scores = torch.tensor([1.0, -3.0, NAN, 2.0], dtype=torch.float64)
    kl = torch.tensor([[2.0, 4.0, NAN], [5.0, INF, NAN], [NAN, NAN, NAN], [1, 2, 3]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0], [1, 1, 1]]).bool()
    expected = torch.tensor([[-0.2, 0.6, 0], [-3.5, 0, 0], [0, 0, 0], [-0.1, -0.2, 1.7]], dtype=torch.float64)
    torch.testing.assert_close(shaped_rewards(scores, kl, mask, kl_coef=0.1), expected)


def test_a_coefficient_of_zero_ignores_an_estimate_that_overflowed():
    mask = torch.ones(1, 2, dtype=torch.bool)
    rewards = shaped_rewards(torch.tensor([1.0]), torch.tensor([[INF, 0.0]]), mask, kl_coef=0.0)
    assert rewards.tolist() == [[0.0, 1.0]]


def test_the_score_goes_to_the_last_response_token_even_after_a_hole():
    mask = torch.tensor([[True, False, True, False]])
    rewards = shaped_rewards(torch.tensor([1.0]), torch.zeros(1, 4), mask, kl_coef=1.0)
    assert rewards.tolist() == [[0.0, 0.0, 1.0, 0.0]]


def test_gae_by_hand():
    # γ = 0.5, λ = 0.5, so γλ = 0.25; rewards 1, 2; values 4, 8; the value after the last token is 0
    #   δ_1 = 2 + 0.5 · 0 - 8 = -6      A_1 = -6
    #   δ_0 = 1 + 0.5 · 8 - 4 =  1      A_0 =  1 + 0.25 · (-6) = -0.5
    rewards = torch.tensor([[1.0, 2.0, NAN]])
    values = torch.tensor([[4.0, 8.0, INF]])
    mask = torch.tensor([[True, True, False]])
    assert gae(rewards, values, mask, gamma=0.5, lam=0.5).tolist() == [[-0.5, -6.0, 0.0]]


def test_adaptive_lambda_by_hand_and_in_gae():
    # 1 - 1 / (0.5 · 4) = 0.5;  1 - 1 / (0.5 · 2) = 0;  never negative for fewer tokens
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]).bool()
    lam = adaptive_lambda(mask, alpha=0.5)
    assert lam.tolist() == [0.5, 0.0, 0.0, 0.0]
    rewards, values = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(0))
    by_row = [
        gae(rewards[r : r + 1], values[r : r + 1], mask[r : r + 1], gamma=0.9, lam=float(lam[r])) for r in range(4)
    ]
    torch.testing.assert_close(gae(rewards, values, mask, gamma=0.9, lam=lam), torch.cat(by_row))


def test_reinforce_returns_by_hand():
    # γ = 0.5; rewards 1, 2, 4: 4;  2 + 0.5 · 4 = 4;  1 + 0.5 · 4 = 3
    rewards = torch.tensor([[1.0, 2.0, 4.0, NAN]])
    mask = torch.tensor([[True, True, True, False]])
    assert reinforce_returns(rewards, mask, gamma=0.5).tolist() == [[3.0, 4.0, 4.0, 0.0]]


@given(episode=episodes(), gamma=rates, lam=rates)
def test_gae_equals_its_definition(episode, gamma, lam):
    rewards, values, mask = episode
    expected = torch.zeros_like(rewards)
    for b, length in enumerate(mask.sum(-1).tolist()):
        for t in range(length):
            for step in range(length - t):
                s = t + step
                next_value = values[b, s + 1] if s + 1 < length else 0.0
                delta = rewards[b, s] + gamma * next_value - values[b, s]
                expected[b, t] += (gamma * lam) ** step * delta
    torch.testing.assert_close(gae(rewards, values, mask, gamma=gamma, lam=lam), expected, rtol=0, atol=1e-12)


@given(episode=episodes(), gamma=rates)
def test_with_lambda_one_advantage_plus_value_is_the_return(episode, gamma):
    rewards, values, mask = episode
    for discount in (1.0, gamma):
        targets = gae(rewards, values, mask, gamma=discount, lam=1.0) + values
        returns = reinforce_returns(rewards, mask, gamma=discount)
        torch.testing.assert_close(targets[mask], returns[mask], rtol=0, atol=1e-12)


@given(episode=episodes(), garbage=st.sampled_from([NAN, INF, -INF, 1e308]), data=st.data())
def test_padding_and_the_order_of_rows_do_not_matter(episode, garbage, data):
    rewards, values, mask = episode
    order = torch.tensor(data.draw(st.permutations(range(len(mask)))))
    dirty_rewards, dirty_values = (torch.where(mask, x, garbage)[order] for x in (rewards, values))
    clean = gae(rewards, values, mask, gamma=0.9, lam=0.8)
    assert torch.equal(gae(dirty_rewards, dirty_values, mask[order], gamma=0.9, lam=0.8), clean[order])
    assert torch.equal(clean[~mask], torch.zeros_like(clean[~mask]))
    returns = reinforce_returns(rewards, mask, gamma=0.9)
    assert torch.equal(reinforce_returns(dirty_rewards, mask[order], gamma=0.9), returns[order])
    shaped = shaped_rewards(values.sum(-1).nan_to_num(), rewards, mask, kl_coef=0.3)
    assert torch.equal(shaped_rewards(values.sum(-1)[order], dirty_rewards, mask[order], kl_coef=0.3), shaped[order])


def test_no_tokens():
    empty, mask = torch.zeros(3, 0), torch.zeros(3, 0, dtype=torch.bool)
    assert gae(empty, empty, mask, gamma=0.9, lam=0.9).shape == (3, 0)
    assert reinforce_returns(empty, mask, gamma=0.9).shape == (3, 0)
    assert shaped_rewards(torch.ones(3), empty, mask, kl_coef=0.1).shape == (3, 0)


def test_bfloat16_is_computed_in_float32_and_float64_stays():
    mask = torch.ones(1, 2, dtype=torch.bool)
    half = torch.tensor([[256.0, 1.0]], dtype=torch.bfloat16)
    # 256 + 1 does not exist in bfloat16
    assert reinforce_returns(half, mask, gamma=1.0).tolist() == [[257.0, 1.0]]
    result = gae(half, torch.zeros(1, 2, dtype=torch.float64), mask, gamma=1.0, lam=1.0)
    assert result.dtype == torch.float64


def test_gradients_match_finite_differences_and_stop_at_padding():
    torch.manual_seed(0)
    mask = torch.tensor([[True, True, False], [True, True, True]])
    rewards, values = torch.randn(2, 2, 3, dtype=torch.float64)
    values.requires_grad_()
    assert torch.autograd.gradcheck(lambda v: gae(rewards, v, mask, gamma=0.9, lam=0.7), values)


def test_a_response_with_a_hole_is_rejected():
    mask = torch.tensor([[True, False, True]])
    with pytest.raises(DataError, match="True on a prefix of each row"):
        gae(torch.zeros(1, 3), torch.zeros(1, 3), mask, gamma=1.0, lam=1.0)

"""Every advantage estimator, computed by hand on two groups of two responses."""

from types import SimpleNamespace

import pytest
import torch

from coati.algos.advantages import reinforce_returns, shaped_rewards
from coati.algos.masked import masked_whiten
from coati.experience import Experience
from coati.experience_maker.scoring import estimate_advantages

MASK = torch.tensor([[True, True], [True, False], [True, True], [True, True]])
SCORES = torch.tensor([1.0, 5.0, 2.0, 2.0])
KL = torch.tensor([[1.0, 3.0], [2.0, 99.0], [0.0, 2.0], [4.0, 2.0]])  # padding holds garbage
VALUES = torch.tensor([[0.5, 0.25], [1.0, 0.0], [0.0, 0.0], [1.0, 1.0]])
GROUPS = torch.tensor([7, 7, 3, 3])


def estimate(kind, *, kl_coef=0.0, gamma=1.0, lam=1.0, scores=SCORES):
    advantages, targets = estimate_both(kind, kl_reward_coef=kl_coef, gamma=gamma, lam=lam, scores=scores)
    assert targets is None
    return advantages


def estimate_both(kind, *, lam=1.0, critic_lam=None, adaptive_lam=0.0, scores=SCORES, **settings):
    tokens = torch.zeros(4, 3, dtype=torch.long)
    experience = Experience(tokens, VALUES, VALUES, scores, KL, VALUES, None, MASK, group_ids=GROUPS)
    settings |= {"lam": lam, "critic_lam": lam if critic_lam is None else critic_lam, "adaptive_lam": adaptive_lam}
    return estimate_advantages(experience, SimpleNamespace(advantages=kind, **settings))


@pytest.mark.parametrize(
    ("kind", "kl_coef", "expected"),
    [
        # Means 3 and 2; deviations 2 and 0.
        ("group_centered", 0.0, [[-2, -2], [2, 0], [0, 0], [0, 0]]),
        ("group_normalized", 0.0, [[-1, -1], [1, 0], [0, 0], [0, 0]]),
        ("group_over_mean", 0.0, [[-2 / 3, -2 / 3], [2 / 3, 0], [0, 0], [0, 0]]),
        # Minus the other sample's score.
        ("leave_one_out", 0.0, [[-4, -4], [4, 0], [0, 0], [0, 0]]),
        # Each score minus half of the response's KL: 1 - 2, 5 - 1, 2 - 1, 2 - 3.
        ("leave_one_out", 0.5, [[-5, -5], [5, 0], [2, 2], [-2, -2]]),
        ("group_centered", 0.5, [[-2.5, -2.5], [2.5, 0], [1, 1], [-1, -1]]),
        # Returns: -0.5 and 1 - 1.5; 5 - 1; 0 and 2 - 1; -2 and 2 - 1.
        ("returns", 0.5, [[-1, -0.5], [4, 0], [1, 1], [-1, 1]]),
        # Minus the mean of the first tokens' returns: 1.5 and 0.
        ("returns_above_group", 0.5, [[-2.5, -2], [2.5, 0], [1, 1], [-1, 1]]),
        # With lambda 1, returns minus values.
        ("gae", 0.5, [[-1.5, -0.75], [3, 0], [1, 1], [-2, 0]]),
    ],
)  # fmt: skip
def test_by_hand(kind, kl_coef, expected):
    torch.testing.assert_close(estimate(kind, kl_coef=kl_coef), torch.tensor(expected, dtype=torch.float32))


def test_policy_and_critic_may_have_different_lambdas():
    # λ = 0 for the policy: δ_0 = 0.25 - 0.5, δ_1 = 1 - 0.25;  5 - 1;  0, 2;  0, 2 - 1. λ = 1 for the critic: the score.
    settings = {"kl_reward_coef": 0.0, "gamma": 1.0}
    advantages, targets = estimate_both("gae", lam=0.0, critic_lam=1.0, **settings)
    expected = torch.tensor([[-0.25, 0.75], [4, 0], [0, 2], [0, 1]])
    torch.testing.assert_close(advantages, expected)
    torch.testing.assert_close(targets, torch.tensor([[1.0, 1], [5, 0], [2, 2], [2, 2]]))
    # VAPO's λ: 1 - 1 / (1 · 2) = 0.5 for responses of 2 tokens, 1 - 1 / 1 = 0 for the one of 1
    advantages, targets = estimate_both("gae", critic_lam=1.0, adaptive_lam=1.0, **settings)
    torch.testing.assert_close(advantages, expected + torch.tensor([[0.375, 0], [0, 0], [1, 0], [0.5, 0]]))
    torch.testing.assert_close(targets, torch.tensor([[1.0, 1], [5, 0], [2, 2], [2, 2]]))


def test_reinforce_plus_plus_is_the_returns_whitened_by_the_learner():
    rewards = shaped_rewards(SCORES, KL, MASK, kl_coef=0.5)
    for kind, groups in (("returns", None), ("returns_above_group", GROUPS)):
        whole = masked_whiten(reinforce_returns(rewards, MASK, gamma=0.9, group_ids=groups), MASK)
        torch.testing.assert_close(masked_whiten(estimate(kind, kl_coef=0.5, gamma=0.9), MASK), whole)


@pytest.mark.parametrize("kind", ["group_normalized", "group_centered", "leave_one_out", "returns_above_group"])
def test_other_groups_do_not_matter(kind):
    other = estimate(kind, scores=torch.tensor([1.0, 5.0, -3.0, 8.0]))
    assert torch.equal(other[:2], estimate(kind)[:2])

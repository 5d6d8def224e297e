import doctest

import pytest
import torch

import coati.models.loss
from coati.errors import ConfigError
from coati.models.loss import PolicyLoss, ValueLoss

NAN, INF = float("nan"), float("inf")


def test_docstring_examples_run():
    result = doctest.testmod(coati.models.loss)
    assert result.attempted > 0
    assert result.failed == 0


def test_defaults_are_those_of_the_contract():
    assert PolicyLoss().clip_eps == 0.2
    assert ValueLoss().clip_eps == 0.4


def test_policy_loss_by_hand():
    # ratios 1.5 and 0.5, clip range [0.8, 1.2]
    #   advantage +1: min(1.5, 1.2)   =  1.2
    #   advantage -1: min(-0.5, -0.8) = -0.8
    # -(1.2 - 0.8) / 2 tokens
    log_probs = torch.tensor([[1.5, 0.5, NAN]]).log()
    advantages = torch.tensor([[1.0, -1.0, INF]])
    for action_mask in (torch.tensor([[True, True, False]]), torch.tensor([[1, 1, 0]])):
        loss = PolicyLoss()(log_probs, torch.zeros(1, 3), advantages, action_mask)
        assert loss.item() == pytest.approx(-0.2)


def test_value_loss_by_hand():
    # returns = advantages + old values = 2 and 3; old value 1, clip 0.5
    #   v 3: max((3 - 2)², (1.5 - 2)²) = 1
    #   v 2: max((2 - 3)², (1.5 - 3)²) = 2.25
    # 0.5 · 3.25 / 2 tokens
    values = torch.tensor([[3.0, 2.0, NAN]])
    old_values = torch.tensor([[1.0, 1.0, NAN]])
    advantages = torch.tensor([[1.0, 2.0, NAN]])
    mask = torch.tensor([[True, True, False]])
    loss_fn = ValueLoss(clip_eps=0.5)
    assert loss_fn(values, old_values, advantages, mask).item() == pytest.approx(0.8125)


def test_without_a_mask_all_tokens_count():
    torch.manual_seed(0)
    first, second, third = torch.randn(3, 2, 4)
    everything = torch.ones(2, 4, dtype=torch.bool)
    for loss_fn in (PolicyLoss(), ValueLoss()):
        assert torch.equal(loss_fn(first, second, third), loss_fn(first, second, third, everything))


@pytest.mark.parametrize("loss_class", [PolicyLoss, ValueLoss])
def test_gradients_match_finite_differences(loss_class):
    generator = torch.Generator().manual_seed(0)
    first, second, third = torch.randn(3, 2, 4, dtype=torch.float64, generator=generator)
    mask = torch.tensor([[True, True, True, False], [True, False, False, False]])
    first.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: loss_class()(x, second, third, mask), first)


def test_value_targets_of_half_precision_are_added_in_float32():
    # 256 + 1 is not a bfloat16: the error is 0.5 · 257², not 0.5 · 256²
    half = torch.tensor([[256.0]], dtype=torch.bfloat16)
    loss = ValueLoss(clip_eps=1000.0)(torch.zeros(1, 1), half, torch.ones(1, 1, dtype=torch.bfloat16))
    assert loss.item() == 0.5 * 257**2


@pytest.mark.parametrize("loss_class", [PolicyLoss, ValueLoss])
@pytest.mark.parametrize("clip_eps", [0, -0.1, NAN])
def test_a_clip_that_is_not_positive_is_rejected(loss_class, clip_eps):
    with pytest.raises(ConfigError, match="clip_eps must be greater than 0, got"):
        loss_class(clip_eps=clip_eps)

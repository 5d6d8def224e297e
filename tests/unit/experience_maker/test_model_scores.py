"""Scoring a part at a time gives what scoring all at once does."""

import pytest
import torch
from torch import nn

from coati.experience_maker.model_scores import score_with_models
from coati.models import Actor, Critic


@pytest.mark.parametrize("max_tokens", [1, 9, 20])
@pytest.mark.parametrize("with_critic", [True, False])
def test_parts_do_not_matter(llama, max_tokens, with_critic):
    actor, reference = Actor(llama().double()), llama(seed=1).double()
    critic = Critic(llama(seed=2).double()) if with_critic else None
    if critic is not None:
        nn.init.normal_(critic.value_head.weight)
    mask = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 0, 0], [0, 0, 1, 1, 0], [1, 1, 1, 1, 1]])
    sequences = torch.randint(3, 11, mask.shape, generator=torch.Generator().manual_seed(0))
    rest = (sequences, mask, mask[:, 2:].bool(), torch.tensor([1.0, 0.7, 1.0, 1.3]))
    calls = []
    actor.model.model.register_forward_pre_hook(
        lambda _, args, kwargs: calls.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    parts = score_with_models(actor, reference, critic, *rest, max_tokens=max_tokens)
    assert calls == {1: [4, 3, 2, 5], 9: [9, 5], 20: [14]}[max_tokens]
    whole = score_with_models(actor, reference, critic, *rest)
    for ours, theirs in zip(parts, whole, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
        assert not ours.requires_grad
    assert bool(parts.values.any()) == with_critic
    assert not torch.equal(parts.logprobs, parts.reference_logprobs)

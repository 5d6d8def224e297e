"""Steps in host memory: the same numbers, and everything back where it was."""

import torch
from torch import nn

from coati.trainer.optim import HybridAdam
from coati.trainer.strategies.low_level_zero import _OnHost


def test_a_step_in_host_memory_is_a_step_and_leaves_parameters_where_they_were():
    torch.manual_seed(0)
    plain, moved = nn.Linear(3, 2), nn.Linear(3, 2)
    moved.load_state_dict(plain.state_dict())
    optimizers = [HybridAdam(layer.parameters(), lr=0.1) for layer in (plain, moved)]
    on_host, seen = _OnHost(), []

    def bring(optimizer, *_):
        for parameter in moved.parameters():
            on_host.bring(parameter, optimizer.state[parameter])

    optimizers[1].register_step_pre_hook(bring)
    optimizers[1].register_step_post_hook(lambda *_: seen.extend(p.data_ptr() for p in moved.parameters()))
    optimizers[1].register_step_post_hook(lambda *_: on_host.bring_back())
    places = [p.data_ptr() for p in moved.parameters()]
    for _ in range(3):
        for layer, optimizer in zip((plain, moved), optimizers, strict=True):
            layer(torch.ones(1, 3)).square().sum().backward()
            gradients = [p.grad for p in moved.parameters()]
            optimizer.step()
            assert all(p.grad is one for p, one in zip(moved.parameters(), gradients, strict=True))
            optimizer.zero_grad()
    assert not set(seen) & set(places)  # the step was made on copies
    assert [p.data_ptr() for p in moved.parameters()] == places
    for ours, theirs in zip(moved.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        assert not torch.equal(optimizers[1].state[ours]["exp_avg"], torch.zeros_like(ours))

"""Steps in host memory: the same numbers, and everything back where it was."""

import torch
from torch import nn

from coati.trainer.optim import HybridAdam
from coati.trainer.strategies.low_level_zero import _HostStep


def test_a_step_in_host_memory_is_a_step_and_leaves_parameters_where_they_were():
    torch.manual_seed(0)
    plain, moved = nn.Linear(3, 2), nn.Linear(3, 2)
    moved.load_state_dict(plain.state_dict())
    optimizers = [HybridAdam(layer.parameters(), lr=0.1) for layer in (plain, moved)]
    step, seen = _HostStep(), []
    own = [moved.weight]  # the bias is another rank's, say: it has no gradient in the step

    def begin(optimizer, *_):
        moved.bias.grad = None
        step.begin(optimizer, own)
        seen.extend(optimizer.param_groups[0]["params"])

    optimizers[1].register_step_pre_hook(begin)
    optimizers[1].register_step_post_hook(lambda optimizer, *_: step.end(optimizer))
    place, hooked = moved.weight.data_ptr(), []
    moved.weight.register_post_accumulate_grad_hook(lambda _: hooked.append(1))  # as exchanging gradients needs
    for _ in range(3):
        for layer, optimizer in zip((plain, moved), optimizers, strict=True):
            layer(torch.ones(1, 3)).square().sum().backward()
            gradient = moved.weight.grad
            plain.bias.grad = None
            optimizer.step()
            assert moved.weight.grad is gradient
            optimizer.zero_grad()
    assert not any(one is moved.weight for one in seen)  # the step was made on copies
    assert [one for one in seen if one is moved.bias]  # of its own parameters only
    assert optimizers[1].param_groups[0]["params"] == [moved.weight, moved.bias]
    assert moved.weight.data_ptr() == place
    assert len(hooked) == 3
    assert torch.equal(moved.weight, plain.weight)
    assert set(optimizers[1].state) == {moved.weight}
    assert torch.equal(optimizers[1].state[moved.weight]["exp_avg"], optimizers[0].state[plain.weight]["exp_avg"])
    assert int(optimizers[1].state[moved.weight]["step"]) == 3

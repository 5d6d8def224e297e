"""Steps in host memory: the same numbers, and everything back where it was."""

import pytest
import torch
from torch import nn

from coati.trainer.optim import HybridAdam
from coati.trainer.strategies import LowLevelZeroStrategy
from coati.trainer.strategies.low_level_zero import _HostStep, _SpreadStep, load_on_host


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


@pytest.mark.parametrize("on_host", [_HostStep(), None])
def test_a_step_that_fails_leaves_everything_where_it_was(on_host):
    torch.manual_seed(0)
    layer = nn.Linear(3, 2)
    optimizer = HybridAdam(layer.parameters(), lr=0.1)
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    layer(torch.ones(1, 3)).sum().backward()
    before = layer.weight.detach().clone()
    gradients = [layer.weight.grad, layer.bias.grad]
    moment = optimizer.state[layer.weight]["exp_avg"].clone()
    step = _SpreadStep([0, 1], 0, on_host)  # the bias is another rank's
    step.begin(optimizer)
    assert layer.bias.grad is None
    step.undo(optimizer)  # the step itself has raised
    assert optimizer.param_groups[0]["params"] == [layer.weight, layer.bias]
    assert [layer.weight.grad, layer.bias.grad] == gradients
    assert torch.equal(optimizer.state[layer.weight]["exp_avg"], moment)
    optimizer.step()  # and the next one moves the parameters
    assert not torch.equal(layer.weight, before)


def test_state_is_loaded_to_the_host_wherever_the_parameters_are():
    torch.manual_seed(0)
    source = nn.Linear(3, 2)
    saved = HybridAdam(source.parameters(), lr=0.1)
    source(torch.ones(1, 3)).sum().backward()
    saved.step()
    elsewhere = nn.Linear(3, 2, device="meta")  # as far from here as a GPU
    optimizer = HybridAdam(elsewhere.parameters(), lr=0.1)
    load_on_host(optimizer, saved.state_dict())
    assert set(optimizer.state) == {elsewhere.weight, elsewhere.bias}
    for ours, theirs in zip(elsewhere.parameters(), source.parameters(), strict=True):
        assert torch.equal(optimizer.state[ours]["exp_avg_sq"], saved.state[theirs]["exp_avg_sq"])  # on the CPU
        assert optimizer.state[ours]["step"].device.type == "cpu"
    assert optimizer.param_groups[0]["params"] == [elsewhere.weight, elsewhere.bias]
    with pytest.raises(ValueError, match="parameter group"):
        load_on_host(optimizer, {**saved.state_dict(), "param_groups": []})
    assert optimizer.param_groups[0]["params"] == [elsewhere.weight, elsewhere.bias]
    assert set(optimizer.state) == {elsewhere.weight, elsewhere.bias}


def test_a_strategy_undoes_the_step_of_an_optimizer_that_raises(monkeypatch):
    layer = nn.Linear(3, 2)
    layer(torch.ones(1, 3)).sum().backward()
    optimizer = HybridAdam(layer.parameters(), lr=0.1)
    strategy = object.__new__(LowLevelZeroStrategy)  # the steps alone, without a process group
    strategy._steps = {optimizer: _SpreadStep([0, 1], 0, _HostStep())}

    def step():
        strategy._steps[optimizer].begin(optimizer)
        raise MemoryError

    monkeypatch.setattr(optimizer, "step", step)
    with pytest.raises(MemoryError):
        strategy.optimizer_step(optimizer)
    assert optimizer.param_groups[0]["params"] == [layer.weight, layer.bias]
    assert layer.bias.grad is not None

import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from coati.errors import ConfigError
from coati.trainer.optim import HybridAdam


def tiny_net(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def train(net, optimizer, steps=5, first_step=0):
    for step in range(first_step, first_step + steps):
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(step)).to(next(net.parameters()).dtype)
        optimizer.zero_grad()
        net(x).pow(2).sum().backward()
        optimizer.step()


def assert_same(a, b, tolerance=1e-6):
    for (name, left), right in zip(a.named_parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("adamw_mode", [True, False])
def test_equals_torch(dtype, weight_decay, adamw_mode):
    reference_class = torch.optim.AdamW if adamw_mode else torch.optim.Adam
    ours, reference = tiny_net(dtype), tiny_net(dtype)
    train(ours, HybridAdam(ours.parameters(), 1e-2, weight_decay=weight_decay, adamw_mode=adamw_mode))
    train(reference, reference_class(reference.parameters(), 1e-2, weight_decay=weight_decay))
    assert_same(ours, reference)


def test_adam_and_adamw_modes_differ():
    coupled, decoupled = tiny_net(), tiny_net()
    train(coupled, HybridAdam(coupled.parameters(), 1e-2, weight_decay=0.1, adamw_mode=False))
    train(decoupled, HybridAdam(decoupled.parameters(), 1e-2, weight_decay=0.1))
    with pytest.raises(AssertionError):
        assert_same(coupled, decoupled)


@pytest.mark.parametrize("direction", ["from_torch", "to_torch"])
def test_hybrid_adam_and_adamw_exchange_state_dicts(direction):
    settings = {"lr": 1e-2, "weight_decay": 0.1}
    uninterrupted = tiny_net()
    train(uninterrupted, torch.optim.AdamW(uninterrupted.parameters(), **settings), steps=6)

    first, second = torch.optim.AdamW, HybridAdam
    if direction == "to_torch":
        first, second = second, first
    net = tiny_net()
    before = first(net.parameters(), **settings)
    train(net, before, steps=3)
    after = second(net.parameters(), lr=123.0)
    after.load_state_dict(copy.deepcopy(before.state_dict()))
    assert after.param_groups[0]["lr"] == 1e-2
    train(net, after, steps=3, first_step=3)
    assert_same(net, uninterrupted)


def test_loading_adam_state_does_not_change_the_decay_mode():
    net = tiny_net()
    source = torch.optim.Adam(net.parameters(), lr=1e-2)
    train(net, source, steps=1)
    target = HybridAdam(net.parameters(), adamw_mode=True)
    target.load_state_dict(source.state_dict())
    assert target.param_groups[0]["decoupled_weight_decay"] is True


class Kernels(TorchDispatchMode):
    """Records the optimizer kernels that run in this context, with the dtype of their parameters."""

    def __init__(self):
        super().__init__()
        self.ran = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name.startswith(("_fused_", "_foreach_addcdiv")):
            self.ran.append((name, args[0][0].dtype))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("adamw_mode", "kernel"), [(True, "_fused_adamw_"), (False, "_fused_adam_")])
def test_steps_are_fused_for_every_dtype_even_after_loading_unfused_state(adamw_mode, kernel):
    params = [nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16)]
    optimizer = HybridAdam(params, adamw_mode=adamw_mode)
    for param in params:
        param.grad = torch.ones_like(param)
    for _ in range(2):
        with Kernels() as kernels:
            optimizer.step()
        assert set(kernels.ran) == {(kernel, torch.float32), (kernel, torch.bfloat16)}
        optimizer.load_state_dict(torch.optim.AdamW(params, foreach=True).state_dict())


def test_parameters_without_gradient_are_left_alone():
    used, unused = (nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = HybridAdam([used, unused], lr=0.1, weight_decay=0.5)
    used.grad = torch.ones(2)
    optimizer.step()
    assert torch.equal(unused, torch.ones(2))
    assert unused not in optimizer.state
    assert not torch.equal(used, torch.ones(2))


def test_scheduler_and_groups_stay_intact():
    net = tiny_net()
    optimizer = HybridAdam(
        [{"params": [net[0].weight], "lr": 1.0}, {"params": [net[2].weight], "weight_decay": 0.5}], lr=0.1
    )
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.05]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0, 0.5]


def test_closure_is_evaluated_with_gradients():
    weight = nn.Parameter(torch.tensor(3.0))
    optimizer = HybridAdam([weight], lr=0.1)

    def closure():
        loss = weight**2
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 9.0
    assert weight.item() < 3.0


def test_a_step_without_bias_correction_is_refused():
    with pytest.raises(ConfigError, match="bias_correction"):
        HybridAdam([nn.Parameter(torch.ones(1))], bias_correction=False)

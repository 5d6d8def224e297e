"""HybridAdam over CPU and GPU parameters: one optimizer with each device's fused kernel."""

import copy

import torch
from torch import nn

from coati.trainer.optim import HybridAdam


def test_one_optimizer_steps_parameters_on_both_devices_as_adamw_does_on_each():
    torch.manual_seed(0)
    nets = {device: nn.Linear(4, 3).to(device) for device in ("cpu", "cuda")}
    apart = copy.deepcopy(nets)
    settings = {"lr": 1e-2, "weight_decay": 0.1}
    ours = HybridAdam([parameter for net in nets.values() for parameter in net.parameters()], **settings)
    theirs = [torch.optim.AdamW(net.parameters(), **settings) for net in apart.values()]
    before = {device: net.weight.detach().clone() for device, net in nets.items()}
    for step in range(3):
        inputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
        for net in (*nets.values(), *apart.values()):
            net.zero_grad()
            net(inputs.to(net.weight.device)).square().sum().backward()
        for optimizer in (ours, *theirs):
            optimizer.step()
    for device, net in nets.items():
        assert (net.weight - before[device]).abs().max() > 1e-2
        for parameter, expected in zip(net.parameters(), apart[device].parameters(), strict=True):
            torch.testing.assert_close(parameter, expected, rtol=0, atol=1e-6)
            # Only a fused kernel reads its step count on the device.
            assert {value.device.type for value in ours.state[parameter].values()} == {device}
            assert float(ours.state[parameter]["step"]) == 3

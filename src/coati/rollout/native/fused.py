"""Several linear layers of one input as one matrix product, on the weights as they lie.

The layers' weights are moved, once, into one matrix of which each of them is a block of rows, so a weight update that
is written into the model is written into the matrix: there is nothing to refresh, and nothing is held twice.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class FusedLinear:
    """`torch.cat([layer(x) for layer in layers], dim=-1)`, in one product where the layers allow it.

    Layers that are more than a matrix (LoRA adapters) are called one by one.

    >>> layers = [nn.Linear(4, 2), nn.Linear(4, 3)]
    >>> FusedLinear(layers)(torch.zeros(1, 4)).shape
    torch.Size([1, 5])
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        self._layers = list(layers)
        self._weight: Tensor | None = None
        self._bias: Tensor | None = None
        self._pointers: tuple[int, ...] = ()

    def __call__(self, inputs: Tensor) -> Tensor:
        """Outputs of all layers, side by side."""
        if not self.join():
            return torch.cat([layer(inputs) for layer in self._layers], dim=-1)
        return F.linear(inputs, self._weight, self._bias)  # type: ignore[arg-type]

    def join(self) -> bool:
        """Join the weights, unless they are; False if these layers cannot be joined."""
        if not self._is_plain():
            return False
        if self._pointers != self._addresses():  # first use, or the model was moved or loaded anew
            self._join()
        return True

    def _is_plain(self) -> bool:
        has_bias = self._layers[0].bias is not None if type(self._layers[0]) is nn.Linear else False
        return all(type(layer) is nn.Linear and (layer.bias is not None) == has_bias for layer in self._layers)

    def _addresses(self) -> tuple[int, ...]:
        return tuple(layer.weight.data_ptr() for layer in self._layers)

    @torch.no_grad()
    def _join(self) -> None:
        self._weight = _joined([layer.weight for layer in self._layers])
        has_bias = self._layers[0].bias is not None
        self._bias = _joined([layer.bias for layer in self._layers]) if has_bias else None
        self._pointers = self._addresses()


def _joined(parameters: Sequence[nn.Parameter]) -> Tensor:
    """One tensor that holds all of them, and of which they are parts from here on."""
    whole = torch.cat([parameter.detach() for parameter in parameters])
    for parameter, part in zip(
        parameters, torch.split(whole, [len(parameter) for parameter in parameters]), strict=True
    ):
        parameter.data = part
    return whole

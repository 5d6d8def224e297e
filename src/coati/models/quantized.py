"""int8 weights for models that are only read: the reference and the reward.

Each output channel keeps its weights as whole numbers from -127 to 127 and one float32 scale, the channel's largest
weight divided by 127; every weight is then off by half a scale at most. Activations stay as they are, and so does the
arithmetic: a whole number of 8 bits is exact in bfloat16 and float32, so a layer multiplies by those numbers and scales
the result. Only the layer at work exists in the wider format, and only while it works.

Embeddings, output heads and norms keep their format: they are few, and an error there goes straight into the log-probs.
Weights that take part in weight updates must not be quantised, because an update could not be copied into them.

Left out: `torch._weight_int8pack_mm`. In float32 it was 3 to 7 times slower than this on the CPU we measure on.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from coati.errors import ConfigError

_LARGEST = 127


class QuantizedLinear(nn.Module):
    """`nn.Linear` with int8 weights, frozen.

    >>> layer = nn.Linear(2, 1, bias=False)
    >>> _ = layer.weight.data.copy_(torch.tensor([[1.27, -0.5]]))
    >>> quantized = QuantizedLinear(*quantize_channels(layer.weight), bias=None)
    >>> quantized.weight.tolist(), round(quantized.scale.item(), 4)
    ([[127, -50]], 0.01)
    >>> round(quantized(torch.tensor([[1.0, 2.0]])).item(), 4)
    0.27
    """

    weight: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        # Buffers, not parameters: there is nothing to train, and a change of the model's dtype leaves integers alone.
        self.register_buffer("weight", weight)  # [out, in] int8
        self.register_buffer("scale", scale)  # [out] float32
        self.register_buffer("bias", None if bias is None else bias.detach())  # [out]

    def forward(self, inputs: Tensor) -> Tensor:
        """What `nn.Linear` would give, in the format of the inputs."""
        outputs = nn.functional.linear(inputs, self.weight.to(inputs.dtype)) * self.scale.to(inputs.dtype)
        return outputs if self.bias is None else outputs + self.bias.to(inputs.dtype)

    def extra_repr(self) -> str:
        """What `print(model)` says of the layer."""
        return f"in_features={self.in_features}, out_features={self.out_features}, int8"


@torch.no_grad()
def quantize_channels(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 numbers [out, in] and scales [out] of a weight [out, in]: weight ≈ numbers · scale, row by row."""
    wide = weight.detach().float()
    largest = wide.abs().amax(dim=1)
    scale = torch.where(largest > 0, largest / _LARGEST, torch.ones_like(largest))  # a row of zeros stays one
    numbers = (wide / scale.unsqueeze(1)).round().clamp(-_LARGEST, _LARGEST)
    return numbers.to(torch.int8), scale


@torch.no_grad()
def quantize_linear_layers(model: nn.Module) -> int:
    """Replace the model's linear layers by int8 ones, in place, freeze the rest, and return how many were replaced.

    Not replaced: the output head, and layers that share their weight with something that is not linear (an embedding).
    Linear layers that share one weight go on sharing it. Subclasses of `nn.Linear` do things of their own and are left
    alone, as are weights outside of linear layers, such as the stacked experts of some mixtures.
    """
    kept = _kept_weights(model)
    quantized: dict[int, tuple[Tensor, Tensor]] = {}
    num_replaced = 0
    for path, layer in _linear_layers(model):
        key = id(layer.weight)
        if key in kept:
            continue
        if key not in quantized:
            if not bool(layer.weight.isfinite().all()):
                raise ConfigError(
                    f"int8 weights need finite numbers, but {path}.weight holds NaN or infinity. Load another model, "
                    'or set its quantisation to "none".'
                )
            # transformers' Conv1D is a linear layer that keeps its weight as [in, out].
            quantized[key] = quantize_channels(layer.weight.T if isinstance(layer, Conv1D) else layer.weight)
        owner, _, name = path.rpartition(".")
        setattr(model.get_submodule(owner), name, QuantizedLinear(*quantized[key], bias=layer.bias))
        num_replaced += 1
    model.requires_grad_(False)
    return num_replaced


def bytes_held(model: nn.Module) -> int:
    """Bytes of all parameters and buffers; what is shared counts once."""
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _linear_layers(model: nn.Module) -> list[tuple[str, Any]]:
    """Linear layers under every name they have; a layer that is used in two places is replaced in both."""
    return [
        (path, module)
        for path, module in model.named_modules(remove_duplicate=False)
        if path and type(module) in (nn.Linear, Conv1D)
    ]


def _kept_weights(model: nn.Module) -> set[int]:
    """Weights that stay as they are: the output head's, and all that a module which is not linear holds."""
    linear = {id(layer) for _, layer in _linear_layers(model)}
    kept = {
        id(parameter)
        for module in model.modules()
        if id(module) not in linear
        for parameter in module.parameters(recurse=False)
    }
    get_head = getattr(model, "get_output_embeddings", None)
    head = get_head() if callable(get_head) else None
    return kept | ({id(head.weight)} if head is not None else set())

"""HybridAdam: one Adam over parameters on CPU and GPU alike, fused wherever a fused kernel exists.

torch can fuse Adam on both devices, but picks one implementation for a whole parameter group. Here every
step sorts a group's parameters into buckets that can share a kernel call: sharded (DTensor) or plain, fused
or not. Device and dtype are sorted out by torch inside each bucket.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adam import Adam, adam
from torch.optim.optimizer import ParamsT

from coati.errors import ConfigError

logger = logging.getLogger(__name__)

_FUSED_DEVICES = frozenset({"cpu", "cuda"})
_FUSED_DTYPES = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})


class HybridAdam(Adam):
    """Adam or AdamW, fused on whichever device each parameter lives.

    The maths, `param_groups` and `state_dict` are those of `torch.optim.AdamW` (`adamw_mode=True`, the
    default) or `torch.optim.Adam` (`adamw_mode=False`); a state dict of either loads into this class and
    back.

    Args:
        params: parameters or parameter groups, as for any torch optimizer; plain tensors and DTensors may
            mix.
        lr: learning rate.
        bias_correction: divide the moments by `1 - beta**step`, as the Adam paper does.
        betas: decay of the first and second moment.
        eps: added to the denominator.
        weight_decay: decoupled (`adamw_mode=True`) or added to the gradient (`adamw_mode=False`).
        adamw_mode: decoupled weight decay.

    Example:
        >>> layer = torch.nn.Linear(2, 1)
        >>> optimizer = HybridAdam(layer.parameters(), lr=0.1)
        >>> layer(torch.ones(1, 2)).sum().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        adamw_mode: bool = True,
    ) -> None:
        _check_settings(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        super().__init__(params, lr, betas, eps, weight_decay, fused=True, decoupled_weight_decay=adamw_mode)
        self.defaults["bias_correction"] = bias_correction
        for group in self.param_groups:
            group.setdefault("bias_correction", bias_correction)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        # A loaded state may come from Adam or AdamW. Its moments and its learning rate are wanted; how this
        # optimizer decays weights and which kernels it uses stay what its owner asked for.
        for group in self.param_groups:
            group["fused"] = True
            group["foreach"] = None
            group["decoupled_weight_decay"] = self.defaults["decoupled_weight_decay"]
            group.setdefault("bias_correction", self.defaults.get("bias_correction", True))

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient; evaluate a `closure` first, and return its loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            # (sharded, fused) -> the parameters that one kernel call can take together
            buckets: dict[tuple[bool, bool], list[Tensor]] = defaultdict(list)
            for param in group["params"]:
                if param.grad is not None:
                    buckets[isinstance(param, DTensor), _can_fuse(param)].append(param)
            for (_, fused), params in buckets.items():
                self._step_bucket(group, params, fused=fused)
        return loss

    def _step_bucket(self, group: dict[str, Any], params: list[Tensor], *, fused: bool) -> None:
        states = [self._state_of(param, fused=fused, amsgrad=group["amsgrad"]) for param in params]
        steps = [state["step"] for state in states]
        if not group["bias_correction"]:
            # The kernels always correct. At step infinity the correction is exactly one.
            for step in steps:
                step += 1
            steps = [torch.full_like(step, torch.inf) for step in steps]
        beta1, beta2 = group["betas"]
        adam(
            params,
            [_dense_grad(param) for param in params],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [state["max_exp_avg_sq"] for state in states] if group["amsgrad"] else [],
            steps,
            foreach=not fused,
            fused=fused,
            has_complex=any(torch.is_complex(param) for param in params),
            decoupled_weight_decay=group["decoupled_weight_decay"],
            amsgrad=group["amsgrad"],
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )

    def _state_of(self, param: Tensor, *, fused: bool, amsgrad: bool) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[param]
        # A fused kernel reads its step counter on the device; the others read it on the host.
        step_device = param.device if fused else torch.device("cpu")
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=step_device)
            state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        elif state["step"].device != step_device or state["step"].dtype != torch.float32:
            state["step"] = state["step"].to(device=step_device, dtype=torch.float32)
        if amsgrad and "max_exp_avg_sq" not in state:  # only a loaded state can ask for it
            state["max_exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        return state


def _check_settings(*, lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
    for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
        if not value >= 0:
            raise ConfigError(f"HybridAdam {name} must be 0 or more, got {value}.")
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ConfigError(f"HybridAdam betas must be two numbers in [0, 1), got {betas}. Use (0.9, 0.999).")


def _can_fuse(param: Tensor) -> bool:
    if param.device.type in _FUSED_DEVICES and param.dtype in _FUSED_DTYPES:
        return True
    _say_unfused_once(param.device.type, param.dtype)
    return False


_unfused_said: set[tuple[str, torch.dtype]] = set()


def _say_unfused_once(device_type: str, dtype: torch.dtype) -> None:
    if (device_type, dtype) not in _unfused_said:
        _unfused_said.add((device_type, dtype))
        logger.debug("no fused Adam for %s parameters on %s: using foreach", dtype, device_type)


def _dense_grad(param: Tensor) -> Tensor:
    grad = param.grad
    assert grad is not None  # the buckets hold only parameters with a gradient
    if grad.is_sparse:
        raise ConfigError(
            f"HybridAdam needs dense gradients, got a sparse one of shape {tuple(grad.shape)}. "
            "Build the embedding with sparse=False, or use torch.optim.SparseAdam for it."
        )
    return grad

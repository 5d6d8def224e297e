"""HybridAdam: torch's fused Adam and AdamW under the name and arguments that GeminiStrategy's users know."""

from typing import Any

from torch import nn
from torch.optim import Adam, AdamW, Optimizer
from torch.optim.optimizer import ParamsT

from coati.errors import ConfigError


class HybridAdam(Adam):
    """Adam or AdamW (`adamw_mode`) with torch's fused kernel on each device; parameters on a CPU and on GPUs may mix.

    `bias_correction` may only be True; torch's kernels always correct. Weight decay is decoupled in `adamw_mode`, else
    added to the gradient.
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
        if not bias_correction:
            raise ConfigError("HybridAdam needs bias_correction=True, got False, which torch's Adam does not offer.")
        super().__init__(params, lr, betas, eps, weight_decay, fused=True, decoupled_weight_decay=adamw_mode)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take moments and rates of any Adam; the kernel and the kind of weight decay stay this optimizer's."""
        kept = {key: self.defaults[key] for key in ("fused", "foreach", "decoupled_weight_decay")}
        groups = [{**group, **kept} for group in state_dict["param_groups"]]
        super().load_state_dict({**state_dict, "param_groups": groups})


def make_optimizer(optimizer_class: type[Optimizer], model: nn.Module, lr: float) -> Optimizer:
    """An optimizer of what can be trained; torch's Adam in one call for all weights."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trainable:
        raise ConfigError(f"{type(model).__name__} has no trainable parameters, so there is nothing to learn.")
    options: dict[str, Any] = {"lr": lr}
    if optimizer_class in (Adam, AdamW):
        options["fused"] = True
    return optimizer_class(trainable, **options)

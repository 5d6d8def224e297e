"""HybridAdam, the optimizer of `GeminiStrategy` and `LowLevelZeroStrategy`: torch's fused Adam or AdamW."""

from typing import Any

from torch import nn
from torch.optim import Adam, AdamW, Optimizer
from torch.optim.optimizer import ParamsT

from coati.errors import ConfigError


class HybridAdam(Adam):
    """Adam or AdamW with torch's fused kernels; parameters may be on CPU and GPUs at once.

    `bias_correction` must be True, as torch's kernels always correct. `adamw_mode` decouples the weight decay.
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
            raise ConfigError("HybridAdam's bias_correction must be True, got False: torch's Adam always corrects.")
        super().__init__(params, lr, betas, eps, weight_decay, fused=True, decoupled_weight_decay=adamw_mode)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load moments and learning rates saved by any Adam; keep this optimizer's kernel and kind of weight decay."""
        kept = {key: self.defaults[key] for key in ("fused", "foreach", "decoupled_weight_decay")}
        groups = [{**group, **kept} for group in state_dict["param_groups"]]
        super().load_state_dict({**state_dict, "param_groups": groups})


def make_optimizer(optimizer_class: type[Optimizer], model: nn.Module, lr: float) -> Optimizer:
    """Create an optimizer for the trainable parameters of a model; Adam and AdamW use the fused kernel."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trainable:
        raise ConfigError(f"{type(model).__name__} has no trainable parameters. Set requires_grad on some of them.")
    options: dict[str, Any] = {"lr": lr}
    if optimizer_class in (Adam, AdamW):
        options["fused"] = True
    return optimizer_class(trainable, **options)

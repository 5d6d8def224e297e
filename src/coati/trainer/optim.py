"""HybridAdam: torch's fused Adam and AdamW under the name and arguments that GeminiStrategy's users know."""

from typing import Any

from torch.optim import Adam
from torch.optim.optimizer import ParamsT

from coati.errors import ConfigError


class HybridAdam(Adam):
    """Adam or AdamW with torch's fused kernel on each device; parameters on a CPU and on GPUs may mix.

    Args:
        params: parameters or parameter groups, as for any torch optimizer.
        lr: learning rate.
        bias_correction: only True; torch's kernels always correct.
        betas: decay of the first and second moment.
        eps: added to the denominator.
        weight_decay: decoupled (`adamw_mode=True`) or added to the gradient (`adamw_mode=False`).
        adamw_mode: decoupled weight decay.

    Example:
        >>> import torch
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
        if not bias_correction:
            raise ConfigError("HybridAdam needs bias_correction=True, got False, which torch's Adam does not offer.")
        super().__init__(params, lr, betas, eps, weight_decay, fused=True, decoupled_weight_decay=adamw_mode)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take moments and rates of any Adam; the kernel and the kind of weight decay stay this optimizer's."""
        kept = {key: self.defaults[key] for key in ("fused", "foreach", "decoupled_weight_decay")}
        groups = [{**group, **kept} for group in state_dict["param_groups"]]
        super().load_state_dict({**state_dict, "param_groups": groups})

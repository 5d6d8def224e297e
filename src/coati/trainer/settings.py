"""How the learner learns."""

import dataclasses
from typing import Literal

from coati.algos import KLKind, LossNormalization
from coati.errors import ConfigError
from coati.trainer.off_policy import CorrectionSettings


@dataclasses.dataclass(frozen=True, kw_only=True)
class PPOSettings:
    """How the learner learns."""

    eps_clip: float = 0.2
    """The ratio of new to old probability earns nothing outside [1 - eps_clip, 1 + eps_clip_high]."""

    eps_clip_high: float | None = None
    """None for the same as `eps_clip`."""

    ratio: Literal["token", "sequence"] = "token"
    """Whether the ratio of each token is clipped, or one of the whole response (GSPO)."""

    normalization: LossNormalization = "token"
    """How tokens add up to the loss: see `loss_weights`."""

    max_response_tokens: int = 0
    """What the normalisation "constant" divides by; only needed there."""

    kl_loss_coef: float = 0.0
    """Weight of a KL term in the loss, against the initial model; 0 where the penalty is in the reward."""

    kl_estimator: KLKind = "k3"

    value_clip: float = 0.4
    """The critic's new estimate earns nothing further than this from the old one."""

    entropy_coef: float = 0.0
    whiten_advantages: bool = True
    """Zero mean and unit variance over the batch of all ranks, for the policy loss only."""

    actor_lr: float = 1e-6
    critic_lr: float = 1e-5
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    total_steps: int = 0
    """Optimizer steps of the run, which a decaying schedule needs to know; 0 for a constant rate."""

    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm; 0 measures and leaves them alone."""

    micro_batch_size: int = 0
    """Samples in one forward and backward pass; 0 for the whole batch. The gradient is the same."""

    micro_batch_tokens: int = 16384
    """Tokens in one forward and backward pass, real ones only where the models take packed rows; 0 for no limit."""

    activation_checkpointing: bool = False
    """Keep the inputs of each block only, and compute the rest again in the backward pass: less memory, more work."""

    compile: bool = False
    """Compile the transformer blocks with `torch.compile`: the first steps take long, the others less."""

    correction: CorrectionSettings = dataclasses.field(default_factory=CorrectionSettings)
    """What to do about data that an older policy wrote."""

    def __post_init__(self) -> None:
        if self.micro_batch_size < 0:
            raise ConfigError(f"micro_batch_size must be 0 (whole batch) or more, got {self.micro_batch_size}.")
        if self.micro_batch_tokens < 0:
            raise ConfigError(f"micro_batch_tokens must be 0 (no limit) or more, got {self.micro_batch_tokens}.")
        if self.lr_schedule != "constant" and self.total_steps < 1:
            raise ConfigError(
                f"total_steps must be 1 or more for lr_schedule={self.lr_schedule!r}, got {self.total_steps}."
            )
        for name in ("eps_clip", "value_clip", "clip_high"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)}.")
        if self.kl_loss_coef and self.kl_estimator == "k1":
            raise ConfigError(
                "kl_estimator must be 'k2' or 'k3' with kl_loss_coef above 0, got 'k1', whose gradient averages to "
                "zero. Use 'k3'."
            )
        if self.normalization == "constant" and self.max_response_tokens < 1:
            raise ConfigError(
                "max_response_tokens must be 1 or more for normalization='constant', which divides by it, got "
                f"{self.max_response_tokens}. Use the longest response that is generated."
            )

    @property
    def clip_high(self) -> float:
        """The upper half of the clip range."""
        return self.eps_clip if self.eps_clip_high is None else self.eps_clip_high

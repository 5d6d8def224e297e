"""The PPO learner: one optimizer step of actor and critic from one batch of experience."""

import contextlib
import dataclasses
import logging
import math
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from coati.algos import (
    PolicyLossOutput,
    clipped_policy_loss,
    clipped_value_loss,
    decoupled_policy_loss,
    entropy_bonus,
    masked_moments,
    masked_whiten,
)
from coati.errors import ConfigError
from coati.experience_maker.base import Experience
from coati.experience_maker.naive import action_values
from coati.models import action_logprobs
from coati.trainer.off_policy import CorrectionSettings, off_policy_metrics, prepare, token_weights
from coati.trainer.schedule import make_schedule
from coati.trainer.strategies import Strategy

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PPOSettings:
    """How the learner learns."""

    eps_clip: float = 0.2
    """The ratio of new to old probability earns nothing outside [1 - eps_clip, 1 + eps_clip]."""

    value_clip: float = 0.4
    """The critic's new estimate earns nothing further than this from the old one."""

    entropy_coef: float = 0.0
    whiten_advantages: bool = True
    """Zero mean and unit variance over the batch (each rank's own), for the policy loss only."""

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

    correction: CorrectionSettings = dataclasses.field(default_factory=CorrectionSettings)
    """What to do about data that an older policy wrote."""

    def __post_init__(self) -> None:
        if self.micro_batch_size < 0:
            raise ConfigError(f"micro_batch_size must be 0 (whole batch) or more, got {self.micro_batch_size}.")
        if self.lr_schedule != "constant" and self.total_steps < 1:
            raise ConfigError(
                f"total_steps must be 1 or more for lr_schedule={self.lr_schedule!r}, got {self.total_steps}."
            )
        for name in ("eps_clip", "value_clip"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)}.")


class PPOLearner:
    """Actor, critic and their optimizers, prepared by a strategy.

    `step` is all or nothing: if either gradient is not finite, neither optimizer moves, and the batch is
    counted and named.
    """

    def __init__(
        self,
        actor: nn.Module,
        critic: nn.Module,
        strategy: Strategy,
        settings: PPOSettings,
        *,
        optimizer_class: type[Optimizer] = torch.optim.Adam,
    ) -> None:
        self.strategy = strategy
        self.settings = settings
        self.num_skipped = 0
        actor_optimizer = _make_optimizer(optimizer_class, actor, settings.actor_lr)
        critic_optimizer = _make_optimizer(optimizer_class, critic, settings.critic_lr)
        (self.actor, self.actor_optimizer), (self.critic, self.critic_optimizer) = strategy.prepare(
            (actor, actor_optimizer), (critic, critic_optimizer)
        )
        for model in (self.actor, self.critic):
            _turn_dropout_off(model)
        self._schedules = [
            make_schedule(
                optimizer,
                kind=settings.lr_schedule,
                warmup_steps=settings.warmup_steps,
                # A constant rate needs no end; a decaying one has total_steps, which the settings insist on.
                total_steps=settings.total_steps or max(1, settings.warmup_steps),
            )
            for optimizer in (self.actor_optimizer, self.critic_optimizer)
        ]

    @property
    def device(self) -> torch.device:
        """Where the experience has to be."""
        return self.strategy.device

    def step(self, experience: Experience) -> dict[str, float]:
        """Learn from one batch; returns metrics, with `actor_loss` and `critic_loss` among them."""
        experience.validate()
        experience.to_device(self.device)
        experience = _with_some_column(experience)
        parts = self._micro_batches(experience.num_samples)
        if self.settings.correction.is_active and experience.proximal_log_probs is None:
            self._prepare(experience, parts)
        mask = experience.full_action_mask()
        num_tokens = self.strategy.all_reduce_sum(mask.sum())
        advantages = experience.advantages
        if self.settings.whiten_advantages:
            advantages = masked_whiten(advantages, mask)
        sums = _Sums()
        rates = {
            "optim/actor_lr": float(self.actor_optimizer.param_groups[0]["lr"]),
            "optim/critic_lr": float(self.critic_optimizer.param_groups[0]["lr"]),
        }
        try:
            for index, rows in enumerate(parts):
                with self._gradients_stay_local(is_last=index == len(parts) - 1):
                    part = experience.select(rows)
                    self._actor_pass(part, advantages[rows], num_tokens, sums)
                    self._critic_pass(part, num_tokens, sums)
            actor_norm, critic_norm = self._apply_gradients(experience, int(num_tokens))
        finally:
            # Also when a pass raises: the next batch must not inherit half of this one's gradient.
            self.actor_optimizer.zero_grad(set_to_none=True)
            self.critic_optimizer.zero_grad(set_to_none=True)
        return {
            "actor_loss": sums["policy/loss"],
            "critic_loss": sums["value/loss"],
            **sums,
            "policy/grad_norm": actor_norm,
            "value/grad_norm": critic_norm,
            "value/explained_variance": _explained_variance(experience, mask),
            **rates,
            **off_policy_metrics(experience, self.settings.correction),
            "optim/skipped_batches": float(self.num_skipped),
            "train/tokens": float(mask.sum()),
        }

    @torch.no_grad()
    def _prepare(self, experience: Experience, parts: list[slice]) -> None:
        """First sight of a batch: note what the weights that we start from think of it."""
        logprobs, values = [], []
        self.actor.eval()  # LoRA's dropout too: the proximal policy is one policy, not a random one
        for rows in parts:
            part = experience.select(rows)
            forward = (part.sequences, part.attention_mask, part.num_actions)
            logprobs.append(action_logprobs(self.actor, *forward, temperatures=part.temperatures)[0])
            needs_values = self.settings.correction.estimator == "vtrace"
            values.append(action_values(self.critic, *forward) if needs_values else part.values)
        _turn_dropout_off(self.actor)
        prepare(experience, self.settings.correction, proximal_log_probs=torch.cat(logprobs), values=torch.cat(values))

    def _policy_loss(
        self, logprobs: Tensor, part: Experience, advantages: Tensor, num_tokens: Tensor
    ) -> PolicyLossOutput:
        clip, mask = self.settings.eps_clip, part.full_action_mask()
        if self.settings.correction.policy == "none":
            return clipped_policy_loss(
                logprobs,
                part.action_log_probs,
                advantages,
                mask,
                clip_low=clip,
                clip_high=clip,
                num_tokens=num_tokens,
            )
        assert part.proximal_log_probs is not None
        return decoupled_policy_loss(
            logprobs,
            part.proximal_log_probs,
            part.action_log_probs,
            advantages,
            mask,
            clip_low=clip,
            clip_high=clip,
            weights=token_weights(part, self.settings.correction),
            num_tokens=num_tokens,
        )

    def _actor_pass(self, part: Experience, advantages: Tensor, num_tokens: Tensor, sums: "_Sums") -> None:
        settings = self.settings
        mask = part.full_action_mask()
        needs_entropy_gradient = settings.entropy_coef != 0.0
        logprobs, entropy = action_logprobs(
            self.actor,
            part.sequences,
            part.attention_mask,
            part.num_actions,
            temperatures=part.temperatures,
            with_entropy=True,
        )
        assert entropy is not None
        policy = self._policy_loss(logprobs, part, advantages, num_tokens)
        bonus = entropy_bonus(entropy if needs_entropy_gradient else entropy.detach(), mask, num_tokens=num_tokens)
        loss = policy.loss - settings.entropy_coef * bonus
        self.strategy.backward(loss, self.actor, self.actor_optimizer)
        sums.add("policy/loss", policy.loss)
        sums.add("policy/clip_fraction", policy.clip_fraction)
        sums.add("policy/approx_kl", policy.approx_kl)
        sums.add("policy/entropy", bonus)
        sums.largest("policy/ratio_max", policy.ratio_max)

    def _critic_pass(self, part: Experience, num_tokens: Tensor, sums: "_Sums") -> None:
        values = action_values(self.critic, part.sequences, part.attention_mask, part.num_actions)
        value = clipped_value_loss(
            values,
            part.values,
            part.advantages + part.values if part.returns is None else part.returns,
            part.full_action_mask(),
            clip=self.settings.value_clip,
            num_tokens=num_tokens,
        )
        self.strategy.backward(value.loss, self.critic, self.critic_optimizer)
        sums.add("value/loss", value.loss)
        sums.add("value/clip_fraction", value.clip_fraction)

    def _apply_gradients(self, experience: Experience, num_tokens: int) -> tuple[float, float]:
        """Clip and step both optimizers, or neither. The norms are global, so all ranks decide alike."""
        max_norm = self.settings.max_grad_norm
        actor_norm = float(self.strategy.clip_grad_norm(self.actor, max_norm))
        critic_norm = float(self.strategy.clip_grad_norm(self.critic, max_norm))
        if num_tokens > 0 and math.isfinite(actor_norm) and math.isfinite(critic_norm):
            self.strategy.optimizer_step(self.actor_optimizer)
            self.strategy.optimizer_step(self.critic_optimizer)
            for schedule in self._schedules:
                schedule.step()
        else:
            self.num_skipped += 1
            ids = experience.sample_ids.tolist() if experience.sample_ids is not None else "unknown"
            logger.warning(
                "batch skipped, optimizer untouched: %d response tokens, gradient norms are actor %s, "
                "critic %s (sample ids %s)",
                num_tokens,
                actor_norm,
                critic_norm,
                ids,
            )
        return actor_norm, critic_norm

    def _micro_batches(self, num_samples: int) -> list[slice]:
        size = self.settings.micro_batch_size or num_samples
        return [slice(start, min(start + size, num_samples)) for start in range(0, num_samples, size)]

    @contextlib.contextmanager
    def _gradients_stay_local(self, *, is_last: bool) -> Iterator[None]:
        """Ranks exchange gradients once, in the last micro-batch."""
        if is_last:
            yield
            return
        with self.strategy.no_sync(self.actor), self.strategy.no_sync(self.critic):
            yield


class _Sums(dict[str, float]):
    """Metrics of the micro-batches: each is a share of the whole batch, so they add up."""

    def add(self, name: str, value: Tensor) -> None:
        self[name] = self.get(name, 0.0) + float(value.detach())

    def largest(self, name: str, value: Tensor) -> None:
        self[name] = max(self.get(name, -math.inf), float(value.detach()))


def _make_optimizer(optimizer_class: type[Optimizer], model: nn.Module, lr: float) -> Optimizer:
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trainable:
        raise ConfigError(f"{type(model).__name__} has no trainable parameters, so there is nothing to learn.")
    return optimizer_class(trainable, lr=lr)  # type: ignore[call-arg]


def _turn_dropout_off(model: nn.Module) -> None:
    """Dropout would make the ratio to the sampling policy differ from 1 on its own data. LoRA's stays on."""
    model.eval()
    for name, module in model.named_modules():
        if "lora_dropout" in name:
            module.train()


def _with_some_column(experience: Experience) -> Experience:
    """The same samples with at least one response column, masked if there was none.

    So a batch of nothing but empty responses still goes through the models, and a rank that has one takes
    part in the exchange of gradients that the others wait for.
    """
    if experience.num_actions > 0:
        return experience
    mask = experience.attention_mask
    wider = {name: F.pad(t, (0, 1)) for name, t in experience.tensors() if t.ndim == 2}
    wider["attention_mask"] = F.pad(torch.ones_like(experience.sequences) if mask is None else mask, (0, 1))
    wider["action_mask"] = torch.zeros(experience.num_samples, 1, dtype=torch.bool, device=experience.sequences.device)
    return dataclasses.replace(experience, **wider)


def _explained_variance(experience: Experience, mask: Tensor) -> float:
    """1 - Var(target - value) / Var(target): 1 is a perfect critic, 0 one that knows only the mean."""
    returns = experience.advantages + experience.values if experience.returns is None else experience.returns
    target = masked_moments(returns, mask).variance
    residual = masked_moments(returns - experience.values, mask).variance
    return float(1.0 - residual / target) if float(target) > 0.0 else 0.0

"""The learner: one optimizer step of the actor, and of the critic if there is one, from one batch of experience."""

import contextlib
import dataclasses
import logging
import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from coati.algos import clipped_value_loss, entropy_bonus, masked_moments, masked_whiten
from coati.errors import ConfigError
from coati.experience_maker.base import Experience
from coati.experience_maker.naive import action_values
from coati.models import action_logprobs
from coati.trainer.objective import StepCounts, policy_objective
from coati.trainer.off_policy import off_policy_metrics, prepare
from coati.trainer.schedule import make_schedule
from coati.trainer.settings import PPOSettings
from coati.trainer.strategies import Strategy

__all__ = ["PPOLearner", "PPOSettings"]

logger = logging.getLogger(__name__)


class PPOLearner:
    """Actor, critic and their optimizers, prepared by a strategy. Algorithms without a critic pass None for it.

    `step` is all or nothing: if either gradient is not finite, neither optimizer moves, and the batch is
    counted and named.
    """

    def __init__(
        self,
        actor: nn.Module,
        critic: nn.Module | None,
        strategy: Strategy,
        settings: PPOSettings,
        *,
        optimizer_class: type[Optimizer] = torch.optim.Adam,
    ) -> None:
        if critic is None and settings.correction.estimator == "vtrace":
            raise ConfigError("estimator='vtrace' needs a critic, got none. Use 'gae', or pass a critic.")
        self.strategy = strategy
        self.settings = settings
        self.num_skipped = 0
        rates = {"actor": (actor, settings.actor_lr), "critic": (critic, settings.critic_lr)}
        pairs = {
            label: (model, _make_optimizer(optimizer_class, model, rate))
            for label, (model, rate) in rates.items()
            if model is not None
        }
        prepared = strategy.prepare(*pairs.values())
        parts = dict(zip(pairs, [prepared] if len(pairs) == 1 else prepared, strict=True))
        self.models: dict[str, nn.Module] = {label: model for label, (model, _) in parts.items()}
        """What is trained, and published: "actor" and, if there is one, "critic"."""
        self._optimizers: dict[str, Optimizer] = {label: optimizer for label, (_, optimizer) in parts.items()}
        for model in self.models.values():
            _turn_dropout_off(model)
        self._schedules = [
            make_schedule(
                optimizer,
                kind=settings.lr_schedule,
                warmup_steps=settings.warmup_steps,
                # A constant rate needs no end; a decaying one has total_steps, which the settings insist on.
                total_steps=settings.total_steps or max(1, settings.warmup_steps),
            )
            for optimizer in self._optimizers.values()
        ]

    @property
    def actor(self) -> nn.Module:
        """The policy, as the strategy wrapped it."""
        return self.models["actor"]

    @property
    def critic(self) -> nn.Module | None:
        """The critic, as the strategy wrapped it, if there is one."""
        return self.models.get("critic")

    @property
    def actor_optimizer(self) -> Optimizer:
        """The actor's."""
        return self._optimizers["actor"]

    @property
    def critic_optimizer(self) -> Optimizer:
        """The critic's."""
        return self._optimizers["critic"]

    @property
    def device(self) -> torch.device:
        """Where the experience has to be."""
        return self.strategy.device

    def step(self, experience: Experience) -> dict[str, float]:
        """Learn from one batch; returns metrics, `actor_loss` and, with a critic, `critic_loss` among them."""
        experience.validate()
        experience.to_device(self.device)
        experience = _with_some_column(experience)
        parts = self._micro_batches(experience.num_samples)
        if self.settings.correction.is_active and experience.proximal_log_probs is None:
            self._prepare(experience, parts)
        mask = experience.full_action_mask()
        counts = StepCounts(
            tokens=self.strategy.all_reduce_sum(mask.sum()), sequences=self.strategy.all_reduce_sum(mask.any(-1).sum())
        )
        advantages = experience.advantages
        if self.settings.whiten_advantages:
            advantages = masked_whiten(advantages, mask)
        sums = _Sums()
        rates = {
            f"optim/{label}_lr": float(optimizer.param_groups[0]["lr"]) for label, optimizer in self._optimizers.items()
        }
        try:
            for index, rows in enumerate(parts):
                with self._gradients_stay_local(is_last=index == len(parts) - 1):
                    part = experience.select(rows)
                    self._actor_pass(part, advantages[rows], counts, sums)
                    if self.critic is not None:
                        self._critic_pass(self.critic, part, counts, sums)
            norms = self._apply_gradients(experience, int(counts.tokens))
        finally:
            # Also when a pass raises: the next batch must not inherit half of this one's gradient.
            for optimizer in self._optimizers.values():
                optimizer.zero_grad(set_to_none=True)
        metrics = {
            "actor_loss": sums["policy/loss"],
            **sums,
            "policy/grad_norm": norms["actor"],
            **rates,
            **off_policy_metrics(experience, self.settings.correction),
            "optim/skipped_batches": float(self.num_skipped),
            "train/tokens": float(mask.sum()),
        }
        if self.critic is not None:
            metrics |= {
                "critic_loss": sums["value/loss"],
                "value/grad_norm": norms["critic"],
                "value/explained_variance": _explained_variance(experience, mask),
            }
        return metrics

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
            values.append(action_values(self.models["critic"], *forward) if needs_values else part.values)
        _turn_dropout_off(self.actor)
        prepare(experience, self.settings.correction, proximal_log_probs=torch.cat(logprobs), values=torch.cat(values))

    def _actor_pass(self, part: Experience, advantages: Tensor, counts: StepCounts, sums: "_Sums") -> None:
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
        policy = policy_objective(logprobs, part, advantages, counts, settings)
        entropy = entropy if needs_entropy_gradient else entropy.detach()
        bonus = entropy_bonus(entropy, mask, num_tokens=counts.tokens)
        loss = policy.loss + settings.kl_loss_coef * policy.kl_term - settings.entropy_coef * bonus
        self.strategy.backward(loss, self.actor, self.actor_optimizer)
        sums.add("policy/loss", policy.loss)
        sums.add("policy/clip_fraction", policy.clip_fraction)
        sums.add("policy/approx_kl", policy.approx_kl)
        sums.add("policy/entropy", bonus)
        if settings.kl_loss_coef:
            sums.add("policy/kl_loss", policy.kl_term)
        sums.largest("policy/ratio_max", policy.ratio_max)

    def _critic_pass(self, critic: nn.Module, part: Experience, counts: StepCounts, sums: "_Sums") -> None:
        values = action_values(critic, part.sequences, part.attention_mask, part.num_actions)
        value = clipped_value_loss(
            values,
            part.values,
            part.advantages + part.values if part.returns is None else part.returns,
            part.full_action_mask(),
            clip=self.settings.value_clip,
            num_tokens=counts.tokens,
        )
        self.strategy.backward(value.loss, critic, self.critic_optimizer)
        sums.add("value/loss", value.loss)
        sums.add("value/clip_fraction", value.clip_fraction)

    def _apply_gradients(self, experience: Experience, num_tokens: int) -> dict[str, float]:
        """Clip and step all optimizers, or none. The norms are global, so all ranks decide alike."""
        max_norm = self.settings.max_grad_norm
        norms = {label: float(self.strategy.clip_grad_norm(model, max_norm)) for label, model in self.models.items()}
        if num_tokens > 0 and all(map(math.isfinite, norms.values())):
            for optimizer in self._optimizers.values():
                self.strategy.optimizer_step(optimizer)
            for schedule in self._schedules:
                schedule.step()
        else:
            self.num_skipped += 1
            ids = experience.sample_ids.tolist() if experience.sample_ids is not None else "unknown"
            logger.warning(
                "batch skipped, optimizer untouched: %d response tokens, gradient norms are %s (sample ids %s)",
                num_tokens,
                ", ".join(f"{label} {norm}" for label, norm in norms.items()),
                ids,
            )
        return norms

    def _micro_batches(self, num_samples: int) -> list[slice]:
        size = self.settings.micro_batch_size or num_samples
        return [slice(start, min(start + size, num_samples)) for start in range(0, num_samples, size)]

    @contextlib.contextmanager
    def _gradients_stay_local(self, *, is_last: bool) -> Iterator[None]:
        """Ranks exchange gradients once, in the last micro-batch."""
        if is_last:
            yield
            return
        with contextlib.ExitStack() as stack:
            for model in self.models.values():
                stack.enter_context(self.strategy.no_sync(model))
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

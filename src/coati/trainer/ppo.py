"""The learner: takes one optimizer step of the actor, and of the critic if there is one, per batch of experience."""

import contextlib
import dataclasses
import gc
import math
import os
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import get_scheduler
from transformers.modeling_layers import GradientCheckpointingLayer

from coati import faults
from coati.algos.losses import PolicyLossOutput, adapted_coefficient, clipped_value_loss
from coati.algos.masked import divide_by_count, masked_moments, masked_sum, masked_whiten
from coati.config import AlgorithmSettings, TrainSettings
from coati.devices import device_errors_explained
from coati.errors import ConfigError
from coati.experience import Experience
from coati.models import action_logprobs, action_values
from coati.models.actor import unwrap
from coati.models.packing import base_of
from coati.models.value_head import ValueHeadModel
from coati.trainer.objective import StepCounts, measure_off_policy, off_policy_metrics, policy_objective
from coati.trainer.optim import make_optimizer
from coati.trainer.steps import PassSize, PassTooLarge, StepNumbers, TrainingHealth, explained_variance, micro_batches
from coati.trainer.strategies import Strategy
from coati.trainer.strategies.layouts import checkpoint_contexts, transformer_blocks


class PPOLearner:
    """Trains the actor and, unless it is None, the critic, with their optimizers, as prepared by a strategy.

    `step` is all or nothing: if either gradient is not finite, neither optimizer steps.
    """

    def __init__(
        self,
        actor: nn.Module,
        critic: nn.Module | None,
        strategy: Strategy,
        train: TrainSettings | None = None,
        algorithm: AlgorithmSettings | None = None,
        *,
        max_staleness: int = 0,
        max_response_tokens: int = 0,
        optimizer_class: type[Optimizer] = torch.optim.Adam,
    ) -> None:
        train, algorithm = train or TrainSettings(), algorithm or AlgorithmSettings()
        if algorithm.normalization == "constant" and max_response_tokens < 1:
            raise ConfigError(
                "max_response_tokens must be 1 or more with algorithm.normalization = 'constant', which divides by it, "
                f"got {max_response_tokens}. Use the maximum length of a response."
            )
        if train.compile:
            check_compiler(strategy.device)
        self.strategy = strategy
        self.train_settings = train
        self.algorithm = algorithm.resolved(max_staleness)
        self._max_response_tokens = max_response_tokens
        self._kl_coef = algorithm.kl_loss_coef
        self.device = strategy.device
        self.models: dict[str, nn.Module] = {}
        """The trained and published models: "actor" and, if there is one, "critic"."""
        self.optimizers: dict[str, Optimizer] = {}
        for label, model, rate in (("actor", actor, train.actor_lr), ("critic", critic, train.critic_lr)):
            if model is not None:
                optimizer = make_optimizer(optimizer_class, model, rate)
                self.models[label], self.optimizers[label] = strategy.prepare((model, optimizer))
        self.actor, self.critic = self.models["actor"], self.models.get("critic")  # as wrapped by the strategy
        for model in self.models.values():
            if train.compile:
                compile_blocks(model)
            turn_off_dropout(model)
        if train.activation_checkpointing:
            self._checkpoint_activations()
        self.health = TrainingHealth(self.models, self.optimizers, strategy)
        self._pass_size = PassSize(train, strategy, self._checkpoint_activations)
        self._schedules = [
            get_scheduler(
                "constant_with_warmup" if train.lr_schedule == "constant" else train.lr_schedule,
                optimizer,
                num_warmup_steps=train.warmup_steps,
                num_training_steps=train.optimizer_steps,
            )
            for optimizer in self.optimizers.values()
        ]

    def step(self, experience: Experience) -> dict[str, float]:
        """Train on one batch and return metrics, including `actor_loss` and, with a critic, `critic_loss`.

        Each rank passes its own batch, of any size or empty; the step and its metrics are those of the joined batch.
        """
        experience.validate()
        experience.to_device(self.strategy.device)
        action_mask = experience.action_mask
        if self.algorithm.mask_cut_responses and experience.is_cut is not None:
            experience.action_mask = experience.full_action_mask() & ~experience.is_cut.unsqueeze(1)
        try:
            while True:
                with contextlib.suppress(PassTooLarge):
                    return self._try_step(experience)
                # Free the failed pass's memory, also for other processes on the GPU.
                gc.collect()
                torch.cuda.empty_cache()
        finally:
            experience.action_mask = action_mask

    def _checkpoint_activations(self) -> None:
        for model in self.models.values():
            checkpoint_activations(model)
            turn_off_dropout(model)

    def _try_step(self, experience: Experience) -> dict[str, float]:
        """Run the passes of a step and step the optimizers.

        Raises `PassTooLarge`, with models and optimizers unchanged, if the step must start over with smaller passes.
        """
        numbers = StepNumbers()
        rates = {
            f"optim/{label}_lr": float(optimizer.param_groups[0]["lr"]) for label, optimizer in self.optimizers.items()
        }
        try:
            counts, advantages = self._counts_and_advantages(experience)
            logprobs = self._passes(experience, advantages, counts, numbers)
            if self.algorithm.correction == "decoupled" and experience.proximal_log_probs is None:
                # This step's forward passes used the weights that it started from.
                experience.proximal_log_probs = logprobs.masked_fill(~experience.full_action_mask(), 0.0)
            faults.reach("trainer.after_backward")
            norms = self._apply_gradients(experience, int(counts.tokens))
            faults.reach("trainer.after_step")
        finally:
            # If a pass raises, the next batch must not inherit part of this one's gradient.
            for model in self.models.values():
                model.zero_grad(set_to_none=True)
        return {**self._metrics(experience, counts, numbers, norms), **rates}

    def load_optimizers(self, path: Path) -> None:
        """Load the optimizers' state from `path/actor` and `path/critic`, but keep the schedules' learning rates."""
        for label, optimizer in self.optimizers.items():
            rates = [group["lr"] for group in optimizer.param_groups]
            self.strategy.load_optimizer(optimizer, path / label)
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate

    def state(self) -> dict[str, Any]:
        """Return the checkpoint state other than weights and optimizers; step counts determine the schedules."""
        health = self.health
        counts = health.num_steps, health.num_skipped, health.num_skipped_in_a_row
        return {"counts": counts, "kl_coef": self._kl_coef}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state()`, after weights and optimizers have been loaded."""
        health = self.health
        health.num_steps, health.num_skipped, health.num_skipped_in_a_row = state["counts"]
        self._kl_coef = state.get("kl_coef", self._kl_coef)
        if steps := health.num_steps:
            for schedule in self._schedules:
                schedule.load_state_dict({**schedule.state_dict(), "last_epoch": steps - 1, "_step_count": steps + 1})
                schedule.step()

    def policy_objective(
        self,
        logprobs: Tensor,  # [B, A] current policy
        part: Experience,
        advantages: Tensor,  # [B, A]
        counts: StepCounts,
    ) -> PolicyLossOutput:
        """Return the policy's loss on one micro-batch. Override this to train with another loss.

        Divide by the numbers in `counts`, which cover the whole step, so that micro-batches add up.
        """
        return policy_objective(logprobs, part, advantages, counts, self.algorithm)

    def _counts_and_advantages(self, experience: Experience) -> tuple[StepCounts, Tensor]:
        """Return the step's denominators, and this rank's advantages, whitened over all ranks if configured."""
        mask = experience.full_action_mask()
        numbers = StepNumbers()
        numbers.add("tokens", mask.sum())
        numbers.add("sequences", mask.any(-1).sum())
        if self.algorithm.nll_coef:
            numbers.add("positive_tokens", (mask & (experience.reward > 0).unsqueeze(1)).sum())
        if self.algorithm.whiten_advantages:
            numbers.moments["advantages"] = masked_moments(experience.advantages, mask)
        numbers = numbers.over_all_ranks(self.strategy.all_gather)
        advantages = experience.advantages
        if self.algorithm.whiten_advantages:
            advantages = masked_whiten(advantages, mask, moments=numbers.moments["advantages"])
        return StepCounts(**numbers.shares, max_response_tokens=self._max_response_tokens), advantages

    def _passes(self, experience: Experience, advantages: Tensor, counts: StepCounts, numbers: StepNumbers) -> Tensor:
        """Accumulate the gradients of all passes; return the log-probs of the batch, [B, A]."""
        passes = micro_batches(
            experience,
            advantages,
            actor=self.actor,
            critic=self.critic,
            strategy=self.strategy,
            max_rows=self.train_settings.micro_batch_size,
            max_tokens=self._pass_size.tokens,
        )
        logprobs: list[Tensor] = []
        for one in passes:
            with contextlib.ExitStack() as stack:
                for model in () if one.is_last else self.models.values():  # ranks exchange gradients in the last pass
                    stack.enter_context(self.strategy.no_sync(model))
                with self._pass_size.guard("actor", one):
                    of_pass = self._actor_pass(one.part, one.advantages, counts, numbers)
                if self.critic is not None:
                    with self._pass_size.guard("critic", one):
                        self._critic_pass(self.critic, one.part, counts, numbers)
            if one.is_real:
                logprobs.append(of_pass)
        return torch.cat(logprobs) if logprobs else torch.zeros_like(experience.action_log_probs)

    def _actor_pass(self, part: Experience, advantages: Tensor, counts: StepCounts, numbers: StepNumbers) -> Tensor:
        """Accumulate the actor's gradient on a part of the batch; return its log-probs, [B, A]."""
        algorithm = self.algorithm
        mask = part.full_action_mask()
        logprobs, entropy = action_logprobs(
            self.actor,
            part.sequences,
            part.attention_mask,
            part.num_actions,
            temperatures=part.temperatures,
            with_entropy=True,
        )
        assert entropy is not None
        faults.reach("trainer.after_forward")
        if algorithm.correction == "decoupled" and part.proximal_log_probs is None:
            part = dataclasses.replace(part, proximal_log_probs=logprobs.detach().masked_fill(~mask, 0.0))
        policy = self.policy_objective(logprobs, part, advantages, counts)
        bonus = divide_by_count(
            masked_sum(entropy if algorithm.entropy_coef else entropy.detach(), mask), counts.tokens
        )
        loss = policy.loss - algorithm.entropy_coef * bonus
        if policy.kl_term is not None:
            loss = loss + self._kl_coef * policy.kl_term
            numbers.add("policy/kl_loss", policy.kl_term)
        self.strategy.backward(loss, self.actor, self.optimizers["actor"])
        numbers.add("policy/loss", policy.loss)
        numbers.add("policy/clip_fraction", policy.clip_fraction)
        numbers.add("policy/approx_kl", policy.approx_kl)
        numbers.add("policy/entropy", bonus)
        numbers.add_maximum("policy/ratio_max", policy.ratio_max)
        return logprobs.detach()

    def _critic_pass(self, critic: nn.Module, part: Experience, counts: StepCounts, numbers: StepNumbers) -> None:
        values = action_values(critic, part.sequences, part.attention_mask, part.num_actions)
        value = clipped_value_loss(
            values,
            part.values,
            part.critic_targets(),
            part.full_action_mask(),
            clip=self.algorithm.value_clip,
            num_tokens=counts.tokens,
        )
        self.strategy.backward(value.loss, critic, self.optimizers["critic"])
        numbers.add("value/loss", value.loss)
        numbers.add("value/clip_fraction", value.clip_fraction)

    def _apply_gradients(self, experience: Experience, num_tokens: int) -> dict[str, float]:
        """Clip gradients and step all optimizers, or none. Gradient norms are global, so all ranks decide alike."""
        max_norm = self.train_settings.max_grad_norm
        norms = {label: float(self.strategy.clip_grad_norm(model, max_norm)) for label, model in self.models.items()}
        if num_tokens == 0 or not all(map(math.isfinite, norms.values())):
            self.health.count_skipped(experience, num_tokens, norms)
            return norms
        for label, optimizer in self.optimizers.items():
            if label == "actor" and self.health.num_steps < self.algorithm.critic_warmup_steps:
                self.actor.zero_grad(set_to_none=True)  # makes the step a no-op
            with device_errors_explained(
                f"the optimizer step of the {label}",
                'Set train.strategy to "zero2" or "gemini", or keep optimizer state on the host (train.cpu_offload).',
            ):
                self.strategy.optimizer_step(optimizer)
        for schedule in self._schedules:
            schedule.step()
        self.health.count_step()
        return norms

    def _metrics(
        self, experience: Experience, counts: StepCounts, numbers: StepNumbers, norms: dict[str, float]
    ) -> dict[str, float]:
        """Compute the step's metrics over the batches of all ranks, the same on every rank."""
        mask = experience.full_action_mask()
        measure_off_policy(numbers, experience, self.algorithm, num_tokens=counts.tokens)
        if self.critic is not None:
            returns = experience.critic_targets()
            numbers.moments["returns"] = masked_moments(returns, mask)
            numbers.moments["residuals"] = masked_moments(returns - experience.values, mask)
        numbers = numbers.over_all_ranks(self.strategy.all_gather)
        values = numbers.values()
        metrics = {
            "actor_loss": values["policy/loss"],
            **values,
            "policy/grad_norm": norms["actor"],
            **off_policy_metrics(numbers),
            "optim/skipped_batches": float(self.health.num_skipped),
            "train/tokens": float(counts.tokens),
            "train/micro_batch_tokens": float(self._pass_size.tokens),
        }
        if self.algorithm.kl_target:
            metrics["policy/kl_coef"] = self._kl_coef
            if self.health.num_steps > self.algorithm.critic_warmup_steps:  # not while the actor was frozen
                self._kl_coef = adapted_coefficient(self._kl_coef, values["policy/kl_loss"], self.algorithm.kl_target)
        if self.critic is not None:
            metrics |= {
                "critic_loss": values["value/loss"],
                "value/grad_norm": norms["critic"],
                "value/explained_variance": explained_variance(
                    numbers.moments["returns"], numbers.moments["residuals"]
                ),
            }
        return metrics


def turn_off_dropout(model: nn.Module) -> None:
    """Turn dropout off. Layers with activation checkpointing stay in training mode, which checkpointing requires."""
    model.eval()
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer) and module.gradient_checkpointing:
            module.training = True
            rates = [name for name, value in vars(module).items() if "dropout" in name and isinstance(value, float)]
            vars(module).update(dict.fromkeys(rates, 0.0))  # dropout that a layer, such as OPT's, applies itself


def checkpoint_activations(model: nn.Module) -> None:
    """Enable activation checkpointing: keep only the inputs of each transformer block, and recompute the rest."""
    inner = unwrap(model)
    base: Any = base_of(inner.body if isinstance(inner, ValueHeadModel) else inner)
    if not getattr(base, "supports_gradient_checkpointing", False):
        raise ConfigError(
            f"activation_checkpointing needs transformers models that support it, got {type(base).__name__}. Turn it "
            "off, or lower micro_batch_tokens to save memory."
        )
    base.gradient_checkpointing_enable(
        gradient_checkpointing_kwargs={"use_reentrant": False, "context_fn": checkpoint_contexts}
    )


def compile_blocks(model: nn.Module) -> None:
    """Compile each transformer block on its first call, for any number of tokens; hooks on the block still run."""
    blocks = list(transformer_blocks(model))
    if not blocks:
        raise ConfigError(f"compile needs a model with two or more blocks, got {type(model).__name__}. Turn it off.")
    for block in blocks:
        block.compile(dynamic=True)


def check_compiler(device: torch.device) -> None:
    """Raise ConfigError if the compiler that torch.compile needs is missing: C++ for a CPU, C for a GPU."""
    variable, usual = ("CC", ("gcc", "clang")) if device.type == "cuda" else ("CXX", ("g++", "clang++"))
    named = shlex.split(os.environ.get(variable, ""))[:1]
    if not any(map(shutil.which, named or usual)):
        found = f"{variable} = {named[0]!r}, which is not a program" if named else "none"
        raise ConfigError(
            f"train.compile needs {' or '.join(usual)}, or the compiler that {variable} names, on every machine of a "
            f"trainer or maker, got {found}. Install one, or set train.compile to false."
        )

"""The learner: one optimizer step of the actor, and of the critic if there is one, from one batch of experience."""

import contextlib
import dataclasses
import logging
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from transformers import get_scheduler

from coati.algos import clipped_value_loss, entropy_bonus, masked_moments, masked_whiten
from coati.config import AlgorithmSettings, TrainSettings
from coati.errors import CheckpointError, ConfigError, TrainingDiverged
from coati.experience import Experience
from coati.experience_maker.model_scores import action_values
from coati.models import action_logprobs
from coati.models.actor import packed_scoring_problem
from coati.models.packing import joined_once, row_parts, row_tokens
from coati.models.value_head import packs
from coati.trainer.health import (
    MAX_SKIPPED_IN_A_ROW,
    explained_out_of_memory,
    names_not_finite,
    weights_are_finite,
)
from coati.trainer.joined import StepNumbers, explained_variance
from coati.trainer.modes import (
    check_compiler,
    checkpoint_activations,
    compile_blocks,
    is_random,
    make_optimizer,
    set_learning_mode,
)
from coati.trainer.objective import PolicyObjective, StepCounts, policy_objective
from coati.trainer.off_policy import PREPARED_FIELDS, measure_off_policy, off_policy_metrics, prepare
from coati.trainer.strategies import Strategy

logger = logging.getLogger(__name__)

_FIRST = slice(0, 1)


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
        train: TrainSettings | None = None,
        algorithm: AlgorithmSettings | None = None,
        *,
        max_staleness: int = 0,
        max_response_tokens: int = 0,
        optimizer_class: type[Optimizer] = torch.optim.Adam,
    ) -> None:
        train, algorithm = train or TrainSettings(), algorithm or AlgorithmSettings()
        if critic is None and algorithm.estimator == "vtrace":
            raise ConfigError("algorithm.estimator = 'vtrace' needs a critic, got none. Use 'gae', or pass a critic.")
        if algorithm.normalization == "constant" and max_response_tokens < 1:
            raise ConfigError(
                "max_response_tokens must be 1 or more with algorithm.normalization = 'constant', which divides by it, "
                f"got {max_response_tokens}. Use the longest response that is generated."
            )
        if train.compile:
            check_compiler(strategy.device)
        self.strategy = strategy
        self.train_settings = train
        self.algorithm = algorithm.resolved(max_staleness)
        self._max_response_tokens = max_response_tokens
        self.num_skipped = 0
        self._num_stepped = 0
        self._num_skipped_in_a_row = 0
        rates = {"actor": (actor, train.actor_lr), "critic": (critic, train.critic_lr)}
        pairs = {
            label: (model, make_optimizer(optimizer_class, model, rate, device=strategy.device))
            for label, (model, rate) in rates.items()
            if model is not None
        }
        prepared = strategy.prepare(*pairs.values())
        parts = dict(zip(pairs, [prepared] if len(pairs) == 1 else prepared, strict=True))
        self.models: dict[str, nn.Module] = {label: model for label, (model, _) in parts.items()}
        """What is trained, and published: "actor" and, if there is one, "critic"."""
        self.optimizers: dict[str, Optimizer] = {label: optimizer for label, (_, optimizer) in parts.items()}
        for model in self.models.values():
            if train.activation_checkpointing:
                checkpoint_activations(model)
            if train.compile:
                compile_blocks(model)
            set_learning_mode(model)
        self._refuse_broken_weights()
        # The weights that a step starts from are those of its own pass, so nobody has to ask them twice; unless V-trace
        # wants advantages before the pass, or dropout makes every pass another policy.
        self._is_prepared_by_its_pass = algorithm.estimator == "gae" and not is_random(self.models["actor"])
        self._schedules = [
            get_scheduler(
                "constant_with_warmup" if train.lr_schedule == "constant" else train.lr_schedule,
                optimizer,
                num_warmup_steps=train.warmup_steps,
                num_training_steps=train.optimizer_steps,
            )
            for optimizer in self.optimizers.values()
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
        return self.optimizers["actor"]

    @property
    def critic_optimizer(self) -> Optimizer:
        """The critic's."""
        return self.optimizers["critic"]

    @property
    def device(self) -> torch.device:
        """Where the experience has to be."""
        return self.strategy.device

    def step(self, experience: Experience) -> dict[str, float]:
        """Learn from one batch; returns metrics, `actor_loss` and, with a critic, `critic_loss` among them.

        With several ranks each passes its own batch, of any size; step and metrics are those of all of them joined.
        A rank that has no data passes an empty batch (`Experience.empty()`).
        """
        given = experience
        given.validate()
        given.to_device(self.device)
        experience = _with_some_row(_with_some_column(given))
        parts = self._micro_batches(experience)
        needs_proximal = self.algorithm.correction == "decoupled" or self.algorithm.estimator == "vtrace"
        is_new = needs_proximal and experience.proximal_log_probs is None
        if is_new and not self._is_prepared_by_its_pass:
            self._prepare(experience, parts)
        mask = experience.full_action_mask()
        counts, advantages = self._counts_and_advantages(experience, mask)
        numbers = StepNumbers()
        passes: list[Tensor] = []
        rates = {
            f"optim/{label}_lr": float(optimizer.param_groups[0]["lr"]) for label, optimizer in self.optimizers.items()
        }
        try:
            for index, rows in enumerate(parts):
                with self._gradients_stay_local(is_last=index == len(parts) - 1), joined_once():
                    part = _part_of(experience, rows)
                    with self._explained_out_of_memory("actor", part):
                        logprobs = self._actor_pass(part, advantages[rows or _FIRST], counts, numbers)
                    if rows is not None:
                        passes.append(logprobs)
                    if self.critic is not None:
                        with self._explained_out_of_memory("critic", part):
                            self._critic_pass(self.critic, part, counts, numbers)
            if is_new and self._is_prepared_by_its_pass:
                prepare(
                    experience,
                    self.algorithm,
                    proximal_log_probs=torch.cat(passes),
                    values=experience.values,
                )
            norms = self._apply_gradients(given, int(counts.tokens))
        finally:
            # Also when a pass raises: the next batch must not inherit half of this one's gradient.
            for optimizer in self.optimizers.values():
                optimizer.zero_grad(set_to_none=True)
        _hand_back(experience, given)
        return {**self._metrics(experience, mask, counts, numbers, norms), **rates}

    def _counts_and_advantages(self, experience: Experience, mask: Tensor) -> tuple[StepCounts, Tensor]:
        """The step's denominators, and the advantages of this rank, whitened over all ranks if they are to be."""
        numbers = StepNumbers()
        numbers.add("tokens", mask.sum())
        numbers.add("sequences", mask.any(-1).sum())
        if self.algorithm.whiten_advantages:
            numbers.moments["advantages"] = masked_moments(experience.advantages, mask)
        numbers = numbers.joined(self.strategy.all_gather)
        advantages = experience.advantages
        if self.algorithm.whiten_advantages:
            advantages = masked_whiten(advantages, mask, moments=numbers.moments["advantages"])
        return StepCounts(numbers.shares["tokens"], numbers.shares["sequences"], self._max_response_tokens), advantages

    def _metrics(
        self,
        experience: Experience,
        mask: Tensor,
        counts: StepCounts,
        numbers: StepNumbers,
        norms: dict[str, float],
    ) -> dict[str, float]:
        """What the step did to the joined batch, the same on every rank."""
        measure_off_policy(numbers, experience, self.algorithm, num_tokens=counts.tokens)
        if self.critic is not None:
            returns = _targets(experience)
            numbers.moments["returns"] = masked_moments(returns, mask)
            numbers.moments["residuals"] = masked_moments(returns - experience.values, mask)
        numbers = numbers.joined(self.strategy.all_gather)
        values = numbers.values()
        metrics = {
            "actor_loss": values["policy/loss"],
            **values,
            "policy/grad_norm": norms["actor"],
            **off_policy_metrics(numbers),
            "optim/skipped_batches": float(self.num_skipped),
            "train/tokens": float(counts.tokens),
        }
        if self.critic is not None:
            metrics |= {
                "critic_loss": values["value/loss"],
                "value/grad_norm": norms["critic"],
                "value/explained_variance": explained_variance(
                    numbers.moments["returns"], numbers.moments["residuals"]
                ),
            }
        return metrics

    @torch.no_grad()
    def _prepare(self, experience: Experience, parts: list[slice | None]) -> None:
        """First sight of a batch: note what the weights that we start from think of it."""
        logprobs, values = [], []
        for model in self.models.values():
            model.eval()  # LoRA's dropout too: the proximal policy is one policy, not a random one
        try:
            for rows in parts:
                part = _part_of(experience, rows)
                forward = (part.sequences, part.attention_mask, part.num_actions)
                with self._explained_out_of_memory("actor", part):
                    proximal, _ = action_logprobs(self.actor, *forward, temperatures=part.temperatures)
                needs_values = self.algorithm.estimator == "vtrace"
                with self._explained_out_of_memory("critic", part):
                    value = action_values(self.models["critic"], *forward) if needs_values else part.values
                if rows is not None:
                    logprobs.append(proximal)
                    values.append(value)
        finally:
            for model in self.models.values():
                set_learning_mode(model)
        prepare(experience, self.algorithm, proximal_log_probs=torch.cat(logprobs), values=torch.cat(values))

    def policy_objective(
        self,
        logprobs: Tensor,  # [B, A] current policy
        part: Experience,
        advantages: Tensor,  # [B, A]
        counts: StepCounts,
    ) -> PolicyObjective:
        """Return the loss of the policy on one micro-batch. Override it to train with another loss.

        Divide by the numbers of `counts`, which are those of the whole step, so that micro-batches add up.
        """
        return policy_objective(logprobs, part, advantages, counts, self.algorithm)

    def _actor_pass(self, part: Experience, advantages: Tensor, counts: StepCounts, numbers: StepNumbers) -> Tensor:
        """Add a part's gradient; its log-probs, [B, A]."""
        algorithm = self.algorithm
        mask = part.full_action_mask()
        needs_entropy_gradient = algorithm.entropy_coef != 0.0
        logprobs, entropy = action_logprobs(
            self.actor,
            part.sequences,
            part.attention_mask,
            part.num_actions,
            temperatures=part.temperatures,
            with_entropy=True,
        )
        assert entropy is not None
        if algorithm.correction == "decoupled" and part.proximal_log_probs is None:
            part = dataclasses.replace(part, proximal_log_probs=logprobs.detach().masked_fill(~mask, 0.0))
        policy = self.policy_objective(logprobs, part, advantages, counts)
        entropy = entropy if needs_entropy_gradient else entropy.detach()
        bonus = entropy_bonus(entropy, mask, num_tokens=counts.tokens)
        loss = policy.loss + algorithm.kl_loss_coef * policy.kl_term - algorithm.entropy_coef * bonus
        self.strategy.backward(loss, self.actor, self.actor_optimizer)
        numbers.add("policy/loss", policy.loss)
        numbers.add("policy/clip_fraction", policy.clip_fraction)
        numbers.add("policy/approx_kl", policy.approx_kl)
        numbers.add("policy/entropy", bonus)
        if algorithm.kl_loss_coef:
            numbers.add("policy/kl_loss", policy.kl_term)
        numbers.largest("policy/ratio_max", policy.ratio_max)
        return logprobs.detach()

    def _critic_pass(self, critic: nn.Module, part: Experience, counts: StepCounts, numbers: StepNumbers) -> None:
        values = action_values(critic, part.sequences, part.attention_mask, part.num_actions)
        value = clipped_value_loss(
            values,
            part.values,
            _targets(part),
            part.full_action_mask(),
            clip=self.algorithm.value_clip,
            num_tokens=counts.tokens,
        )
        self.strategy.backward(value.loss, critic, self.critic_optimizer)
        numbers.add("value/loss", value.loss)
        numbers.add("value/clip_fraction", value.clip_fraction)

    def _apply_gradients(self, experience: Experience, num_tokens: int) -> dict[str, float]:
        """Clip and step all optimizers, or none. The norms are global, so all ranks decide alike."""
        max_norm = self.train_settings.max_grad_norm
        norms = {label: float(self.strategy.clip_grad_norm(model, max_norm)) for label, model in self.models.items()}
        if num_tokens > 0 and all(map(math.isfinite, norms.values())):
            self._step_optimizers()
            return norms
        self.num_skipped += 1
        self._num_skipped_in_a_row += 1
        found = ", ".join(f"{label} {norm}" for label, norm in norms.items())
        ids = experience.sample_ids.tolist() if experience.sample_ids is not None else "unknown"
        logger.warning(
            "batch skipped, optimizer untouched: %d response tokens, gradient norms are %s (sample ids %s)",
            num_tokens,
            found,
            ids,
        )
        if self._num_skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise TrainingDiverged(
                f"{self._num_skipped_in_a_row} batches in a row were skipped; the last had {num_tokens} response "
                f"tokens and gradient norms {found}. {self._rates_remedy()}"
            )
        return norms

    def _step_optimizers(self) -> None:
        for label, optimizer in self.optimizers.items():
            with explained_out_of_memory(
                f"the optimizer step of the {label}",
                'Set train.strategy to "zero2" or "gemini", or keep optimizer state in host memory '
                "(train.cpu_offload, train.placement_policy).",
            ):
                self.strategy.optimizer_step(optimizer)
        for schedule in self._schedules:
            schedule.step()
        self._num_stepped += 1
        self._num_skipped_in_a_row = 0
        broken = [label for label, model in self.models.items() if not weights_are_finite(model)]
        if self.strategy.all_reduce_sum(torch.tensor(len(broken))) > 0:
            raise TrainingDiverged(
                f"weights of the {' and the '.join(broken) or 'model, on another rank,'} are NaN or infinite after "
                f"optimizer step {self._num_stepped}. {self._rates_remedy()}"
            )

    def check_progress(self) -> None:
        """Raise `TrainingDiverged` if every batch so far was skipped, so that nothing was learned."""
        if self.num_skipped > 0 and self._num_stepped == 0:
            raise TrainingDiverged(
                f"all {self.num_skipped} batches were skipped, so nothing was learned. {self._rates_remedy()}"
            )

    def _rates_remedy(self) -> str:
        rates = ", ".join(
            f"train.{label}_lr is {optimizer.param_groups[0]['lr']:g}" for label, optimizer in self.optimizers.items()
        )
        return f"The learning rate may be too high ({rates}): lower it, or check rewards and advantages of the samples."

    def _refuse_broken_weights(self) -> None:
        """Refuse models that were loaded with a NaN or infinite weight, on all ranks or none."""
        broken = [f"{label}: {name}" for label, model in self.models.items() for name in names_not_finite(model)]
        if self.strategy.all_reduce_sum(torch.tensor(len(broken))) > 0:
            found = f"{len(broken)}, the first {broken[0]!r}" if broken else "some on another rank"
            raise CheckpointError(
                f"models to train must have finite weights, got NaN or infinity in {found}. Use another "
                "copy of the model."
            )

    def _explained_out_of_memory(self, label: str, part: Experience) -> AbstractContextManager[None]:
        settings = self.train_settings
        limits = f"train.micro_batch_tokens is {settings.micro_batch_tokens}"
        if settings.micro_batch_size:
            limits += f", train.micro_batch_size {settings.micro_batch_size}"
        more = "" if settings.activation_checkpointing else ", or set train.activation_checkpointing"
        return explained_out_of_memory(
            f"the {label}'s pass over {part.num_samples} samples, {part.sequences.numel()} tokens with padding,",
            f"Lower the limit of a pass ({limits}){more}.",
        )

    def _micro_batches(self, experience: Experience) -> list[slice | None]:
        """The rows of each pass. All ranks make as many passes: None is one without any weight.

        Sharded parameters are gathered by all ranks together, so a rank that finished early would leave the others
        waiting in their next forward pass.
        """
        is_packed = not packed_scoring_problem(self.actor) and (self.critic is None or packs(self.critic))
        costs = row_tokens(experience.sequences, experience.attention_mask, is_packed=is_packed)
        parts: list[slice | None] = [
            *row_parts(
                costs, max_tokens=self.train_settings.micro_batch_tokens, max_rows=self.train_settings.micro_batch_size
            )
        ]
        passes = StepNumbers()
        passes.largest("passes", torch.tensor(len(parts)))
        num_passes = int(passes.joined(self.strategy.all_gather).maxima["passes"])
        return parts + [None] * (num_passes - len(parts))

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


def _with_some_row(experience: Experience) -> Experience:
    """The same samples, or one of zeros of which no token counts if there is none: every rank makes a pass."""
    if experience.num_samples > 0:
        return experience
    rows = {name: tensor.new_zeros(1, *tensor.shape[1:]) for name, tensor in experience.tensors()}
    rows["attention_mask"] = torch.ones_like(rows["sequences"])
    rows["action_mask"] = torch.zeros_like(rows["action_log_probs"], dtype=torch.bool)
    if experience.temperatures is not None:
        rows["temperatures"] = torch.ones_like(rows["temperatures"])
    return dataclasses.replace(experience, **rows)


def _hand_back(prepared: Experience, given: Experience) -> None:
    """Leave what `prepare` wrote on the batch that was given, for the epochs to come: ranks ask together, or never."""
    if prepared is given or prepared.proximal_log_probs is None:
        return
    for name in PREPARED_FIELDS:
        tensor = getattr(prepared, name)
        if tensor is not None:
            setattr(given, name, tensor[: given.num_samples, : given.num_actions])


def _part_of(experience: Experience, rows: slice | None) -> Experience:
    """The rows of one pass; None gives one row of which no token counts."""
    if rows is not None:
        return experience.select(rows)
    part = experience.select(_FIRST)
    return dataclasses.replace(part, action_mask=torch.zeros_like(part.action_log_probs, dtype=torch.bool))


def _targets(experience: Experience) -> Tensor:
    """What the critic should have said, [B, A]."""
    return experience.advantages + experience.values if experience.returns is None else experience.returns

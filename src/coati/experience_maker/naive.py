"""The reference maker: generate, score, penalise by KL, estimate advantages. One step after the other.

Reward functions alone run beside the rest. So a batch can be begun (everything that needs the models) and finished
later, when its scores are there, with the next one begun in between.
"""

import dataclasses
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from coati.algos import kl_estimate
from coati.config import AlgorithmSettings
from coati.errors import ConfigError, RewardError
from coati.experience import Experience
from coati.experience_maker.advantage_estimates import estimate_advantages
from coati.experience_maker.base import ExperienceMaker
from coati.experience_maker.dropping import (
    DROPPED_PROMPT_TOO_LONG,
    AllSamplesDropped,
    NoSignal,
    without_bad_rewards,
    without_equal_scores,
)
from coati.experience_maker.model_scores import (
    GapWatch,
    LogprobGap,
    action_values,
    reward_models_beside,
    score_with_models,
)
from coati.experience_maker.prompt_rows import PromptRows, check_groups
from coati.gpu import Aside
from coati.models import RewardModel
from coati.models.actor import unwrap
from coati.models.critic import as_critic
from coati.models.positions import context_length_of
from coati.monitor.timeline import Timeline
from coati.rewards import PendingScores, RewardScorer
from coati.rollout import GenerateOptions, Rollout, RolloutEngine, RolloutRequest, make_engine, merge_rollouts

__all__ = ["AllSamplesDropped", "NaiveExperienceMaker", "NoSignal", "action_values"]

logger = logging.getLogger(__name__)

_NO_LIMIT = 1 << 62


@dataclasses.dataclass(frozen=True)
class UnfinishedExperience:
    """Experience that lacks its advantages and, where scores are still on their way, its rewards."""

    experience: Experience
    scores: PendingScores | None = None
    """None: the rewards are there."""


class NaiveExperienceMaker(ExperienceMaker):
    """Makes experience with one pass of each model.

    Samples that cannot be trained on (a prompt that leaves no room in the context, a reward that is not a
    finite number) are dropped and counted in `dropped`; the experience then has fewer rows than the batch.
    Where the algorithm compares the samples of a prompt, a group that lost one is dropped whole.

    `algorithm` says how advantages are made and where the KL penalty goes; `kl_coef`, `gamma` and `lam` are short for
    its settings of the same name. Algorithms without a critic take None for it.
    """

    def __init__(
        self,
        actor: nn.Module,
        critic: nn.Module | None,
        reward_model: Any,
        initial_model: nn.Module,
        kl_coef: float = 0.1,
        gamma: float = 1.0,
        lam: float = 0.95,
        *,
        algorithm: AlgorithmSettings | None = None,
        seed: int = 0,
        engine: RolloutEngine | str = "reference",
    ) -> None:
        self.algorithm = (algorithm or AlgorithmSettings()).with_arguments(
            "algorithm", kl_coef=("kl_coef", kl_coef, 0.1), gamma=("gamma", gamma, 1.0), lam=("lam", lam, 0.95)
        )
        if not self.algorithm.uses_critic:
            critic = None  # one that was passed all the same would only cost time
        elif critic is None:
            raise ConfigError("critic must be a model with this algorithm, got None. Pass one, or use e.g. 'grpo'.")
        else:
            critic = as_critic(critic)
        if isinstance(reward_model, PreTrainedModel):
            reward_model = RewardModel(reward_model)
        super().__init__(actor, critic, reward_model, initial_model)
        self.seed = seed
        self.engine: RolloutEngine = make_engine(engine, actor) if isinstance(engine, str) else engine
        self.policy_version = 0
        # Set to pick new weights up between tokens: commits what is pending and returns the version that serves.
        self.commit_point: Callable[[], int] | None = None
        # Set to be called between tokens, by whoever has something to do when it is ready.
        self.meanwhile: Callable[[], None] | None = None
        self.timeline = Timeline()  # exchanged by whoever keeps one for the whole actor
        self.last_logprob_gap: LogprobGap | None = None  # of the last batch
        self._gap_watch = GapWatch()
        self.dropped: Counter[str] = Counter()
        self._next_anonymous_id = 0
        for model in (actor, critic, reward_model, initial_model):
            if isinstance(model, nn.Module):
                model.eval()  # dropout would make log-probs that nobody can reproduce

    @torch.no_grad()
    def make_experience(
        self,
        input_ids: Tensor,  # [B, P]
        attention_mask: Tensor | None = None,  # [B, P]
        *,
        sample_ids: Tensor | None = None,  # [B]
        group_ids: Tensor | None = None,  # [B]
        columns: Mapping[str, Sequence[Any]] | None = None,
        **generate_kwargs: Any,
    ) -> Experience:
        """Write a response to each prompt and turn it into experience.

        `sample_ids` key the randomness (by default samples are numbered in the order they come);
        `columns` are the dataset's further columns, which reach the reward. Raises AllSamplesDropped if no
        sample of the batch can be trained on.
        """
        return self.finish_experience(
            self.begin_experience(
                input_ids,
                attention_mask,
                sample_ids=sample_ids,
                group_ids=group_ids,
                columns=columns,
                **generate_kwargs,
            )
        )

    @torch.no_grad()
    def begin_experience(
        self,
        input_ids: Tensor,  # [B, P]
        attention_mask: Tensor | None = None,  # [B, P]
        *,
        sample_ids: Tensor | None = None,  # [B]
        group_ids: Tensor | None = None,  # [B]
        columns: Mapping[str, Sequence[Any]] | None = None,
        **generate_kwargs: Any,
    ) -> UnfinishedExperience:
        """All of `make_experience` that needs the models; reward functions have begun, and may still run."""
        options = GenerateOptions.parse(**generate_kwargs).with_tokenizer(getattr(self.reward_model, "tokenizer", None))
        prompts = PromptRows.checked(
            input_ids, attention_mask, sample_ids, group_ids, columns or {}, first_id=self._next_anonymous_id
        )
        if sample_ids is None:
            self._next_anonymous_id += len(prompts.sample_ids)
        if self.algorithm.uses_groups:
            check_groups(group_ids)
        prompts.to_device(next(self.actor.parameters()).device)
        prompts = self._without_overlong(prompts, options)
        with self.timeline.span("generate"):
            rollout = self._generate(prompts, options)
        temperatures = torch.full_like(prompts.sample_ids, options.sampling_temperature, dtype=torch.float32)
        with self.timeline.span("score"):
            return self._score(prompts, rollout, temperatures)

    @torch.no_grad()
    def finish_experience(self, unfinished: UnfinishedExperience) -> Experience:
        """The rest, without the models: wait for the scores, drop bad ones, estimate advantages."""
        experience = unfinished.experience
        if (scores := unfinished.scores) is not None:
            if not scores.is_ready:
                with self.timeline.span("wait_rewards"):
                    scores.wait(math.inf)
            experience.reward = self._checked_scores(scores(), experience.sequences)
        with self.timeline.span("score"):
            return self._with_advantages(experience)

    def _with_advantages(self, experience: Experience) -> Experience:
        experience = without_bad_rewards(experience, self.dropped, in_whole_groups=self.algorithm.uses_groups)
        if self.algorithm.dynamic_sampling:
            experience = without_equal_scores(experience, self.dropped)
        experience.advantages = estimate_advantages(
            self.algorithm.advantages,
            scores=experience.reward,
            kl=experience.kl,
            values=experience.values,
            mask=experience.full_action_mask(),
            group_ids=experience.group_ids,
            kl_coef=self.algorithm.kl_reward_coef,
            gamma=self.algorithm.gamma,
            lam=self.algorithm.lam,
        )
        return experience

    def _without_overlong(self, prompts: PromptRows, options: GenerateOptions) -> PromptRows:
        """Drop prompts that leave no room for a single new token."""
        fits = self._room(prompts, options) >= 1
        num_dropped = int((~fits).sum())
        if num_dropped == 0:
            return prompts
        self.dropped[DROPPED_PROMPT_TOO_LONG] += num_dropped
        longest = int(prompts.attention_mask.sum(dim=1).max())
        message = (
            f"{num_dropped} of {len(fits)} prompts leave no room for a response (longest {longest} tokens; "
            f"context {context_length_of(unwrap(self.actor))}, max_length {options.max_length})"
        )
        if not bool(fits.any()):
            raise AllSamplesDropped(f"{message}. Shorten the prompts or raise max_length.")
        logger.warning("%s; dropped", message)
        return prompts.select(fits)

    def _room(self, prompts: PromptRows, options: GenerateOptions) -> Tensor:
        """How many new tokens each prompt may get, [B]: options and the model's context."""
        lengths = prompts.attention_mask.sum(dim=1)
        limits = torch.tensor([options.new_token_limit(length) for length in lengths.tolist()], device=lengths.device)
        return torch.minimum(limits, self._context_room(prompts))

    def _context_room(self, prompts: PromptRows) -> Tensor:
        """How many new tokens fit the model's context after each prompt, [B]."""
        context = context_length_of(unwrap(self.actor))
        lengths = prompts.attention_mask.sum(dim=1)
        return torch.full_like(lengths, _NO_LIMIT) if context is None else context - lengths

    def _generate(self, prompts: PromptRows, options: GenerateOptions) -> Rollout:
        """Generate, and give each response its own room: one long prompt does not cut its neighbours short.

        A call may run past the room of some rows, whose responses are cut afterwards, but never past the end
        of the model's context: prompts that come near it are grouped into calls that stop in time.
        """
        room = self._room(prompts, options)
        steps = torch.minimum(room.max(), self._context_room(prompts))
        parts = [steps == count for count in sorted(set(steps.tolist()))]
        rollouts = []
        for rows in parts:
            part = prompts.select(rows)
            rollouts.append(
                self.engine.generate(
                    RolloutRequest(
                        input_ids=part.input_ids,
                        attention_mask=part.attention_mask,
                        sample_ids=part.sample_ids,
                        seed=self.seed,
                        options=options,
                        max_new_tokens=int(room[rows].max()),
                        version=self.policy_version,
                        commit_point=self._between_tokens if self.commit_point or self.meanwhile else None,
                    )
                )
            )
        whole = rollouts[0] if len(rollouts) == 1 else merge_rollouts(rollouts, parts, prompts.input_ids.shape[1])
        return whole.shortened(room)

    def _between_tokens(self) -> int:
        """Whatever the commit point brings is what this maker serves from here on."""
        if self.meanwhile is not None:
            self.meanwhile()
        if self.commit_point is not None:
            self.policy_version = self.commit_point()
        return self.policy_version

    def _score(self, prompts: PromptRows, rollout: Rollout, temperatures: Tensor) -> UnfinishedExperience:
        """All the forward passes, with reward functions beside them, and the arithmetic on top."""
        sequences, attention_mask, action_mask = (
            rollout.sequences,
            rollout.attention_mask,
            rollout.action_mask,
        )
        scores = self._begin_rewards(sequences, attention_mask, action_mask, prompts.columns)
        aside = Aside(sequences.device)
        # The engine drew the tokens by these log-probs, so they are the policy's, whatever a second pass would say.
        logprobs = rollout.rollout_log_probs
        reward_models = self._reward_models_at_hand(scores)
        reference_logprobs, values, rewards = score_with_models(
            self.initial_model,
            self.critic,
            sequences,
            attention_mask,
            action_mask,
            temperatures,
            reward_models=reward_models,
        )
        with aside.used():  # a pass that takes the host longer than the GPU, which has the others to do meanwhile
            self.last_logprob_gap = self._gap_watch.look(self.actor, rollout, temperatures, version=self.policy_version)
        kl = kl_estimate(logprobs, reference_logprobs, action_mask, kind=self.algorithm.kl_estimator)
        experience = Experience(
            sequences=sequences,
            action_log_probs=logprobs,
            values=values,
            reward=values.new_zeros(len(values)),  # until the scores are there
            kl=kl,
            advantages=torch.zeros_like(values),  # estimated when it is known which samples stay
            attention_mask=attention_mask,
            action_mask=action_mask,
            sample_ids=prompts.sample_ids,
            group_ids=prompts.group_ids,
            policy_versions=rollout.token_versions.clone(),
            temperatures=temperatures,
            reference_log_probs=(
                reference_logprobs.masked_fill(~action_mask, 0.0) if self.algorithm.kl_in == "loss" else None
            ),
        )
        if isinstance(scores, PendingScores) and scores.is_beside:
            return UnfinishedExperience(experience, scores)
        # By models, which are ours only for now.
        ready: dict[nn.Module, Tensor] = dict(zip(reward_models, rewards.unbind(1), strict=True))
        experience.reward = self._checked_scores(scores(ready), sequences)
        return UnfinishedExperience(experience)

    def _begin_rewards(
        self,
        sequences: Tensor,
        attention_mask: Tensor,
        action_mask: Tensor,
        columns: Mapping[str, Sequence[Any]],
    ) -> Callable[[Mapping[nn.Module, Tensor]], Any]:
        """Let a function begin to score. What is returned waits for it or asks models, but for those that are ready."""
        if not isinstance(self.reward_model, RewardScorer):
            return lambda ready: (
                ready[self.reward_model]
                if isinstance(self.reward_model, nn.Module) and self.reward_model in ready
                else self.reward_model(sequences, attention_mask)
            )
        arguments = (sequences, attention_mask, action_mask, columns)
        if type(self.reward_model).__call__ is not RewardScorer.__call__:
            return lambda _: self.reward_model(*arguments)  # a subclass that does something else
        scores = self.reward_model.begin(*arguments)
        return scores if isinstance(scores, PendingScores) else lambda _: scores()  # or that begins otherwise

    def _reward_models_at_hand(self, scores: Callable[..., Any]) -> list[RewardModel]:
        """Reward models that are best asked with the other models, a part of the batch at a time."""
        models: Sequence[nn.Module] = ()
        if isinstance(scores, PendingScores) and not scores.is_beside:
            models = self.reward_model.models
        elif isinstance(self.reward_model, RewardModel):
            models = (self.reward_model,)
        return reward_models_beside(self.initial_model, models)

    def _checked_scores(self, output: Any, sequences: Tensor) -> Tensor:
        scores = output["logits"] if isinstance(output, Mapping) else output
        if not isinstance(scores, Tensor) or scores.numel() != sequences.shape[0]:
            came = f"shape {list(scores.shape)}" if isinstance(scores, Tensor) else type(scores).__name__
            raise RewardError(
                f"the reward model {type(self.reward_model).__name__} must return one score for each of "
                f"{sequences.shape[0]} sequences, got {came}. Return a tensor [B]."
            )
        return scores.reshape(-1).float().to(sequences.device)

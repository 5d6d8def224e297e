"""The standard experience maker: generate, score, apply the KL penalty, estimate advantages.

start_samples ──► generate_tokens, … ──► score_complete ──► finalize
submit to         the next tokens        complete groups    wait for rewards,
the engine        of all samples                            estimate advantages
"""

import contextlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from coati.algos.advantages import has_signal
from coati.algos.losses import kl_estimate
from coati.batching import columns_of
from coati.config import AlgorithmSettings, RolloutSettings
from coati.devices import device_errors_explained
from coati.errors import ConfigError, DataError
from coati.experience import Experience, Sample
from coati.experience_maker.base import MEMORY_REMEDY, AllSamplesDropped, ExperienceMaker, MakerBatch, with_ids
from coati.experience_maker.scoring import GapWatch, NoSignal, estimate_advantages, keep_scored, logprobs_of, values_of
from coati.models import RewardModel, as_critic
from coati.models.actor import unwrap
from coati.models.calls import context_length_of
from coati.monitor.metrics import Sum
from coati.monitor.timeline import Timeline
from coati.prompts.batch import parse_prompts
from coati.rewards import ModelReward, RewardScorer
from coati.rollout import GenerateOptions, RolloutEngine, join_samples, make_engine, with_limits

logger = logging.getLogger(__name__)


class NaiveExperienceMaker(ExperienceMaker):
    """Makes experience with continuous batching: scores complete groups while it generates the others.

    Samples that cannot be trained on (no room for a response, a reward that is not finite) are dropped with a warning;
    algorithms that compare the samples of a prompt drop the whole group. If the reward fails on a sample, its group is
    quarantined, up to the scorer's `max_quarantined`.

    `kl_coef`, `gamma` and `lam` are shorthand for the settings of `algorithm` with these names. `critic` may be None
    for algorithms without a critic, and `initial_model` may be None without a KL penalty; the KL is then 0.
    """

    def __init__(
        self,
        actor: nn.Module,
        critic: nn.Module | None,
        reward_model: Any,
        initial_model: nn.Module | None,
        kl_coef: float = 0.1,
        gamma: float = 1.0,
        lam: float = 0.95,
        *,
        algorithm: AlgorithmSettings | None = None,
        seed: int = 0,
        engine: RolloutEngine | RolloutSettings | str = "reference",
    ) -> None:
        self.algorithm = (algorithm or AlgorithmSettings()).with_arguments(
            "algorithm", kl_coef=("kl_coef", kl_coef, 0.1), gamma=("gamma", gamma, 1.0), lam=("lam", lam, 0.95)
        )
        if not self.algorithm.uses_critic:
            critic = None  # its values would not be used
        elif critic is None:
            raise ConfigError(
                "critic must be a model for this algorithm, got None. Pass a model, or use an algorithm without a "
                "critic, such as 'grpo'."
            )
        else:
            critic = as_critic(critic)
        if initial_model is None and self.algorithm.kl_coef:
            raise ConfigError(
                "initial_model must be a model if algorithm.kl_coef is above 0, got None. Pass a model, or set "
                "algorithm.kl_coef = 0."
            )
        if isinstance(reward_model, PreTrainedModel):
            reward_model = RewardModel(reward_model)
        super().__init__(actor, critic, reward_model, initial_model)
        self.seed = seed
        self.engine = make_engine(engine, actor) if isinstance(engine, str | RolloutSettings) else engine
        """The engine that generates responses."""
        self.timeline = Timeline()
        self.after_last_use: Callable[[], None] = lambda: None
        """Called during `score_complete` when it has no more use for the actor and the critic."""
        self._samples: dict[int, Sample] = {}  # by id, in the order of submission
        self._generating: set[int] = set()  # ids of the samples that have no response yet
        self._units: dict[int, list[int]] = {}  # unit -> ids of its samples, which are scored together
        self._complete: set[int] = set()  # complete units
        self._num_without_signal = 0  # samples not yet reported
        self._gap_watch = GapWatch()
        self._next_sample_id = 0
        for model in (actor, critic, reward_model, initial_model):
            if isinstance(model, nn.Module):
                model.eval()  # dropout would make log-probs irreproducible

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
        """Generate a response to each prompt and score it.

        `sample_ids` key the random draws (default: consecutive numbers). `columns` are passed to the reward. Raises
        AllSamplesDropped if no sample can be trained on.
        """
        ids = {"attention_mask": attention_mask, "sample_ids": sample_ids, "group_ids": group_ids}
        samples = parse_prompts({"input_ids": input_ids, **ids, **(columns or {})})
        if sample_ids is None:
            samples = with_ids(samples, self._next_sample_id)
            self._next_sample_id += len(samples)
        self.start_samples(samples, **generate_kwargs)
        while self.num_generating:
            self.generate_tokens()
        batch = self.score_complete()
        if batch.drop_error is not None:
            raise batch.drop_error
        self.finalize(batch)
        assert batch.experience is not None
        return batch.experience

    @property
    def num_complete(self) -> int:
        """Number of samples in complete units, which are ready to be scored."""
        return sum(len(self._units[unit]) for unit in self._complete)

    @property
    def num_generating(self) -> int:
        """Number of samples that have no response yet."""
        return len(self._generating)

    @property
    def num_in_progress(self) -> int:
        """Number of samples that were started and not yet scored."""
        return len(self._samples)

    @property
    def room(self) -> int:
        """Number of samples that the engine can start now."""
        return self.engine.room

    def start_samples(self, samples: Sequence[Sample], **generate_kwargs: Any) -> None:
        """Submit samples whose prompt leaves room for a response to the engine. Units already present start over."""
        tokenizer = getattr(self.reward_model, "tokenizer", None)
        options = GenerateOptions.parse(**generate_kwargs).with_tokenizer(tokenizer)
        if self.algorithm.uses_groups:
            _check_groups(samples)
        is_grouped = self.algorithm.uses_groups
        samples = with_limits(samples, options, model=self.actor, seed=self.seed)
        for sample in samples:
            sample.unit = sample.group if is_grouped and sample.group is not None else sample.id
        for unit in {sample.unit for sample in samples} & self._units.keys():
            self._forget(unit)
        for sample in samples:
            self._samples[sample.id] = sample
            self._units.setdefault(sample.unit, []).append(sample.id)
        self._generating |= {sample.id for sample in samples if sample.limit > 0}
        self._complete |= {sample.unit for sample in samples if self._is_complete(sample.unit)}
        if short := [len(sample.tokens) for sample in samples if sample.limit < 1]:
            logger.warning(
                "dropped %d of %d prompts: no room for a response (longest %d tokens; context %s, max_length %s)",
                len(short), len(samples), max(short), context_length_of(unwrap(self.actor)), options.max_length,
            )  # fmt: skip
        if len(short) < len(samples):
            with self._using_engine():  # allocating memory may fail
                self.engine.submit([sample for sample in samples if sample.limit > 0])

    @torch.no_grad()
    def generate_tokens(self) -> None:
        """Generate the next few tokens of each response."""
        with self._using_engine():
            self.engine.commit(self.policy_version)
            for sample in self.engine.advance():
                self._samples[sample.id] = sample
                self._generating.discard(sample.id)
                if self._is_complete(sample.unit):
                    self._complete.add(sample.unit)

    @contextlib.contextmanager
    def _using_engine(self) -> Iterator[None]:
        """Explain device errors, and discard all units after any error."""
        try:
            with device_errors_explained(f"generating {self.num_generating} responses", MEMORY_REMEDY):
                yield
        except BaseException:
            for unit in list(self._units):
                self._forget(unit)
            raise

    def _is_complete(self, unit: int) -> bool:
        return self._generating.isdisjoint(self._units[unit])

    def _forget(self, unit: int) -> None:
        if unit not in self._complete:
            self.engine.cancel(self._units[unit])
        self._complete.discard(unit)
        self._generating.difference_update(self._units[unit])
        for one in self._units.pop(unit):
            self._samples.pop(one, None)  # ids in a unit may repeat, which engines refuse

    @torch.no_grad()
    def score_complete(self) -> MakerBatch:
        """Score all complete units in one pass. Reward functions may still be running when this returns."""
        batch = MakerBatch([sample for sample in self._samples.values() if sample.unit in self._complete])
        for unit in list(self._complete):
            self._forget(unit)
        written = [sample for sample in batch.samples if sample.limit > 0]
        for sample in batch.samples:
            sample.drop_reason = "" if sample.limit > 0 else "no room for a response"
        if not written:
            count = len(batch.samples)
            batch.drop_error = AllSamplesDropped(
                f"{count} of {count} prompts leave no room for a response (context "
                f"{context_length_of(unwrap(self.actor))}). Shorten the prompts or raise max_length."
            )
            return batch
        batch.experience = experience = join_samples(written, self.actor)
        what = f"scoring {len(written)} sequences of up to {experience.sequences.shape[1]} tokens"
        with self.timeline.span("score"), device_errors_explained(what, MEMORY_REMEDY):
            self._score(batch, experience, columns_of(written))
        return batch

    @torch.no_grad()
    def finalize(self, batch: MakerBatch) -> None:
        """Wait for the scores, drop samples without a finite one, and estimate advantages."""
        experience = batch.experience
        assert experience is not None
        if batch.scores is not None and not batch.is_ready:
            with self.timeline.span("wait_rewards"):
                batch.scores.wait(math.inf)
        with self.timeline.span("score"):
            batch.take_scores()
            experience = keep_scored(batch, self.algorithm)
            if self.algorithm.dynamic_sampling:
                experience = self._keep_signal(batch, experience)
                batch.metrics["maker/no_signal"] = Sum(self._num_without_signal)
                self._num_without_signal = 0
            experience.advantages, experience.returns = estimate_advantages(experience, self.algorithm)

    def _keep_signal(self, batch: MakerBatch, experience: Experience) -> Experience:
        """Apply dynamic sampling: drop groups whose samples all have the same score, so their advantages are 0."""
        assert experience.group_ids is not None
        teaches = has_signal(experience.reward, experience.group_ids)
        self._num_without_signal += int((~teaches).sum())
        experience = batch.keep(teaches, "all samples scored the same")
        if not bool(teaches.any()):
            raise NoSignal(
                f"all {len(teaches)} samples of a batch scored the same as the other samples of their prompt, so "
                "dynamic sampling dropped them. Use prompts that are neither too easy nor too hard, use more samples "
                "per prompt, or set algorithm.dynamic_sampling = false."
            )
        return experience

    def _score(self, batch: MakerBatch, experience: Experience, columns: Mapping[str, Sequence[Any]]) -> None:
        """Run the forward passes, with reward functions in the background, and compute values and KL.

        The policy's log-probs are the engine's: the tokens were sampled with them, so no second pass is needed.
        """
        scorer = self.reward_model
        if not isinstance(scorer, RewardScorer):
            scorer = RewardScorer(ModelReward(scorer), tokenizer=None)
        tokens, temperatures = experience.tokens_and_masks(), experience.temperatures
        assert temperatures is not None
        batch.scores = scorer.begin(*tokens, columns)
        experience.values = values_of(self.critic, tokens)
        batch.metrics |= self._gap_watch.measure(self.actor, experience, version=self.policy_version)
        self.after_last_use()
        if self.initial_model is not None:
            references, mask = logprobs_of(self.initial_model, tokens, temperatures), tokens[-1]
            experience.kl = kl_estimate(experience.action_log_probs, references, mask, kind=self.algorithm.kl_estimator)
            if self.algorithm.kl_in == "loss":
                experience.reference_log_probs = references.masked_fill(~mask, 0.0)
        if not scorer.reward.is_host_work:  # a reward model must run before the next batch uses the GPU
            batch.take_scores()


def _check_groups(samples: Sequence[Sample]) -> None:
    """Raise DataError if any group has fewer than two samples, or if there are no groups."""
    sizes = list(Counter(sample.group for sample in samples if sample.group is not None).values())
    if not sizes or min(sizes) < 2:
        came = f"{sizes.count(1)} of {len(sizes)} groups with only one sample" if sizes else "no group_ids"
        raise DataError(
            "this algorithm compares the samples of a prompt, so a batch needs at least two samples per prompt, with "
            f"equal group_ids, got {came}."
        )

"""The maker of a run: generate, score, penalise by KL, estimate advantages.

submit ──► write, write … ──► score ──► finish
samples    the engine's       complete  rewards have come:
           next tokens        groups    advantages
"""

import contextlib
import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
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
from coati.experience_maker.base import LESS_TO_MAKE, AllSamplesDropped, ExperienceMaker, MakerBatch, numbered
from coati.experience_maker.scoring import (
    GapWatch,
    NoSignal,
    estimate_advantages,
    keep_scored,
    score_with_models,
)
from coati.models import RewardModel, as_critic
from coati.models.actor import unwrap
from coati.models.calls import context_length_of
from coati.monitor.metrics import Sum
from coati.monitor.timeline import Timeline
from coati.prompts.batch import parse_prompts
from coati.rewards import ModelReward, RewardScorer
from coati.rollout import GenerateOptions, RolloutEngine, join_samples, make_engine, prepared

logger = logging.getLogger(__name__)


class NaiveExperienceMaker(ExperienceMaker):
    """Makes experience: scores groups that are complete, in passes, while others are still written.

    Samples that cannot be trained on (a prompt that leaves no room, a reward that is not finite) are dropped with a
    warning, with their whole group where samples of a prompt are compared. A group with a sample on which the reward
    fails goes into quarantine, if the scorer's `max_quarantined` allows it.

    `kl_coef`, `gamma` and `lam` are short for the settings of `algorithm` of the same name. Algorithms without a critic
    take None for it, those without a KL penalty None for the initial model; the KL is then 0.
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
            critic = None  # it would only cost time
        elif critic is None:
            raise ConfigError("critic must be a model with this algorithm, got None. Pass one, or use e.g. 'grpo'.")
        else:
            critic = as_critic(critic)
        if initial_model is None and self.algorithm.kl_coef:
            raise ConfigError("initial_model must be a model while algorithm.kl_coef is above 0, got None. Pass one.")
        if isinstance(reward_model, PreTrainedModel):
            reward_model = RewardModel(reward_model)
        super().__init__(actor, critic, reward_model, initial_model)
        self.seed = seed
        self.engine = make_engine(engine, actor) if isinstance(engine, str | RolloutSettings) else engine
        """What writes the responses."""
        self.timeline = Timeline()
        self._samples: dict[int, Sample] = {}  # by id, in the order in which they were submitted
        self._units: dict[int, list[int]] = {}  # ids of the samples that are scored together
        self._written: set[int] = set()  # units that are complete
        self._num_without_signal = 0  # not yet reported
        self._gap_watch = GapWatch()
        self._next_sample_id = 0
        for model in (actor, critic, reward_model, initial_model):
            if isinstance(model, nn.Module):
                model.eval()  # with dropout, log-probs could not be reproduced

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
        """Write a response to each prompt and turn it into experience; AllSamplesDropped if none can be trained on.

        `sample_ids` key the randomness (by default the order in which samples come); `columns` reach the reward.
        """
        ids = {"attention_mask": attention_mask, "sample_ids": sample_ids, "group_ids": group_ids}
        samples = parse_prompts({"input_ids": input_ids, **ids, **(columns or {})})
        if sample_ids is None:
            samples = numbered(samples, self._next_sample_id)
            self._next_sample_id += len(samples)
        self.submit(samples, **generate_kwargs)
        while self.num_writing:
            self.write()
        batch = self.score()
        if batch.dropped is not None:
            raise batch.dropped
        self.finish(batch)
        assert batch.experience is not None
        return batch.experience

    @property
    def num_written(self) -> int:
        """Samples of complete units, which wait to be scored."""
        return sum(len(self._units[unit]) for unit in self._written)

    @property
    def num_writing(self) -> int:
        """Samples of units that are not complete."""
        return len(self._samples) - self.num_written

    @property
    def room(self) -> int:
        """How many samples the engine can begin now."""
        return self.engine.room

    def submit(self, samples: Sequence[Sample], **generate_kwargs: Any) -> None:
        """Have a response written to each prompt that leaves room for one; units that are there are made again."""
        tokenizer = getattr(self.reward_model, "tokenizer", None)
        options = GenerateOptions.parse(**generate_kwargs).with_tokenizer(tokenizer)
        if self.algorithm.uses_groups:
            _check_groups(samples)
        is_grouped = self.algorithm.uses_groups
        units = [sample.group if is_grouped and sample.group is not None else sample.id for sample in samples]
        samples = [
            prepared(sample, options, model=self.actor, seed=self.seed, unit=unit)
            for sample, unit in zip(samples, units, strict=True)
        ]
        for unit in {sample.unit for sample in samples} & self._units.keys():
            self._forget(unit)
        for sample in samples:
            self._samples[sample.id] = sample
            self._units.setdefault(sample.unit, []).append(sample.id)
        self._written |= {sample.unit for sample in samples if self._is_written(sample.unit)}
        if short := [len(sample.tokens) for sample in samples if sample.limit < 1]:
            logger.warning(
                "%d of %d prompts leave no room for a response (longest %d tokens; context %s, max_length %s); dropped",
                len(short), len(samples), max(short), context_length_of(unwrap(self.actor)), options.max_length,
            )  # fmt: skip
        if len(short) < len(samples):
            with self._generating():  # an engine makes room for them
                self.engine.submit([sample for sample in samples if sample.limit > 0])

    @torch.no_grad()
    def write(self) -> None:
        """Write a few tokens of each response."""
        with self._generating():
            self.engine.commit(self.policy_version)
            for sample in self.engine.advance():
                self._samples[sample.id] = sample
                if self._is_written(sample.unit):
                    self._written.add(sample.unit)

    @contextlib.contextmanager
    def _generating(self) -> Iterator[None]:
        """Explain errors of the device, and forget everything that is being written after any."""
        try:
            with device_errors_explained(f"generating {self.num_writing} responses", LESS_TO_MAKE):
                yield
        except BaseException:
            for unit in list(self._units):
                self._forget(unit)
            raise

    def _is_written(self, unit: int) -> bool:
        samples = (self._samples[one] for one in self._units[unit])
        return all(len(sample.response) or sample.limit < 1 for sample in samples)

    def _forget(self, unit: int) -> None:
        if unit not in self._written:
            self.engine.cancel(self._units[unit])
        self._written.discard(unit)
        for one in self._units.pop(unit):
            self._samples.pop(one, None)  # an engine refuses two of one id

    @torch.no_grad()
    def score(self) -> MakerBatch:
        """Score all complete units in one pass; reward functions are started and may still run."""
        batch = MakerBatch([sample for sample in self._samples.values() if sample.unit in self._written])
        for unit in list(self._written):
            self._forget(unit)
        written = [sample for sample in batch.samples if sample.limit > 0]
        for sample in batch.samples:
            sample.lost = "" if sample.limit > 0 else "no room for a response"
        if not written:
            count = len(batch.samples)
            batch.dropped = AllSamplesDropped(
                f"{count} of {count} prompts leave no room for a response (context "
                f"{context_length_of(unwrap(self.actor))}). Shorten the prompts or raise max_length."
            )
            return batch
        batch.experience = experience = join_samples(written, self.actor)
        what = f"scoring {len(written)} sequences of up to {experience.sequences.shape[1]} tokens"
        with self.timeline.span("score"), device_errors_explained(what, LESS_TO_MAKE):
            self._score(batch, experience, columns_of(written))
        return batch

    @torch.no_grad()
    def finish(self, batch: MakerBatch) -> None:
        """Wait for the scores, drop bad ones, estimate advantages."""
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
        """Dynamic sampling: drop groups whose samples all score the same, and so have no advantage."""
        assert experience.group_ids is not None
        teaches = has_signal(experience.reward, experience.group_ids)
        self._num_without_signal += int((~teaches).sum())
        experience = batch.keep(teaches, "all samples scored the same")
        if not bool(teaches.any()):
            raise NoSignal(
                f"all {len(teaches)} samples of a batch scored the same as the others of their prompt, so dynamic "
                "sampling dropped them. Use prompts that are neither too easy nor too hard, more samples of each, or "
                "set algorithm.dynamic_sampling = false."
            )
        return experience

    def _score(self, batch: MakerBatch, experience: Experience, columns: Mapping[str, Sequence[Any]]) -> None:
        """Run all forward passes, with reward functions in the background, and compute what follows from them.

        The engine drew the tokens by its log-probs, so they are the policy's, whatever a second pass would say.
        """
        scorer = self.reward_model
        if not isinstance(scorer, RewardScorer):
            scorer = RewardScorer(ModelReward(scorer), tokenizer=None)
        tokens, temperatures = experience.tokens_and_masks(), experience.temperatures
        assert temperatures is not None
        batch.scores = scorer.begin(*tokens, columns)
        references, experience.values = score_with_models(self.initial_model, self.critic, *tokens, temperatures)
        if references is not None:
            mask, kind = tokens[-1], self.algorithm.kl_estimator
            experience.kl = kl_estimate(experience.action_log_probs, references, mask, kind=kind)
            if self.algorithm.kl_in == "loss":
                experience.reference_log_probs = references.masked_fill(~mask, 0.0)
        batch.metrics |= self._gap_watch.measure(self.actor, experience, version=self.policy_version)
        if not batch.scores.is_in_background:  # models score now: they are free only until the next batch begins
            batch.take_scores()


def _check_groups(samples: Sequence[Sample]) -> None:
    """Raise DataError unless every sample has another of its prompt to be compared with."""
    sizes = list(Counter(sample.group for sample in samples if sample.group is not None).values())
    if not sizes or min(sizes) < 2:
        came = f"{sizes.count(1)} of {len(sizes)} groups with only one" if sizes else "no group_ids"
        raise DataError(
            "the algorithm compares the samples of a prompt, so a batch needs at least two of each, with the same "
            f"number in group_ids, got {came}."
        )

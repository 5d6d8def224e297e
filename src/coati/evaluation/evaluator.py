"""Evaluates one version of the policy on a set: samples its prompts and scores the responses.

Random draws are keyed by the set's seed and the sample's place in the set, so they are the same for all versions,
models and runs.
"""

import logging
import math
import re
import statistics
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from coati import build
from coati.batching import columns_of
from coati.config import EvalSettings, RunSettings
from coati.config.plan import read_json
from coati.devices import device_errors_explained, set_up_cpu
from coati.errors import DataError
from coati.evaluation.estimates import Estimate, estimate, prompt_values
from coati.experience import Sample
from coati.experience_maker.base import MEMORY_REMEDY
from coati.prompts.stream import PromptStream
from coati.prompts.table import looks_local
from coati.rewards import RewardScorer
from coati.rewards.function import GivenReward
from coati.rollout import GenerateOptions, RolloutEngine, generate, make_engine, with_limits

logger = logging.getLogger(__name__)

# Far from the sample ids of training, so that draws differ from those of training even with the same seed.
_FIRST_SAMPLE_ID = 1 << 50


class Evaluation(NamedTuple):
    """The result of evaluating one version on one set."""

    record: dict[str, Any]
    """The line in `evaluations.jsonl`: set, version, every metric with its interval (`_low`, `_high`), and counts."""
    samples: list[dict[str, Any]]  # grouped by prompt; `score` is None if the sample has no score
    values: dict[str, dict[int, float]]  # by metric: the value of every prompt

    @property
    def estimates(self) -> dict[str, Estimate]:
        """The metrics that have a value for at least one prompt."""
        return {name: estimate(list(values.values())) for name, values in self.values.items() if values}


class Evaluator:
    """Evaluates models on one set. Prompts and reward are loaded on first use."""

    def __init__(
        self,
        config: RunSettings,
        settings: EvalSettings,
        scorers: dict[str, RewardScorer],  # cache that evaluators share, so that sets with equal rewards use one scorer
        reward: GivenReward | None = None,  # replaces `[reward]`, for sets without a reward of their own
    ) -> None:
        self.settings = settings
        self._config = config.for_evaluation(settings)
        self._reward = reward if settings.reward == config.reward else None
        self._scorers = scorers

    @cached_property
    def _prompts(self) -> PromptStream:
        return build.make_prompts(self._config, f"[[eval]] {self.settings.name}")

    @cached_property
    def _scorer(self) -> RewardScorer:
        key = repr(self._config.reward)
        if key not in self._scorers:
            self._scorers[key] = scorer = build.make_scorer(self._config, self._reward)
            scorer.max_quarantined = max(1, scorer.max_quarantined)  # a failure leaves out one sample
        return self._scorers[key]

    def run(
        self, engine: RolloutEngine, *, version: int | None, should_stop: Callable[[], bool] = lambda: False
    ) -> Evaluation | None:
        """Sample and score the whole set; None if it was stopped. RewardError if the reward has never worked."""
        started, settings, stream = time.monotonic(), self.settings, self._prompts
        samples: list[dict[str, Any]] = []
        pending: Iterator[dict[str, Any]] = iter(())
        num_prompts = min(settings.max_prompts or len(stream.table), len(stream.table))
        for first in range(0, num_prompts, settings.rollout.prompts_per_batch):
            if should_stop():
                return None
            numbers = range(num_prompts)[first : first + settings.rollout.prompts_per_batch]
            drawn, _ = stream.batch(numbers, group_size=settings.rollout.samples_per_prompt)
            if drawn:
                batch = self._start(engine, drawn, version or 0)
                samples += pending
                pending = batch
        samples += pending
        if not samples:
            raise DataError(
                f"evaluation {settings.name!r} has no usable prompt among its first {num_prompts}. Raise its "
                "max_prompts or prompts.max_tokens, or use other prompts."
            )
        seconds = time.monotonic() - started
        return self._summary(samples, {"name": settings.name, "version": version, "seconds": seconds})

    @torch.no_grad()
    def _start(self, engine: RolloutEngine, drawn: list[Sample], version: int) -> Iterator[dict[str, Any]]:
        """Generate the samples and start to score them. The returned iterator waits for the scores."""
        options = GenerateOptions.parse(**self._config.rollout.generate_options).with_tokenizer(self._scorer.tokenizer)
        own: dict[str, Any] = {"model": engine.model, "seed": self.settings.seed, "needs_log_probs": False}
        samples = with_limits([one.changed(id=one.id + _FIRST_SAMPLE_ID) for one in drawn], options, **own)
        with device_errors_explained(f"evaluating {len(drawn)} samples of {self.settings.name!r}", MEMORY_REMEDY):
            experience = generate(engine, samples, version=version)
        tokens = experience.tokens_and_masks()
        pending, per_prompt = self._scorer.begin(*tokens, columns_of(drawn)), self.settings.rollout.samples_per_prompt
        assert experience.is_cut is not None
        columns = ([one.id for one in drawn], tokens[-1].sum(dim=1).tolist(), experience.is_cut.tolist())

        def finished() -> Iterator[dict[str, Any]]:
            scores, texts = pending().tolist(), pending.request
            remarks = pending.remarks()
            for row, (number, length, is_cut) in enumerate(zip(*columns, strict=True)):
                yield {
                    "prompt_number": number // per_prompt,
                    "sample": number % per_prompt,
                    "prompt": texts.prompts[row],
                    "response": texts.completions[row],
                    "score": scores[row] if math.isfinite(scores[row]) else None,
                    **remarks[row],
                    "error": pending.failures.get(row),
                    "tokens": length,
                    "is_cut": is_cut,
                }

        return finished()

    def _summary(self, samples: list[dict[str, Any]], record: dict[str, Any]) -> Evaluation:
        settings, scores = self.settings, dict[int, list[float]]()
        for sample in samples:
            scores.setdefault(sample["prompt_number"], []).extend([sample["score"]] * (sample["score"] is not None))
        per_prompt, pass_score = settings.rollout.samples_per_prompt, settings.pass_score
        values = prompt_values(scores, per_prompt, settings.ks, pass_score=pass_score)
        found = Evaluation(record, samples, values)
        for name, (mean, low, high) in found.estimates.items():
            record[name] = mean
            if math.isfinite(low):
                record |= {f"{name}_low": low, f"{name}_high": high}
        record |= {
            "prompts": len(scores),
            "samples": len(samples),
            "unscored": (num_unscored := sum(sample["score"] is None for sample in samples)),
            "response_length": statistics.fmean(sample["tokens"] for sample in samples),
            "cut_fraction": statistics.fmean(sample["is_cut"] for sample in samples),
        }
        if num_unscored:
            errors = [sample["error"] for sample in samples if sample["error"]]
            logger.error(
                "evaluation %r of version %s: %d of %d samples have no score and are left out of the metrics: %s",
                *(settings.name, record["version"], num_unscored, len(samples)),
                f"the reward failed on {len(errors)}, first: {errors[0]}" if errors else "the reward returned none",
            )
        return found


def evaluate_model(config: RunSettings, path: str) -> list[Evaluation]:
    """Evaluate the model in a folder, or on the hub, on all sets of the settings.

    The version in the results is that of the run that saved the model, 0 for `model.path`, and None for other models.
    """
    set_up_cpu(build.threads_per_actor(config))

    def has(file: str) -> bool:
        return not looks_local(path) or (Path(path) / file).is_file()

    own = {"tokenizer": config.model.tokenizer or (path if has("tokenizer_config.json") else config.tokenizer_path)}
    if has("config.json"):  # otherwise it has adapters only
        own["path"] = path
    version = _version_of(Path(path), 0 if path == config.model.path else None)
    config = config.model_copy(update={"model": config.model.model_copy(update=own)})
    engine = make_engine(config.rollout, build.load_actor(config, path))
    scorers: dict[str, RewardScorer] = {}
    found = [Evaluator(config, one, scorers).run(engine, version=version) for one in config.eval]
    return [evaluation for evaluation in found if evaluation is not None]


def _version_of(folder: Path, otherwise: int | None) -> int | None:
    """Return the version of a saved model: a run's final or best one, or a checkpoint."""
    known = read_json(folder / "coati.json") or read_json(folder / "evaluation.json") or {}
    checkpoint = re.fullmatch(r"version-(\d+)", folder.name)
    return known.get("version", int(checkpoint[1]) if checkpoint else otherwise)

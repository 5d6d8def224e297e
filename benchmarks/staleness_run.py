"""One run of `benchmarks/staleness.py`: a maker that is as far ahead of its trainer as η allows, in one process."""

import dataclasses
import hashlib
import json
import statistics
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from coati import run
from coati.cli.train import quiet_libraries
from coati.config import RunSettings, build_config
from coati.demo.evaluation import evaluate
from coati.demo.grammar import PROMPTS
from coati.experience_buffer import BufferItem, make_experience_batch, split_experience_batch
from coati.experience_maker import Experience, NaiveExperienceMaker
from coati.experience_maker.base import PromptBatch
from coati.experience_maker.pipeline import ExperiencePipeline
from coati.ledger import ages_of
from coati.peers import LocalPeers
from coati.trainer.fit_loop import FitLoop, FitSteps
from coati.trainer.ppo import PPOLearner
from coati.weights import Recipients, ServedModels, WeightReceiver, WeightSender

NUM_EVALUATED = 256
NO_CAP = 1e9  # a cap that no weight of these runs reaches: `ratio_max` in runs.jsonl shows it

METHODS: dict[str, dict[str, Any]] = {
    "naive": {"correction": "none"},
    "decoupled": {"correction": "decoupled", "importance": "truncate", "importance_cap": NO_CAP},
    "truncated": {"correction": "decoupled", "importance": "truncate", "importance_cap": 2.0},
    "vtrace": {
        "correction": "decoupled",
        "importance": "truncate",
        "importance_cap": 2.0,
        "estimator": "vtrace",
    },
}

# Further variants, run when asked for by name.
MORE_METHODS: dict[str, dict[str, Any]] = {
    "sequence": {"correction": "decoupled", "importance_level": "sequence", "importance_cap": 2.0},
    "masked": {"correction": "decoupled", "importance": "mask", "importance_cap": 2.0},
    "unweighted": {"correction": "decoupled", "importance": "none"},
    "naive_kl_loss": {"correction": "none", "kl_in": "loss", "kl_estimator": "k2"},
    "truncated_kl_loss": {"correction": "decoupled", "importance_cap": 2.0, "kl_in": "loss", "kl_estimator": "k2"},
}

SETTINGS: dict[str, dict[str, Any]] = {
    "tame": {"total_steps": 80, "actor_lr": 3e-4, "critic_lr": 1e-3},
    "demo": {"total_steps": 80, "actor_lr": 1e-3, "critic_lr": 1e-3},
    "harsh": {"total_steps": 40, "actor_lr": 1e-3, "critic_lr": 1e-3, "epochs": 4},
}
BATCH_SIZE = 64
KL_COEF = 0.05


@dataclasses.dataclass(frozen=True, order=True)
class Cell:
    """One run of the grid."""

    setting: str
    method: str
    eta: int
    seed: int

    def __str__(self) -> str:
        return f"{self.setting} {self.method} η={self.eta} seed {self.seed}"


def make_config(cell: Cell, base: str, prompts: str) -> RunSettings:
    return build_config(
        {
            "run": {"name": "staleness", "seed": cell.seed},
            "model": {"path": base, "device": "cpu"},
            "prompts": {"path": prompts},
            "reward": {"function": "coati.demo.reward:film_sentiment"},
            "rollout": {"prompts_per_batch": BATCH_SIZE, "max_new_tokens": 16},
            "algorithm": {"kl_coef": KL_COEF, **(METHODS | MORE_METHODS)[cell.method]},
            "train": {"batch_size": BATCH_SIZE, "warmup_steps": 2, **SETTINGS[cell.setting]},
            "topology": {"max_staleness": cell.eta, "threads_per_actor": 1},
        }
    )


def recipe_of(cell: Cell) -> str:
    """Names everything that decides a run's outcome but the code and the machine."""
    config = make_config(cell, "base", "prompts.jsonl")
    recipe = {"config": config.model_dump(mode="json"), "prompts": PROMPTS, "num_evaluated": NUM_EVALUATED}
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:16]


class StaleRun(FitSteps):
    """One maker and one trainer in one process; the maker runs as far ahead as η allows."""

    def __init__(self, config: RunSettings) -> None:
        self._config = config
        self._version = 0
        strategy = run.make_strategy(config, "trainer")
        self.learner = PPOLearner(
            *run.trainer_models(config),
            strategy,
            config.train,
            config.algorithm,
            max_staleness=config.topology.max_staleness,
        )
        self._pipeline = self._make_pipeline()
        maker = SimpleNamespace(update_experience_maker=WeightReceiver(self._pipeline.served).receive)
        recipients = Recipients(LocalPeers(maker=maker), ["maker"], config.deadlines)
        self._sender = WeightSender(
            self.learner.models, strategy, recipients, config.topology, timeline=self._pipeline.timeline
        )
        self._items: list[BufferItem] = []
        self._waiting: deque[Experience] = deque()
        self._prompts = iter(run.make_prompts(config))
        self._num_made = 0
        self.rewards_by_version: dict[int, list[float]] = defaultdict(list)
        self.metrics: dict[str, list[float]] = defaultdict(list)

    def run(self) -> None:
        train = self._config.train
        self._sender.send(self._version, fully_update=True)
        FitLoop(self, seed=self._config.run.seed).run(train.total_steps, train.update_steps, train.epochs)

    def _make_pipeline(self) -> ExperiencePipeline:
        config = self._config
        actor, critic, scorer, reference = run.maker_models(config)
        maker = NaiveExperienceMaker(
            actor,
            critic,
            scorer,
            reference,
            algorithm=config.algorithm,
            engine=config.rollout.engine,
            seed=config.run.seed,
        )
        return ExperiencePipeline(
            maker,
            ServedModels(maker.trained_models),
            generate_kwargs=config.rollout.generate_options,
        )

    def next_batch(self) -> Experience:
        """The oldest batch, after the maker has made all it may: the data waits as long as the bound allows."""
        rules = run.ledger_rules(self._config)
        limit = (self._config.topology.max_staleness + self._version + 1) * rules.samples_per_version
        while self._num_made < min(limit, rules.total_samples):
            batch = PromptBatch.parse(next(self._prompts))
            experience = self._pipeline.finish(self._pipeline.begin(batch))
            assert experience is not None
            assert experience.num_samples == len(batch) == BATCH_SIZE, "no sample is ever dropped here"
            self._num_made += len(batch)
            self.rewards_by_version[self._version].append(float(experience.reward.mean()))
            self._items += split_experience_batch(experience)
            while len(self._items) >= (size := self._config.train.batch_size):
                self._waiting.append(make_experience_batch(self._items[:size]))
                del self._items[:size]
        return self._waiting.popleft()

    def train_on(self, batch: Experience) -> dict[str, float]:
        ages, expected = ages_of(batch, self._version), min(self._version, self._config.topology.max_staleness)
        if ages != (expected, expected):
            raise RuntimeError(f"data trained at version {self._version} must be {expected} versions old, got {ages}")
        metrics = self.learner.step(batch)
        for name, value in {**metrics, "age": ages.mean}.items():
            self.metrics[name].append(value)
        return metrics

    def publish(self) -> None:
        self._version += 1
        self._sender.send(self._version)


def run_cell(cell: Cell, base: str, prompts: str) -> dict[str, Any]:
    """Train and evaluate one cell; everything about it that the report may want."""
    quiet_libraries(False)
    torch.set_num_threads(1)
    started = time.monotonic()
    config = make_config(cell, base, prompts)
    run = StaleRun(config)
    run.run()
    with tempfile.TemporaryDirectory() as folder:
        run.learner.strategy.save_model(run.learner.actor, folder)
        final = evaluate(config, folder, num_samples=NUM_EVALUATED)
    metrics = run.metrics
    return {
        **dataclasses.asdict(cell),
        "recipe": recipe_of(cell),
        "reward": final.reward,
        "kl": final.kl,
        "objective": final.reward - KL_COEF * final.kl,
        "distinct": final.distinct_fraction,
        "age_mean": statistics.fmean(metrics["age"]),
        "age_max": max(metrics["age"]),
        "clip_fraction": statistics.fmean(metrics["policy/clip_fraction"]),
        "effective_samples": _mean_or_none(metrics["off_policy/effective_samples"]),
        "above_cap": _mean_or_none(metrics["off_policy/above_cap"]),
        "ratio_max": max(metrics["off_policy/ratio_max"], default=None),
        "log_ratio": _mean_or_none(metrics["off_policy/log_ratio"]),
        "skipped": run.learner.num_skipped,
        "curve": [round(statistics.fmean(rewards), 4) for _, rewards in sorted(run.rewards_by_version.items())],
        "seconds": time.monotonic() - started,
    }


def _mean_or_none(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def about(setting: str) -> str:
    """A setting in words."""
    train = make_config(Cell(setting, "naive", 0, 0), "base", "prompts.jsonl").train
    return (
        f"{train.total_steps} versions of {train.batch_size} samples, {train.epochs} optimizer "
        f"{'step' if train.epochs == 1 else 'steps'} on each, learning rates {train.actor_lr:g} (actor) and "
        f"{train.critic_lr:g} (critic)."
    )


def base_rewards(base: str, prompts: str, seeds: Sequence[int]) -> list[float]:
    """The untrained model under the same evaluation, one mean for each seed."""
    setting, method = next(iter(SETTINGS)), next(iter(METHODS))
    configs = [make_config(Cell(setting, method, 0, seed), base, prompts) for seed in seeds]
    return [evaluate(config, base, num_samples=NUM_EVALUATED).reward for config in configs]

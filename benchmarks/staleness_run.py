"""One run of `benchmarks/staleness.py`: a maker and a trainer in one process, with ages set by a schedule."""

import dataclasses
import hashlib
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from checked import quiet_libraries
from fresh_samples import evaluate

from coati import build
from coati.config import RunSettings, build_config
from coati.demo.grammar import PROMPTS
from coati.experience_buffer.utils import BufferItem, make_experience_batch, split_experience_batch
from coati.experience_maker import Experience
from coati.monitor.run_log import RunLog
from coati.rollout import NativeEngine
from coati.synchronous import SynchronousRun

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from lease_world import World

NUM_EVALUATED = 256
NO_CAP = 1e9  # effectively unbounded: `ratio_max` in runs.jsonl stays far below

METHODS: dict[str, dict[str, Any]] = {
    "naive": {"correction": "none"},
    "decoupled": {"correction": "decoupled", "importance": "truncate", "importance_cap": NO_CAP},
    "truncated": {"correction": "decoupled", "importance": "truncate", "importance_cap": 2.0},
}

# Further variants, run only if named.
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
    "praise": {"total_steps": 40, "actor_lr": 5e-4, "epochs": 2},
}
BATCH_SIZE, GROUP_SIZE = 64, 8
# Settings with a task other than the demo's: GRPO with the verifier of `benchmarks/algorithms.py`.
TASKS: dict[str, dict[str, Any]] = {
    "praise": {
        "reward": {"function": "algorithms:is_praise", "search_paths": [str(Path(__file__).resolve().parent)]},
        "rollout": {"prompts_per_batch": BATCH_SIZE // GROUP_SIZE, "samples_per_prompt": GROUP_SIZE},
        "algorithm": {"name": "grpo", "kl_coef": 0.0},
    },
}
DEMO: dict[str, dict[str, Any]] = {
    "reward": {"function": "coati.demo.reward:film_sentiment"},
    "rollout": {"prompts_per_batch": BATCH_SIZE},
    "algorithm": {"kl_coef": 0.05},
}
OLDEST = -1
WRITING: dict[str, dict[str, Any]] = {
    "whole": {"in_flight": False},
    "in-flight": {"in_flight": True},
}


@dataclasses.dataclass(frozen=True, order=True)
class Cell:
    """One run of the grid."""

    setting: str
    method: str
    eta: int
    seed: int
    lead: int = OLDEST
    """`topology.lead`, with ages as the ledger distributes them; OLDEST = all data is as old as η allows."""
    writing: str = "whole"
    """Whether one version generates a response, or all versions up to the trained one generate equal parts."""

    def __str__(self) -> str:
        ages = "" if self.lead == OLDEST else f" lead {self.lead}"
        return f"{self.setting} {self.method} {self.writing} η={self.eta}{ages} seed {self.seed}"


class Schedule(NamedTuple):
    """The samples that each version starts to generate, and the samples trained on at each version."""

    written: list[list[int]]
    trained: list[list[int]]

    @property
    def ages(self) -> list[list[int]]:
        """Ages of the samples trained on at each version."""
        written = {number: version for version, numbers in enumerate(self.written) for number in numbers}
        return [[version - written[number] for number in numbers] for version, numbers in enumerate(self.trained)]


def make_schedule(cell: Cell, versions: int) -> Schedule:
    """Return a schedule with the maximum age, or one from the real ledger with simulated makers.

    The simulation is that of `benchmarks/leases.py`: 4 makers with 16 slots, lognormal response times, 1 second of
    training.
    """
    size = BATCH_SIZE // (GROUP_SIZE if cell.setting in TASKS else 1)
    if cell.lead == OLDEST:
        trained = [list(range(version * size, (version + 1) * size)) for version in range(versions)]
        written: list[list[int]] = [[] for _ in range(versions)]
        for version, numbers in enumerate(trained):
            written[max(0, version - cell.eta)] += numbers
        return Schedule(written, trained)
    world = World(
        seed=cell.seed,
        speeds=[1.0] * 4,
        slots=[16] * 4,
        versions=versions,
        groups_per_version=size,
        lead=cell.lead,
        max_staleness=cell.eta,
    )
    assert world.run(), f"{cell}: the simulated makers make no progress"
    events = world.ledgers[0].events
    picked = [number for event in events for number in event.get("pick", ())]
    granted = {number: event["version"] for event in events for number in event.get("grant", ())}
    written = [[] for _ in range(versions)]
    for number in sorted(picked):
        written[granted[number]].append(number)
    return Schedule(written, [picked[first : first + size] for first in range(0, len(picked), size)])


def make_config(cell: Cell, base: str, prompts: str) -> RunSettings:
    task = TASKS.get(cell.setting, DEMO)
    return build_config(
        {
            "run": {"name": "staleness", "seed": cell.seed},
            "model": {"path": base, "device": "cpu"},
            "prompts": {"path": prompts},
            "reward": task["reward"],
            "rollout": {"max_new_tokens": 16, **task["rollout"], **WRITING[cell.writing]},
            "algorithm": {**task["algorithm"], **(METHODS | MORE_METHODS)[cell.method]},
            "train": {"batch_size": BATCH_SIZE, "warmup_steps": 2, **SETTINGS[cell.setting]},
            "topology": {
                "max_staleness": cell.eta,
                "threads_per_actor": 1,
                **({} if cell.lead == OLDEST else {"lead": cell.lead}),
            },
        }
    )


def recipe_of(cell: Cell) -> str:
    """Return a digest of everything that determines a run's outcome, except code and machine."""
    config = make_config(cell, "base", "prompts.jsonl").model_dump(mode="json")
    del config["reward"]["search_paths"]  # machine-dependent paths
    recipe = {"config": config, "lead": cell.lead, "prompts": PROMPTS, "num_evaluated": NUM_EVALUATED}
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:16]


class StaleRun(SynchronousRun):
    """A maker and a trainer that alternate in one process, following a schedule.

    The schedule numbers samples or, if the algorithm compares the samples of a prompt, groups.
    """

    def __init__(self, config: RunSettings, schedule: Schedule) -> None:
        self._schedule, self._ages = schedule, schedule.ages
        rules = build.ledger_rules(config)
        super().__init__(config, RunLog(None, total_steps=0), rules=rules)
        self._group_size = rules.group_size
        maker, rollout = self.maker.pipeline.experience_maker, config.rollout
        num_versions = config.topology.max_staleness + 1
        maker.engine = NativeEngine(maker.actor, num_slots=num_versions * BATCH_SIZE * self._group_size)
        # Tokens of a response that each version generates.
        self._share = -(-rollout.max_new_tokens // (num_versions if rollout.in_flight else 1))
        self._items: dict[int, list[BufferItem]] = {}  # by number, until trained on
        self._prompts = build.make_prompts(config)
        self.rewards_by_version: dict[int, list[float]] = defaultdict(list)
        self.metrics: dict[str, list[float]] = defaultdict(list)

    def next_batch(self) -> Experience:
        """Generate this version's share of tokens and return the batch to train on."""
        if numbers := self._schedule.written[self.version]:
            prompts, unusable = self._prompts.batch(numbers, group_size=self._group_size)
            assert not unusable
            self.maker.pipeline.add_samples(prompts)
            self._write(1)  # starts them without generating more of the others
        numbers = self._schedule.trained[self.version]
        self._write(self._share)
        while any(number not in self._items for number in numbers):  # only in the first versions
            self._write(1)
        return make_experience_batch([item for number in numbers for item in self._items.pop(number)])

    def _write(self, num_tokens: int) -> None:
        """Generate `num_tokens` tokens of each started sample and score complete groups."""
        maker = self.maker.pipeline.experience_maker
        maker.policy_version = self.version
        for _ in range(num_tokens):
            if maker.num_generating:
                maker.generate_tokens()
        if not maker.num_complete:
            return
        experience = self.maker.pipeline.finish_batch(maker.score_complete())
        assert experience is not None
        self.rewards_by_version[self.version] += experience.reward.tolist()
        groups: dict[int, list[BufferItem]] = defaultdict(list)
        for item in split_experience_batch(experience):
            assert item.sample_ids is not None
            groups[int(item.sample_ids) // self._group_size].append(item)
        assert all(len(group) == self._group_size for group in groups.values()), "no sample may be dropped here"
        self._items |= groups

    def training_step(self, experience: Experience) -> dict[str, float]:
        measured, expected = experience.age_metrics(self.version), self._ages[self.version]
        ages = measured["train/age_mean"], measured["train/age_max"]
        if ages != (statistics.fmean(expected), max(expected)) or ages[1] > self._config.topology.max_staleness:
            raise RuntimeError(f"data trained on at version {self.version} must have ages {expected}, got {ages}")
        metrics = super().training_step(experience)
        for name, value in {**metrics, "age": ages[0], "oldest": ages[1]}.items():
            self.metrics[name].append(value)
        return metrics

    def checkpoint(self, num_fresh: int, *, was_stopped: bool = False) -> None:
        """Do not save checkpoints."""


def run_cell(cell: Cell, base: str, prompts: str) -> dict[str, Any]:
    """Train and evaluate one cell and return its row for runs.jsonl."""
    quiet_libraries()
    torch.set_num_threads(1)
    started = time.monotonic()
    config = make_config(cell, base, prompts)
    run = StaleRun(config, make_schedule(cell, config.train.total_steps))
    run.train()
    with tempfile.TemporaryDirectory() as folder:
        run.strategy_save_actor(folder)
        final = evaluate(config, folder, num_samples=NUM_EVALUATED).numbers
    metrics = run.metrics
    return {
        **dataclasses.asdict(cell),
        "recipe": recipe_of(cell),
        "reward": final["reward"],
        "kl": final["kl"],
        "objective": final["reward"] - config.algorithm.kl_coef * final["kl"],
        "distinct": final["distinct"],
        "age_mean": statistics.fmean(metrics["age"]),
        "age_max": max(metrics["oldest"]),
        "clip_fraction": statistics.fmean(metrics["policy/clip_fraction"]),
        "effective_samples": _mean_or_none(metrics["off_policy/effective_samples"]),
        "above_cap": _mean_or_none(metrics["off_policy/above_cap"]),
        "ratio_max": max(metrics["off_policy/ratio_max"], default=None),
        "log_ratio": _mean_or_none(metrics["off_policy/log_ratio"]),
        "skipped": metrics["optim/skipped_batches"][-1],
        "area": statistics.fmean(reward for rewards in run.rewards_by_version.values() for reward in rewards),
        "curve": [round(statistics.fmean(rewards), 4) for _, rewards in sorted(run.rewards_by_version.items())],
        "seconds": time.monotonic() - started,
    }


def _mean_or_none(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def about(setting: str) -> str:
    """Describe a setting in words."""
    config = make_config(Cell(setting, "naive", 0, 0), "base", "prompts.jsonl")
    train = config.train
    critic = f" and {train.critic_lr:g} (critic)" if config.algorithm.uses_critic else ""
    return (
        f"{train.total_steps} versions of {train.batch_size} samples, {train.epochs} optimizer "
        f"{'step' if train.epochs == 1 else 'steps'} on each, learning rates {train.actor_lr:g} (actor){critic}."
    )


def base_rewards(base: str, prompts: str, seeds: Sequence[int]) -> list[float]:
    """Evaluate the untrained model in the same way and return one mean per seed."""
    setting, method = next(iter(SETTINGS)), next(iter(METHODS))
    configs = [make_config(Cell(setting, method, 0, seed), base, prompts) for seed in seeds]
    return [evaluate(config, base, num_samples=NUM_EVALUATED).numbers["reward"] for config in configs]

"""Options of trainers and makers beyond the contract's arguments: sections of settings, and their role in a run."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from coati import build
from coati.build import Parts
from coati.config import (
    AlgorithmSettings,
    Deadlines,
    LoggingSettings,
    RolloutSettings,
    RunSettings,
    TopologySettings,
    TrainSettings,
)
from coati.errors import ConfigError
from coati.evaluation.schedule import EvalSchedule
from coati.evaluation.work import EvaluationWork
from coati.experience_maker import ExperienceMaker, NaiveExperienceMaker
from coati.ledger import LedgerRules
from coati.ledger.journal import Journal
from coati.trainer.ppo import PPOLearner


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainerOptions:
    """How a trainer learns and publishes weights. The default is plain PPO on data of any age.

    >>> TrainerOptions(train=TrainSettings(actor_lr=3e-3)).train.actor_lr
    0.003
    """

    train: TrainSettings = dataclasses.field(default_factory=TrainSettings)
    algorithm: AlgorithmSettings = dataclasses.field(default_factory=lambda: AlgorithmSettings(correction="none"))
    topology: TopologySettings = dataclasses.field(default_factory=lambda: TopologySettings(max_staleness=-1))
    """The trainer uses only the staleness bound and the chunk size."""
    deadlines: Deadlines = dataclasses.field(default_factory=Deadlines)
    seed: int = 0
    num_threads: int = 0  # torch CPU threads; 0 keeps torch's default
    max_response_tokens: int = 0  # longest response, which `algorithm.normalization = "constant"` divides by
    save_folder: Path | None = None  # where checkpoints go (`train.save_every`); None saves none
    resume: Path | None = None  # the checkpoint that training continues from; all ranks must see it
    tokenizer: Callable[[], Any] | None = None  # loads the tokenizer that is saved with the actor; None saves none
    rules: LedgerRules | None = None  # the rules by which makers lease work; None accepts all deliveries
    journal: Callable[[], Journal] | None = None  # opens the journal that records all leases; None records none
    has_reference: bool = False  # whether makers measure the KL to a reference model, so a KL of 0 is a metric too
    incarnation: int = 0
    """How often the trainers of this run were restarted; makers reject updates from earlier incarnations."""
    evaluations: Callable[..., EvalSchedule] = EvalSchedule  # creates the evaluation schedule (trainer 0 only)
    learner: Callable[..., PPOLearner] = PPOLearner  # creates the learner, for example a subclass with another loss

    @classmethod
    def from_run(
        cls, config: RunSettings, parts: Parts, *, rank: int = 0, resume: Path | None = None, incarnation: int = 0
    ) -> Self:
        """Build the options of one trainer of a run; only rank 0 schedules evaluations."""
        rules = build.ledger_rules(config, stream=rank)
        path = config.output_folder.resolve() / "ledger" / f"stream-{rank}.jsonl"
        is_resumed = resume is not None or incarnation > 0
        return cls(
            train=config.train,
            algorithm=config.algorithm,
            topology=config.topology,
            deadlines=config.deadlines,
            seed=config.run.seed,
            num_threads=build.threads_per_actor(config),
            max_response_tokens=config.rollout.max_new_tokens,
            save_folder=config.output_folder.resolve() / "checkpoints",
            resume=resume,
            incarnation=incarnation,
            tokenizer=functools.partial(build.load_tokenizer, config),
            rules=rules,
            journal=functools.partial(Journal, path, rules, run=config.run.name, is_resumed=is_resumed),
            has_reference=config.reference_path is not None,
            evaluations=functools.partial(EvalSchedule, config.eval * (rank == 0), incarnation=incarnation),
            learner=parts.learner,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MakerOptions:
    """How a maker generates and scores experience, and its role in a run."""

    algorithm: AlgorithmSettings = dataclasses.field(default_factory=AlgorithmSettings)
    rollout: RolloutSettings | None = None
    """Engine and generate options; None uses the reference engine, with generate options from keywords."""
    deadlines: Deadlines = dataclasses.field(default_factory=Deadlines)
    logging: LoggingSettings = dataclasses.field(default_factory=LoggingSettings)
    seed: int = 0
    num_threads: int = 0  # torch CPU threads; 0 keeps torch's default
    incarnation: int = 0  # greater than that of every earlier maker of the same name
    rules: LedgerRules | None = None
    """The rules by which trainers grant leases, which bound staleness; None processes the whole data loader."""
    evaluations: Callable[..., EvaluationWork] | None = None  # creates the part that runs evaluations
    maker: Callable[..., ExperienceMaker] = NaiveExperienceMaker
    """Creates the experience maker: a class or function that takes the four models, and those of the keywords
    `algorithm`, `seed` and `engine` that it declares."""

    @classmethod
    def from_run(cls, config: RunSettings, parts: Parts, *, incarnation: int = 0) -> Self:
        """Build the options of one maker of a run."""
        return cls(
            algorithm=config.algorithm,
            rollout=config.rollout,
            deadlines=config.deadlines,
            logging=config.logging,
            seed=config.run.seed,
            num_threads=build.threads_per_actor(config),
            incarnation=incarnation,
            rules=build.ledger_rules(config),
            evaluations=functools.partial(EvaluationWork, config, parts.reward) if config.eval else None,
            maker=parts.maker,
        )

    def generate_options(self, keywords: Mapping[str, Any]) -> dict[str, Any]:
        """Return all generate options: those of `rollout`, plus keywords that `rollout` does not set."""
        if self.rollout is None:
            return dict(keywords)
        decided = self.rollout.generate_options
        if both := sorted({"max_length", *decided} & keywords.keys()):
            raise ConfigError(
                f"options.rollout sets the length and sampling of responses, got {', '.join(both)} as a keyword too. "
                "Set each option in one place."
            )
        return {**decided, **keywords}

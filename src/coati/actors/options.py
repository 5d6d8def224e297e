"""What trainers and makers take besides the contract's arguments: sections of settings, and their part in a run."""

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
from coati.trainer.ppo import PPOLearner


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainerOptions:
    """How a trainer learns and publishes. By default plain PPO on data of any age.

    >>> TrainerOptions(train=TrainSettings(actor_lr=3e-3)).train.actor_lr
    0.003
    """

    train: TrainSettings = dataclasses.field(default_factory=TrainSettings)
    algorithm: AlgorithmSettings = dataclasses.field(default_factory=lambda: AlgorithmSettings(correction="none"))
    topology: TopologySettings = dataclasses.field(default_factory=lambda: TopologySettings(max_staleness=-1))
    """Staleness bound, whether only adapters are sent, and chunk size; the rest is not the trainer's."""
    deadlines: Deadlines = dataclasses.field(default_factory=Deadlines)
    seed: int = 0
    num_threads: int = 0  # CPU threads of torch; 0 leaves them alone
    max_response_tokens: int = 0  # longest response, which `algorithm.normalization = "constant"` divides by
    save_folder: Path | None = None  # where checkpoints go (`train.save_every`); None saves none
    resume: Path | None = None  # the checkpoint that training continues from; all ranks must see it
    tokenizer: Callable[[], Any] | None = None  # loads the tokenizer that is saved with the actor; None saves none
    rules: LedgerRules | None = None  # what makers lease work by; None takes what comes
    journal: Path | None = None  # where the account of all leases is written
    run_name: str = ""
    incarnation: int = 0
    """How often the trainers of the run were started again; makers refuse those that others have replaced."""
    evaluations: Callable[..., EvalSchedule] = EvalSchedule  # makes the schedule, which the first trainer has
    learner: Callable[..., PPOLearner] = PPOLearner  # makes the learner: a subclass with another loss, for example

    @classmethod
    def of_run(
        cls, config: RunSettings, parts: Parts, *, rank: int = 0, resume: Path | None = None, incarnation: int = 0
    ) -> Self:
        """Those of a trainer of a run; the first has the evaluations."""
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
            rules=build.ledger_rules(config, stream=rank),
            journal=build.journal_path(config, stream=rank),
            run_name=config.run.name,
            evaluations=functools.partial(EvalSchedule, config.eval * (rank == 0), incarnation=incarnation),
            learner=parts.learner,
        )

    def with_arguments(
        self,
        *,
        train_batch_size: int,
        eps_clip: float,
        value_clip: float,
        update_lora_weights: bool,
    ) -> Self:
        """Put the contract's arguments into the sections that have them as settings."""
        train = self.train.with_arguments("options.train", train_batch_size=("batch_size", train_batch_size, 8))
        algorithm = self.algorithm.with_arguments(
            "options.algorithm", eps_clip=("eps_clip", eps_clip, 0.2), value_clip=("value_clip", value_clip, 0.4)
        )
        topology = self.topology.with_arguments(
            "options.topology", update_lora_weights=("update_lora_weights", update_lora_weights, False)
        )
        return dataclasses.replace(self, train=train, algorithm=algorithm, topology=topology)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MakerOptions:
    """How a maker writes and scores, and which part of a run is its own."""

    algorithm: AlgorithmSettings = dataclasses.field(default_factory=AlgorithmSettings)
    rollout: RolloutSettings | None = None
    """Engine and generate options; None takes the generate options from keywords, and the reference engine."""
    deadlines: Deadlines = dataclasses.field(default_factory=Deadlines)
    logging: LoggingSettings = dataclasses.field(default_factory=LoggingSettings)
    seed: int = 0
    num_threads: int = 0  # CPU threads of torch; 0 leaves them alone
    incarnation: int = 0  # greater than those of all makers that had its name before
    rules: LedgerRules | None = None
    """What trainers lease work by; they bound how old training data gets. None makes all that comes."""
    evaluations: Callable[..., EvaluationWork] | None = None  # makes what evaluates for the run
    maker: Callable[..., ExperienceMaker] = NaiveExperienceMaker
    """Makes the maker: a class or function that takes the four models and, of the keywords algorithm, seed and engine,
    those that it declares."""

    @classmethod
    def of_run(cls, config: RunSettings, parts: Parts, *, incarnation: int = 0) -> Self:
        """Those of a maker of a run."""
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
        """All options of `generate`: those of `rollout`, and keywords that it does not decide."""
        if self.rollout is None:
            return dict(keywords)
        decided = self.rollout.generate_options
        if both := sorted({"max_length", *decided} & keywords.keys()):
            raise ConfigError(
                f"options.rollout decides {', '.join(both)}, which came as a keyword too. Pass one of them."
            )
        return {**decided, **keywords}

"""The settings of a run: schema, loading, the plan in plain words, and checks before anything starts.

Light on purpose: importing it pulls in neither torch, Ray, transformers nor datasets, so that `coati --help`
and `coati train --dry-run` answer at once.
"""

from coati.config.algorithm_section import AlgorithmSection
from coati.config.loading import build_config, load_config
from coati.config.plan import Plan, make_plan
from coati.config.preflight import preflight
from coati.config.schema import RunConfig
from coati.config.sections import (
    ModelSection,
    PromptsSection,
    RewardSection,
    RewardTerm,
    RolloutSection,
    RunSection,
)
from coati.config.toml_writer import dump_config
from coati.config.training_sections import (
    DeadlinesSection,
    LoggingSection,
    LoraSection,
    TopologySection,
    TrainSection,
)

__all__ = [
    "AlgorithmSection",
    "DeadlinesSection",
    "LoggingSection",
    "LoraSection",
    "ModelSection",
    "Plan",
    "PromptsSection",
    "RewardSection",
    "RewardTerm",
    "RolloutSection",
    "RunConfig",
    "RunSection",
    "TopologySection",
    "TrainSection",
    "build_config",
    "dump_config",
    "load_config",
    "make_plan",
    "preflight",
]

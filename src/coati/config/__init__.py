"""The settings of a run: schema, loading, and the plan in plain words.

Light on purpose: importing it pulls in neither torch, Ray, transformers nor datasets, so that `coati --help`
and `coati train --dry-run` answer at once.
"""

from coati.config.algorithm import AlgorithmSettings
from coati.config.evaluation import EvalSettings
from coati.config.logging_settings import LoggingSettings
from coati.config.plan import plan_lines
from coati.config.reward import RewardSettings, RewardTerm
from coati.config.run_settings import RunSettings, build_config, dump_config, load_config
from coati.config.sections import (
    Deadlines,
    GeneralSettings,
    LoRASettings,
    ModelSettings,
    PromptSettings,
    RolloutSettings,
    TopologySettings,
    TrainSettings,
)

__all__ = [
    "AlgorithmSettings",
    "Deadlines",
    "EvalSettings",
    "GeneralSettings",
    "LoRASettings",
    "LoggingSettings",
    "ModelSettings",
    "PromptSettings",
    "RewardSettings",
    "RewardTerm",
    "RolloutSettings",
    "RunSettings",
    "TopologySettings",
    "TrainSettings",
    "build_config",
    "dump_config",
    "load_config",
    "plan_lines",
]

"""The settings of a run. Imports no torch, Ray, transformers or datasets, so that `coati --help` is fast."""

from coati.config.algorithm import AlgorithmSettings as AlgorithmSettings
from coati.config.plan import plan_lines as plan_lines
from coati.config.reward import RewardSettings as RewardSettings
from coati.config.reward import RewardTerm as RewardTerm
from coati.config.run_settings import EvalSettings as EvalSettings
from coati.config.run_settings import Overrides as Overrides
from coati.config.run_settings import RunSettings as RunSettings
from coati.config.run_settings import build_config as build_config
from coati.config.run_settings import dump_config as dump_config
from coati.config.run_settings import load_config as load_config
from coati.config.run_settings import parse_overrides as parse_overrides
from coati.config.sections import Deadlines as Deadlines
from coati.config.sections import GeneralSettings as GeneralSettings
from coati.config.sections import LoggingSettings as LoggingSettings
from coati.config.sections import LoRASettings as LoRASettings
from coati.config.sections import ModelSettings as ModelSettings
from coati.config.sections import PromptSettings as PromptSettings
from coati.config.sections import RolloutSettings as RolloutSettings
from coati.config.sections import TopologySettings as TopologySettings
from coati.config.sections import TrainSettings as TrainSettings

"""Asynchronous reinforcement learning from feedback for language models.

Experience makers generate and score text in their own Ray actors, trainers learn from a replay buffer in
theirs, and new weights flow back while both keep working. `coati.train` runs the whole system; see `docs/library.md`.
`docs/design.md` describes the packages. `import coati` is fast: names are imported on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for editors and type checkers
    from coati.actors.options import MakerOptions as MakerOptions
    from coati.actors.options import TrainerOptions as TrainerOptions
    from coati.config import RunSettings as RunSettings
    from coati.config import load_config as load_config
    from coati.entry import RunResult as RunResult
    from coati.entry import train as train
    from coati.experience import Experience as Experience
    from coati.experience_maker import NaiveExperienceMaker as NaiveExperienceMaker
    from coati.models import Actor as Actor
    from coati.models import Critic as Critic
    from coati.models import RewardModel as RewardModel
    from coati.monitor import load_metrics as load_metrics
    from coati.ray.detached_trainer_ppo import DetachedPPOTrainer as DetachedPPOTrainer
    from coati.ray.detached_trainer_ppo import PPOTrainer as PPOTrainer
    from coati.ray.experience_maker_holder import ExperienceMakerHolder as ExperienceMakerHolder
    from coati.ray.experience_maker_holder import MakerHolder as MakerHolder
    from coati.trainer.ppo import PPOLearner as PPOLearner

__version__ = "0.1.0"

_NAMES = {
    "coati.entry": ("train", "RunResult"),
    "coati.config": ("load_config", "RunSettings"),
    "coati.monitor": ("load_metrics",),
    "coati.experience": ("Experience",),
    "coati.experience_maker": ("NaiveExperienceMaker",),
    "coati.trainer.ppo": ("PPOLearner",),
    "coati.models": ("Actor", "Critic", "RewardModel"),
    "coati.ray.detached_trainer_ppo": ("PPOTrainer", "DetachedPPOTrainer"),
    "coati.ray.experience_maker_holder": ("MakerHolder", "ExperienceMakerHolder"),
    "coati.actors.options": ("TrainerOptions", "MakerOptions"),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'coati' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*_HOMES, "__version__"]

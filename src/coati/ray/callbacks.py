"""The contract's import path for callbacks, which `coati.actors.callbacks` defines. Needs no Ray."""

from coati.actors.callbacks import ExperienceMakerPerformanceEvaluator as ExperienceMakerPerformanceEvaluator
from coati.actors.callbacks import MakerCallback as MakerCallback
from coati.actors.callbacks import TrainerCallback as TrainerCallback
from coati.actors.callbacks import TrainerPerformanceEvaluator as TrainerPerformanceEvaluator

"""Callbacks under the contract's import path; `coati.actors.callbacks` defines them. Needs no Ray."""

from coati.actors.callbacks import ExperienceMakerPerformanceEvaluator as ExperienceMakerPerformanceEvaluator
from coati.actors.callbacks import MakerCallback as MakerCallback
from coati.actors.callbacks import TrainerCallback as TrainerCallback
from coati.actors.callbacks import TrainerPerformanceEvaluator as TrainerPerformanceEvaluator

"""Callbacks under the contract's import path; `coati.actors.callbacks` defines them. Needs no Ray."""

from coati.actors.callbacks import (
    ExperienceMakerPerformanceEvaluator,
    MakerCallback,
    TrainerCallback,
    TrainerPerformanceEvaluator,
)

__all__ = [
    "ExperienceMakerPerformanceEvaluator",
    "MakerCallback",
    "TrainerCallback",
    "TrainerPerformanceEvaluator",
]

"""Engines that generate responses, behind one protocol."""

from typing import Any

from coati.config.generate import GenerateOptions
from coati.errors import ConfigError
from coati.rollout.engine import Rollout, RolloutEngine, RolloutRequest
from coati.rollout.native import NativeEngine
from coati.rollout.reference import ReferenceEngine

__all__ = [
    "GenerateOptions",
    "NativeEngine",
    "ReferenceEngine",
    "Rollout",
    "RolloutEngine",
    "RolloutRequest",
    "make_engine",
]


def make_engine(name: str, model: Any) -> RolloutEngine:
    """The engine of that name for a model."""
    engines: dict[str, Any] = {"native": NativeEngine, "reference": ReferenceEngine}
    if name not in engines:
        raise ConfigError(f"engine must be one of {', '.join(engines)}, got {name!r}.")
    engine: RolloutEngine = engines[name](model)
    return engine

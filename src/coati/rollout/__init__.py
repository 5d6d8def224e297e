"""Engines that generate responses, behind one protocol."""

from typing import Any

from coati.config import RolloutSettings
from coati.config.generate import GenerateOptions
from coati.errors import ConfigError
from coati.rollout.engine import Rollout, RolloutEngine, RolloutRequest
from coati.rollout.native import NativeEngine
from coati.rollout.reference import ReferenceEngine
from coati.rollout.vllm import VllmEngine

__all__ = [
    "GenerateOptions",
    "NativeEngine",
    "ReferenceEngine",
    "Rollout",
    "RolloutEngine",
    "RolloutRequest",
    "VllmEngine",
    "make_engine",
]


def make_engine(rollout: RolloutSettings | str, model: Any) -> RolloutEngine:
    """The engine of that name, or that the settings name, for a model."""
    name, options = (rollout, {}) if isinstance(rollout, str) else (rollout.engine, rollout.vllm)
    engines: dict[str, Any] = {"native": NativeEngine, "reference": ReferenceEngine, "vllm": VllmEngine}
    if name not in engines:
        raise ConfigError(f"engine must be one of {', '.join(engines)}, got {name!r}.")
    engine: RolloutEngine = engines[name](model, **(options if name == "vllm" else {}))
    return engine

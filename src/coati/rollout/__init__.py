"""Rollout engines, which generate responses behind one protocol."""

import logging
from typing import Any

from coati.config import RolloutSettings
from coati.config.generate import GenerateOptions as GenerateOptions
from coati.config.generate import native_engine_problem
from coati.errors import ConfigError
from coati.models.tiles import set_batch_invariant
from coati.rollout.engine import RolloutEngine as RolloutEngine
from coati.rollout.engine import generate as generate
from coati.rollout.engine import join_samples as join_samples
from coati.rollout.engine import with_limits as with_limits
from coati.rollout.native import NativeEngine as NativeEngine
from coati.rollout.native import config_of
from coati.rollout.reference import ReferenceEngine as ReferenceEngine
from coati.rollout.vllm import VllmEngine as VllmEngine

logger = logging.getLogger(__name__)


def make_engine(rollout: RolloutSettings | str, model: Any) -> RolloutEngine:
    """Create the engine with this name, or the one in the settings, for a model.

    If the native engine does not support the model or a generate option, use the reference engine and log a warning.
    """
    settings = RolloutSettings() if isinstance(rollout, str) else rollout
    name = rollout if isinstance(rollout, str) else rollout.engine
    engines: dict[str, Any] = {"native": NativeEngine, "reference": ReferenceEngine, "vllm": VllmEngine}
    if name not in engines:
        raise ConfigError(f"engine must be one of {', '.join(engines)}, got {name!r}.")
    options = GenerateOptions.parse(**settings.generate_options)
    if name == "native" and (reason := native_engine_problem(config_of(model), options)) is not None:
        if settings.batch_invariant:
            raise ConfigError(
                f"rollout.batch_invariant needs the native engine, which cannot run this model: {reason}. "
                "Set rollout.batch_invariant = false."
            )
        logger.warning("generating with the reference engine, which is slower: %s", reason)
        name = "reference"
    if settings.batch_invariant:
        set_batch_invariant(model)
    engine: RolloutEngine = engines[name](model, **(settings.vllm if name == "vllm" else {}))
    return engine

"""Engines that write text, behind one protocol."""

from coati.rollout.engine import Rollout, RolloutEngine, RolloutRequest, mask_after_end
from coati.rollout.options import GenerateOptions, known_options
from coati.rollout.reference import ReferenceEngine

__all__ = [
    "GenerateOptions",
    "ReferenceEngine",
    "Rollout",
    "RolloutEngine",
    "RolloutRequest",
    "known_options",
    "mask_after_end",
]

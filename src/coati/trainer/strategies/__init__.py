"""Strategies: how models, gradients and optimizer state are laid out over ranks and devices."""

from coati.trainer.strategies.base import Strategy
from coati.trainer.strategies.ddp import DDPStrategy
from coati.trainer.strategies.gemini import GeminiStrategy
from coati.trainer.strategies.low_level_zero import LowLevelZeroStrategy

__all__ = ["DDPStrategy", "GeminiStrategy", "LowLevelZeroStrategy", "Strategy"]

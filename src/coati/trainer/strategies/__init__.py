"""Strategies: how models, gradients and optimizer state are distributed over ranks and devices."""

from coati.trainer.strategies.base import Strategy
from coati.trainer.strategies.layouts import DDPStrategy, GeminiStrategy, LowLevelZeroStrategy

__all__ = ["DDPStrategy", "GeminiStrategy", "LowLevelZeroStrategy", "Strategy"]

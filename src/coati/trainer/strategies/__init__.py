"""Strategies: how models, gradients and optimizer state are laid out over ranks and devices."""

from coati.trainer.strategies.base import Strategy
from coati.trainer.strategies.ddp import DDPStrategy
from coati.trainer.strategies.sharded import GeminiStrategy, LowLevelZeroStrategy

__all__ = ["DDPStrategy", "GeminiStrategy", "LowLevelZeroStrategy", "Strategy"]

"""Rewards: from the function or model in the settings to one score per sample.

    config.reward ──► build_reward ──► FunctionReward ── call_function ──► your function, or one of library/
                            │                 └── RewardProcess ── pipe ──► child ── call_function ──► the same
                            ├──────► ModelReward, WeightedSum
    samples ──► RewardScorer ──► RewardRequest ──► a Reward ──► PendingScores

Names are imported on first use, because child processes and the checks before a run need no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coati.rewards.base import ModelReward as ModelReward
    from coati.rewards.base import Reward as Reward
    from coati.rewards.base import RewardRequest as RewardRequest
    from coati.rewards.base import WeightedSum as WeightedSum
    from coati.rewards.calling import load_reward_function as load_reward_function
    from coati.rewards.function import FunctionReward as FunctionReward
    from coati.rewards.function import build_reward as build_reward
    from coati.rewards.process import RewardProcess as RewardProcess
    from coati.rewards.scorer import PendingScores as PendingScores
    from coati.rewards.scorer import RewardScorer as RewardScorer


def __getattr__(name: str) -> Any:
    for home in ("calling", "base", "function", "process", "scorer"):
        module = importlib.import_module(f"{__name__}.{home}")
        if getattr(getattr(module, name, None), "__module__", "") == module.__name__:
            return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

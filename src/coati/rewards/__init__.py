"""Rewards: functions over text, reward models, and weighted sums; every one with a name and a deadline."""

from coati.reward_functions.loading import load_reward_function
from coati.rewards.base import ModelReward, Reward, RewardRequest, Scores, WeightedSum
from coati.rewards.function import FunctionReward, build_reward
from coati.rewards.isolation import RewardProcess
from coati.rewards.scorer import PendingScores, RewardScorer

__all__ = [
    "FunctionReward",
    "ModelReward",
    "PendingScores",
    "Reward",
    "RewardProcess",
    "RewardRequest",
    "RewardScorer",
    "Scores",
    "WeightedSum",
    "build_reward",
    "load_reward_function",
]

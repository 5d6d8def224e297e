"""Networks: the policy, the critic, the reward model, and their losses."""

from coati.config import LoRASettings
from coati.models.actor import Actor, action_logprobs
from coati.models.loss import PolicyLoss, ValueLoss
from coati.models.value_head import Critic, RewardModel, action_values, as_critic

__all__ = [
    "Actor",
    "Critic",
    "LoRASettings",
    "PolicyLoss",
    "RewardModel",
    "ValueLoss",
    "action_logprobs",
    "action_values",
    "as_critic",
]

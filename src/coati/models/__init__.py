"""Networks: the policy, the critic, the reward model, and their losses."""

from coati.config import LoRASettings as LoRASettings
from coati.models.actor import Actor as Actor
from coati.models.actor import action_logprobs as action_logprobs
from coati.models.loss import PolicyLoss as PolicyLoss
from coati.models.loss import ValueLoss as ValueLoss
from coati.models.value_head import Critic as Critic
from coati.models.value_head import RewardModel as RewardModel
from coati.models.value_head import action_values as action_values
from coati.models.value_head import as_critic as as_critic

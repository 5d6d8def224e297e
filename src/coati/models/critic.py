"""The value function."""

from typing import Self

from torch import Tensor, nn
from transformers import PreTrainedModel

from coati.config import LoRASettings
from coati.models.actor import Actor, unwrap
from coati.models.lora import copy_without_adapters
from coati.models.value_head import ValueHeadModel


class Critic(ValueHeadModel):
    """V(state) at each token: `forward` gives [B, S], where entry t values the text up to and with token t.

    The value *before* response token t, which GAE needs, is the entry at the position before it.
    """

    @classmethod
    def from_actor(cls, actor: Actor | PreTrainedModel, *, lora: LoRASettings | None = None) -> Self:
        """Start from a copy of the actor's body: reads as well as the actor, shares no weights with it."""
        return cls(copy_without_adapters(unwrap(actor)).base_model, lora=lora)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Values at each position, [B, S]."""
        return self.token_values(input_ids, attention_mask)


def as_critic(model: nn.Module) -> nn.Module:
    """A plain transformers model becomes a `Critic`; anything else is taken as it is."""
    return Critic(model) if isinstance(model, PreTrainedModel) else model

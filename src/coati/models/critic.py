"""The value function."""

from typing import TYPE_CHECKING, Self

from torch import Tensor, nn
from transformers import PreTrainedModel

from coati.config import LoRASettings
from coati.errors import DataError
from coati.models.actor import Actor, unwrap
from coati.models.lora import copy_without_adapters
from coati.models.value_head import ValueHeadModel

if TYPE_CHECKING:
    from coati.models.shared_body import SharedPasses


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


def action_values(
    critic: nn.Module,
    sequences: Tensor,
    attention_mask: Tensor | None,
    num_actions: int,
    *,
    passes: "SharedPasses | None" = None,
) -> Tensor:
    """V(state before each response token), [B, A]: the critic's output one position earlier.

    A critic that already returns [B, A] (a hand-written module) is taken at its word. With `passes` its body may have
    been run already.
    """
    hidden = None if passes is None else passes.hidden_of(critic)
    if passes is not None and hidden is not None and isinstance(critic, Critic):
        values = critic.hidden_values(passes.packed, hidden)
    else:
        values = critic(sequences, attention_mask)
    batch, length = sequences.shape
    came = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
    if came == (batch, length) and num_actions < length:
        values = values[:, length - num_actions - 1 : length - 1]
    elif came != (batch, num_actions):
        raise DataError(
            f"the critic {type(critic).__name__} must return [{batch}, {length}] (one value for each token) "
            f"or [{batch}, {num_actions}] (one for each response token), got {came}."
        )
    return values

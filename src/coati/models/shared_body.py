"""Models that share a body: it is run once, and each of them applies its own head to the same hidden states.

A reward model is often the reference with a head of its own, and two reward models may be two heads. If such models are
made with one body module, scoring runs that once for all of them; `take_body_of` makes it one module where two hold the
same weights. The results are those of separate passes to the bit: the same rows go through the same layers in the same
parts, and only once.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from coati.models.actor import Actor, packed_scoring_problem, unwrap
from coati.models.critic import Critic
from coati.models.packing import PackedRows, base_of, packed_hidden, packing_problem
from coati.models.reward_model import RewardModel
from coati.models.value_head import ValueHeadModel

# What a config says of heads, files and generation, and not of how a body computes.
_NOT_OF_THE_BODY = (
    "_name_or_path",
    "architectures",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "id2label",
    "label2id",
    "num_labels",
    "pad_token_id",
    "problem_type",
    "tie_word_embeddings",
    "torch_dtype",
    "transformers_version",
    "use_cache",
)


def body_of(model: nn.Module) -> nn.Module | None:
    """The decoder of a policy, critic or reward model whose head can be applied to its hidden states.

    None for a model that does more than that, or that has to be called as a whole.
    """
    if isinstance(model, ValueHeadModel):
        if type(model) not in (Critic, RewardModel) or _does_more(model):
            return None
        if isinstance(model, FSDPModule) or packing_problem(model.body):
            return None
        body: nn.Module = base_of(model.body).base_model
    elif packed_scoring_problem(model) or _is_somebodys_own(model):
        return None
    else:
        body = base_of(unwrap(model)).base_model
    return None if isinstance(body, FSDPModule) else body


def _is_somebodys_own(policy: nn.Module) -> bool:
    """Whether a call of this policy may do more than our own code for it: a subclass of `Actor`, or hooks around it."""
    inner = unwrap(policy)
    for module in policy.modules():  # from the outermost wrapper on
        if module is inner:
            return False
        is_subclass = isinstance(module, Actor) and type(module) is not Actor
        if is_subclass or _does_more(module):
            return True
    return True


def _does_more(module: nn.Module) -> bool:
    """Whether somebody has hooked into a call of this module, or replaced its forward pass."""
    return bool(module._forward_hooks or module._forward_pre_hooks) or "forward" in vars(module)


def shared_bodies(models: Iterable[nn.Module | None]) -> set[nn.Module]:
    """The bodies that more than one of the models has."""
    distinct = {id(model): model for model in models if model is not None}
    counts = Counter(body for model in distinct.values() if (body := body_of(model)) is not None)
    return {body for body, count in counts.items() if count > 1}


class SharedPasses:
    """One pass of each shared body over some rows, made when somebody first asks for it."""

    def __init__(self, bodies: Collection[nn.Module], sequences: Tensor, attention_mask: Tensor) -> None:
        self._bodies = bodies
        self._hidden: dict[nn.Module, Tensor] = {}
        if bodies:
            self.packed = PackedRows.of(sequences, attention_mask)

    def hidden_of(self, model: nn.Module) -> Tensor | None:
        """The hidden states that this model would compute, [T, d]; None if its body is its own."""
        if not self._bodies or len(self.packed) == 0:
            return None
        body = body_of(model)
        if body is None or body not in self._bodies:
            return None
        if body not in self._hidden:
            self._hidden[body] = packed_hidden(body, self.packed)
        return self._hidden[body]


def take_body_of(model: ValueHeadModel, others: Sequence[nn.Module]) -> nn.Module | None:
    """Give a model the body of the first of the others that holds exactly the same one, and return that other.

    Only for models whose weights never change. The model's own body is let go.
    """
    own = body_of(model)
    for other in others:
        body = body_of(other)
        if own is not None and body is not None and body is not own and _is_same(own, body):
            model.body = body
            return other
    return None


def _is_same(one: nn.Module, other: nn.Module) -> bool:
    """Whether two bodies compute the same: class, settings, and every bit of their weights."""
    if type(one) is not type(other) or _settings(one) != _settings(other):
        return False
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(_are_equal(tensor, theirs[name]) for name, tensor in ours.items())


def _are_equal(one: Tensor, other: Tensor) -> bool:
    if one.is_meta or other.is_meta or (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(one, other.to(one.device))


def _settings(body: Any) -> dict[str, Any]:
    return {name: value for name, value in body.config.to_dict().items() if name not in _NOT_OF_THE_BODY}

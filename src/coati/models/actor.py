"""The policy: a transformers causal LM, and the scoring code that maker, learner and evaluation share.

Known models are called with packed rows and scored from hidden states, all others with padding and from their logits.
"""

import contextlib
import dataclasses
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from coati.algos.logprobs import head_logprobs_and_entropy, logprobs_and_entropy
from coati.config import LoRASettings
from coati.models.calls import accepts, forward_causal, load_or_copy_config
from coati.models.lora import add_lora
from coati.models.memory import copy_mapped_weights, wants_shapes_only
from coati.models.packing import PackedRows, base_of, log_padding_once, packed_hidden, packing_problem
from coati.models.tiles import active_tile, batch_invariant


@dataclasses.dataclass(frozen=True)
class Scoring:
    """What a model computes instead of logits. Not a tuple, because sharding would cast the tensors in it."""

    num_actions: int
    temperatures: Tensor | None = None  # [B]; None for 1
    with_entropy: bool = False


class Actor(nn.Module):
    """A policy: wraps a transformers causal LM, which stays available as `.model`.

    >>> from transformers import LlamaConfig
    >>> config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
    ...                      num_key_value_heads=1, vocab_size=11, max_position_embeddings=16)
    >>> actor = Actor.from_config(config)
    >>> actor(torch.tensor([[1, 2, 3]])).logits.shape
    torch.Size([1, 3, 11])
    """

    def __init__(self, model: PreTrainedModel, *, lora: LoRASettings | None = None) -> None:
        super().__init__()
        self.model = add_lora(model, lora, task="CAUSAL_LM")

    @classmethod
    def from_pretrained(cls, path: str | Path, *, lora: LoRASettings | None = None, **kwargs: Any) -> Self:
        """Load from a folder or a hub name; `kwargs` are passed to `AutoModelForCausalLM.from_pretrained`."""
        if wants_shapes_only(kwargs):
            return cls.from_config(path, lora=lora, **kwargs)
        kwargs.setdefault("trust_remote_code", False)  # by default transformers would prompt on the terminal
        return cls(copy_mapped_weights(AutoModelForCausalLM.from_pretrained(str(path), **kwargs)), lora=lora)

    @classmethod
    def from_config(
        cls, config: PreTrainedConfig | str | Path, *, lora: LoRASettings | None = None, **kwargs: Any
    ) -> Self:
        """Create a model with random weights from a transformers config, or from the path of one."""
        own = load_or_copy_config(config, trust_remote_code=kwargs.get("trust_remote_code", False))
        with torch.device("meta") if wants_shapes_only() else contextlib.nullcontext():
            return cls(AutoModelForCausalLM.from_config(own, **kwargs), lora=lora)

    @property
    def config(self) -> PreTrainedConfig:
        """The transformers config of the wrapped model."""
        return self.model.config

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, *, scoring: Scoring | None = None, **kwargs: Any
    ) -> Any:
        """Return the wrapped model's output. Positions count real tokens only, so left padding has no effect.

        With `scoring`, return the log-probs and entropies that it asks for; `action_logprobs` checks the model first.
        """
        if scoring is not None:
            return score_actions(self.model, input_ids, attention_mask, scoring)
        return forward_causal(self.model, input_ids, attention_mask, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Call `generate` of the wrapped model."""
        return self.model.generate(*args, **kwargs)

    def save_pretrained(self, path: str | Path, **kwargs: Any) -> None:
        """Write a folder that transformers can load (peft, if the actor has LoRA adapters)."""
        if (state_dict := kwargs.get("state_dict")) is not None:
            kwargs["state_dict"] = {name.removeprefix("model."): value for name, value in state_dict.items()}
        self.model.save_pretrained(str(path), **kwargs)


def action_logprobs(
    actor: nn.Module,
    sequences: Tensor,  # [B, S]
    attention_mask: Tensor | None,  # [B, S]
    num_actions: int,
    *,
    temperatures: Tensor | None = None,  # [B]
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return log-probs and, if asked for, entropies of the last `num_actions` tokens, [B, A] each; padding gets 0."""
    if num_actions == 0:
        empty = torch.zeros(sequences.shape[0], 0, device=sequences.device)
        return empty, (empty if with_entropy else None)
    scoring = Scoring(num_actions, temperatures, with_entropy)
    inner = unwrap(actor)
    if problem := packed_scoring_problem(actor):
        log_padding_once(type(inner).__name__, problem)
        return score_padded(actor, sequences, attention_mask, scoring, inner=inner)
    if inner is actor:
        return score_actions(actor, sequences, attention_mask, scoring)
    # Call through every wrapper: their hooks gather weights and reduce gradients.
    scores: tuple[Tensor, Tensor | None] = actor(sequences, attention_mask, scoring=scoring)
    return scores


def packed_scoring_problem(actor: nn.Module) -> str | None:
    """Return why `action_logprobs` has to compute padding and full logits for this policy; None if it does not."""
    inner = unwrap(actor)
    if isinstance(inner, FSDPModule) or not (inner is actor or isinstance(_without_ddp(actor), Actor)):
        return "FSDP or DDP needs a call of the whole model to gather weights or reduce gradients; wrap it in Actor"
    if inner is actor and "forward" in vars(inner):
        return "its forward method was replaced, and packed rows would bypass it; wrap it in Actor"
    return scoring_problem(inner)


def _without_ddp(module: nn.Module) -> nn.Module:
    while hasattr(module, "module") and isinstance(module.module, nn.Module):
        module = module.module
    return module


def unwrap(module: nn.Module) -> nn.Module:
    """Return the transformers model inside an `Actor`, which may itself be inside a DDP wrapper."""
    module = _without_ddp(module)
    return module.model if isinstance(module, Actor) else module


def scoring_problem(model: nn.Module) -> str | None:
    """Return why this model has to be scored from its logits; None if its hidden states are enough."""
    if problem := packing_problem(model):
        return problem
    if getattr(base_of(model).config, "final_logit_softcapping", None) is not None:
        return "its logits are capped (final_logit_softcapping)"
    head: Any = base_of(model).get_output_embeddings()
    if type(head) is not nn.Linear:
        return f"its output head is a {type(head).__name__}, not a plain nn.Linear"
    if head._forward_hooks or head._forward_pre_hooks:
        return "its output head has forward hooks"
    return None


def max_rounding_gap(dtype: torch.dtype) -> float:
    """Return the largest mean difference of log-probs that rounding explains in models of this dtype."""
    return 1e-3 if dtype in (torch.float32, torch.float64) else 0.1


def score_actions(
    model: nn.Module, sequences: Tensor, attention_mask: Tensor | None, scoring: Scoring
) -> tuple[Tensor, Tensor | None]:
    """Return log-probs and, if asked for, entropies, [B, A] each, from a model without a `scoring_problem`.

    Padding gets 0, and so does the first token of a row.
    """
    with batch_invariant(model, sequences):
        packed = PackedRows.of(sequences, attention_mask)
        if len(packed) == 0:
            return score_padded(model, sequences, attention_mask, scoring)
        at, rows, columns = packed.actions(scoring.num_actions)  # before the model runs: this waits for the device
        hidden = packed.at(packed_hidden(model, packed), at - 1)  # [n, d]
        tokens, of_rows = packed.tokens[at], rows
        if tile := active_tile():  # pad to whole tiles
            missing = -len(at) % tile
            hidden = F.pad(hidden, (0, 0, 0, missing))
            tokens, of_rows = F.pad(tokens, (0, missing)), F.pad(rows, (0, missing))
    head = base_of(model).get_output_embeddings()
    temperatures = scoring.temperatures
    logprobs, entropy = head_logprobs_and_entropy(
        hidden,
        head.weight,
        tokens,
        bias=head.bias,
        temperature=1.0 if temperatures is None else temperatures[of_rows],
        with_entropy=scoring.with_entropy,
        chunk_tokens=tile,
    )
    empty = logprobs.new_zeros(packed.shape[0], scoring.num_actions)
    logprobs = empty.index_put((rows, columns), logprobs[: len(at)])
    return logprobs, None if entropy is None else empty.index_put((rows, columns), entropy[: len(at)])


def score_padded(
    model: nn.Module,
    sequences: Tensor,
    attention_mask: Tensor | None,
    scoring: Scoring,
    *,
    inner: nn.Module | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return what `score_actions` returns, but from the logits of any policy.

    `inner` is the model below any wrappers; its `forward` determines which arguments are passed.
    """
    # Only response positions are needed.
    kept = {"logits_to_keep": scoring.num_actions + 1} if accepts(inner or model, "logits_to_keep") else {}
    output = forward_causal(model, sequences, attention_mask, inner=inner, **kept)
    logits = output if isinstance(output, Tensor) else output["logits"]
    # The logits at position t score the token at t + 1. The last ones score nothing, but cutting them off would copy.
    logprobs, entropy = logprobs_and_entropy(
        logits[:, -scoring.num_actions - 1 :],
        F.pad(sequences[:, -scoring.num_actions :], (0, 1)),
        temperature=1.0 if scoring.temperatures is None else scoring.temperatures,
        with_entropy=scoring.with_entropy,
    )
    logprobs, entropy = logprobs[:, :-1], None if entropy is None else entropy[:, :-1]
    if attention_mask is None:
        return logprobs, entropy
    is_padding = attention_mask[:, -scoring.num_actions :] == 0
    return logprobs.masked_fill(is_padding, 0.0), None if entropy is None else entropy.masked_fill(is_padding, 0.0)

"""The policy: a transformers causal language model, with or without LoRA adapters."""

import contextlib
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel

from coati.algos import logprobs_and_entropy
from coati.models.deferred import build_deferred
from coati.models.lora import LoRASettings, add_lora
from coati.models.positions import accepts, context_length_of, position_ids_from_mask


class Actor(nn.Module):
    """Wraps a ready transformers causal LM; everything else of the model stays reachable through `.model`.

    >>> from transformers import LlamaConfig
    >>> config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
    ...                      num_key_value_heads=1, vocab_size=11, max_position_embeddings=16)
    >>> actor = Actor.from_config(config)
    >>> actor(torch.tensor([[1, 2, 3]])).logits.shape
    torch.Size([1, 3, 11])
    """

    def __init__(self, model: PreTrainedModel, *, lora: LoRASettings | None = None) -> None:
        super().__init__()
        self.model = add_lora(model, lora, task="CAUSAL_LM") if lora is not None else model

    @classmethod
    def from_pretrained(cls, path: str | Path, *, lora: LoRASettings | None = None, **kwargs: Any) -> Self:
        """Load from a folder or a hub name; `kwargs` go to `AutoModelForCausalLM.from_pretrained`."""
        deferred = build_deferred(
            lambda: cls(_causal_without_weights(str(path), **kwargs), lora=lora), weights_of=path, options=kwargs
        )
        return deferred or cls(AutoModelForCausalLM.from_pretrained(str(path), **kwargs), lora=lora)

    @classmethod
    def from_config(
        cls, config: PreTrainedConfig | str | Path, *, lora: LoRASettings | None = None, **kwargs: Any
    ) -> Self:
        """Fresh random weights from a transformers config, or from the path of one."""
        if isinstance(config, str | Path):
            config = AutoConfig.from_pretrained(str(config))
        deferred = build_deferred(
            lambda: cls(AutoModelForCausalLM.from_config(config, **kwargs), lora=lora), weights_of=None
        )
        return deferred or cls(AutoModelForCausalLM.from_config(config, **kwargs), lora=lora)

    @property
    def config(self) -> PreTrainedConfig:
        """The transformers config of the wrapped model."""
        return self.model.config

    @property
    def context_length(self) -> int | None:
        """How many tokens fit the model, or None where the model does not say."""
        return context_length_of(self.model)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        """The wrapped model's output. Positions count real tokens only, so left padding cannot matter."""
        return forward_causal(self.model, input_ids, attention_mask, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """`generate` of the wrapped model."""
        return self.model.generate(*args, **kwargs)

    def save_pretrained(self, path: str | Path, **kwargs: Any) -> None:
        """Write a folder that transformers loads (peft, if the actor has LoRA adapters)."""
        if (state_dict := kwargs.get("state_dict")) is not None:
            kwargs["state_dict"] = {name.removeprefix("model."): value for name, value in state_dict.items()}
        self.model.save_pretrained(str(path), **kwargs)


def _causal_without_weights(path: str, **kwargs: Any) -> PreTrainedModel:
    """What `from_pretrained` makes, before it loads the weights."""
    model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), **kwargs)
    with contextlib.suppress(OSError):  # a folder need not have one
        model.generation_config = GenerationConfig.from_pretrained(path)
    return model.eval()


def forward_causal(model: nn.Module, input_ids: Tensor, attention_mask: Tensor | None, **kwargs: Any) -> Any:
    """Call a causal LM, wrapped or not, so that padding on the left does not shift its positions."""
    inner = unwrap(model)
    if attention_mask is not None and "position_ids" not in kwargs and accepts(inner, "position_ids"):
        kwargs["position_ids"] = position_ids_from_mask(attention_mask)
    if accepts(inner, "use_cache"):
        kwargs.setdefault("use_cache", False)
    if not accepts(inner, "input_ids"):  # a hand-written module may call its arguments what it likes
        return model(input_ids, attention_mask, **kwargs)
    return model(input_ids=input_ids, attention_mask=attention_mask, **kwargs)


def action_logprobs(
    actor: nn.Module,
    sequences: Tensor,  # [B, S]
    attention_mask: Tensor | None,  # [B, S]
    num_actions: int,
    *,
    temperatures: Tensor | None = None,  # [B]
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """log-probs (and entropies) of the last `num_actions` tokens, [B, A], by the code that everyone shares.

    Maker and learner both call this, so they agree on the same weights to the last bit. Only the logits of
    response positions are computed, where the model lets us ask for that.
    """
    if num_actions == 0:
        empty = torch.zeros(sequences.shape[0], 0, device=sequences.device)
        return empty, (empty if with_entropy else None)
    kwargs: dict[str, Any] = {}
    if accepts(unwrap(actor), "logits_to_keep"):
        kwargs["logits_to_keep"] = num_actions + 1
    output = forward_causal(actor, sequences, attention_mask, **kwargs)
    logits = output if isinstance(output, Tensor) else output["logits"]
    # The logits at position t score the token at t + 1.
    logits = logits[:, -num_actions - 1 : -1]
    temperature: float | Tensor = 1.0 if temperatures is None else temperatures
    return logprobs_and_entropy(logits, sequences[:, -num_actions:], temperature=temperature, with_entropy=with_entropy)


def unwrap(module: nn.Module) -> nn.Module:
    """The transformers model inside an `Actor`, a DDP wrapper, or both."""
    while True:
        if hasattr(module, "module") and isinstance(module.module, nn.Module):  # DistributedDataParallel
            module = module.module
        elif isinstance(module, Actor):
            module = module.model
        else:
            return module

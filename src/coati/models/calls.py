"""Calling conventions of transformers models: configs, arguments, positions and limits."""

import copy
import functools
import inspect
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig

from coati.models.packing import base_of


def load_or_copy_config(config: PreTrainedConfig | str | Path, *, trust_remote_code: bool = False) -> PreTrainedConfig:
    """Load a config from its path, or copy it: transformers writes into configs, so models must not share one."""
    if isinstance(config, str | Path):
        loaded: PreTrainedConfig = AutoConfig.from_pretrained(str(config), trust_remote_code=trust_remote_code)
        return loaded
    return copy.deepcopy(config)


def forward_causal(
    model: nn.Module, input_ids: Tensor, attention_mask: Tensor | None, *, inner: nn.Module | None = None, **kwargs: Any
) -> Any:
    """Call a causal LM, wrapped or not, such that left padding does not shift positions."""
    inner = inner or model
    if attention_mask is not None and "position_ids" not in kwargs and accepts(inner, "position_ids"):
        kwargs["position_ids"] = position_ids_from_mask(attention_mask)
    if accepts(inner, "use_cache"):
        kwargs.setdefault("use_cache", False)
    if not accepts(inner, "input_ids"):  # a custom module may name its arguments differently
        return model(input_ids, attention_mask, **kwargs)
    return model(input_ids=input_ids, attention_mask=attention_mask, **kwargs)


def position_ids_from_mask(attention_mask: Tensor) -> Tensor:
    """Return positions that count real tokens only: left padding gets 0, the first real token 0, the next 1, …

    >>> position_ids_from_mask(torch.tensor([[0, 0, 1, 1]]))
    tensor([[0, 0, 0, 1]])
    """
    return (attention_mask.long().cumsum(dim=-1) - 1).clamp_min(0)


def accepts(model: Any, name: str) -> bool:
    """Return whether `model.forward` takes an argument of this name; looks inside a peft wrapper."""
    model_class: Any = type(base_of(model))
    return name in _parameters_of(model_class)


@functools.lru_cache(maxsize=256)
def _parameters_of(model_class: Any) -> frozenset[str]:
    return frozenset(inspect.signature(model_class.forward).parameters)


def context_length_of(model: nn.Module | PreTrainedConfig) -> int | None:
    """Return the context length in tokens of a model, or of a model with this config; None if the config has none."""
    config: Any = getattr(model, "config", model)
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    length = getattr(text_config, "max_position_embeddings", None)
    return length if isinstance(length, int) and length > 0 else None


def last_real_position(attention_mask: Tensor) -> Tensor:
    """Return the index of the last real token of each row, [B]; 0 for a row of padding."""
    positions = torch.arange(attention_mask.shape[1], device=attention_mask.device)
    return (attention_mask.ne(0).long() * positions).amax(dim=1)

"""LoRA through peft: how adapters get onto a model, and off it again."""

import copy
import dataclasses
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from coati.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoRASettings:
    """Low-rank adapters: W = W₀ + (alpha / rank) · B·A, with W₀ frozen."""

    rank: int
    alpha: float = 16.0
    dropout: float = 0.0
    target_modules: tuple[str, ...] = ()
    """Names of the layers that get an adapter; empty means all linear layers but the output head."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigError(f"lora.rank must be 1 or more, got {self.rank}. Leave LoRA out to train all weights.")
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(f"lora.dropout must be in [0, 1), got {self.dropout}.")


def add_lora(model: PreTrainedModel | nn.Module, settings: LoRASettings, *, task: str) -> Any:
    """The model with peft adapters; only they are trainable. B starts at zero, so the function is unchanged."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=list(settings.target_modules) or "all-linear",
        task_type=task,
    )
    return get_peft_model(model, config)


def has_adapters(model: nn.Module) -> bool:
    """Whether any layer of the model carries a LoRA adapter."""
    return any("lora_" in name for name, _ in model.named_parameters())


def copy_without_adapters(model: nn.Module) -> Any:
    """A copy of the transformers model as it was before `add_lora`."""
    duplicate = copy.deepcopy(model)
    return duplicate.unload() if hasattr(duplicate, "unload") else duplicate

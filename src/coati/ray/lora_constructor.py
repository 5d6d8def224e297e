"""The contract's import path for `LoRAConstructor`, which `coati.models.lora` defines. Needs no Ray."""

from coati.models.lora import LayerLoRA, LoRAConstructor

__all__ = ["LayerLoRA", "LoRAConstructor"]

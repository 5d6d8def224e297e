"""Where the seed documents' code looks for `LoRAConstructor`; it lives with the models and needs no Ray."""

from coati.models.lora import LayerLoRA, LoRAConstructor

__all__ = ["LayerLoRA", "LoRAConstructor"]

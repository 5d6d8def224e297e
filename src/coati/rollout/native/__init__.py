"""The native engine: generation for decoders of the Llama shape.

Slots of a key-value cache, and the model's own forward pass, one token at a time.
"""

from coati.rollout.native.loop import NativeEngine, config_of

__all__ = ["NativeEngine", "config_of"]

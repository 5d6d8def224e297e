"""The native engine: slots of a preallocated key-value cache, and the model's own forward pass, one token at a time."""

from coati.rollout.native.engine import NativeEngine

__all__ = ["NativeEngine"]

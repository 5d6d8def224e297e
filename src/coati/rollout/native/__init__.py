"""The native engine: generation for the decoders that `blocks.py` can describe.

A paged key-value cache, and the model's own forward pass, one token at a time.
"""

from coati.rollout.native.decoder import config_of
from coati.rollout.native.loop import NativeEngine

__all__ = ["NativeEngine", "config_of"]

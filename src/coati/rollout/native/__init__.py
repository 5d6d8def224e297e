"""The native engine: fast generation for the decoders that `blocks.py` can describe.

It runs the model's own layers with a paged KV cache, one token at a time.
"""

from coati.rollout.native.decoder import config_of
from coati.rollout.native.loop import NativeEngine

__all__ = ["NativeEngine", "config_of"]

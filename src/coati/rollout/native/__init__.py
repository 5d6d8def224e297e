"""The native engine: generation for decoders of the Llama shape, without transformers' `generate`.

`NativeEngine` keeps prompts and responses in slots of a preallocated key-value cache; `Decoder` is the model's own
forward pass, written for one new token at a time. Models of another shape, and options that need `generate`, go to the
reference engine, and it is said once why.
"""

from coati.rollout.native.decoder import Decoder, unsupported_reason
from coati.rollout.native.engine import NativeEngine

__all__ = ["Decoder", "NativeEngine", "unsupported_reason"]

"""The contract's import path of names that `coati.experience` and `coati.batching` define."""

from coati.batching import make_experience_batch, split_experience_batch
from coati.experience import BufferItem

__all__ = ["BufferItem", "make_experience_batch", "split_experience_batch"]

"""The names of a sample in the buffer, under the contract's import path. They are defined in `coati.experience`."""

from coati.experience import BufferItem, make_experience_batch, split_experience_batch

__all__ = ["BufferItem", "make_experience_batch", "split_experience_batch"]

"""Samples on their way from makers to trainers: single items, and the buffers that make batches of them."""

from coati.batching import make_experience_batch, split_experience_batch
from coati.experience import BufferItem

__all__ = ["BufferItem", "make_experience_batch", "split_experience_batch"]

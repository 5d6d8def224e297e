"""Samples on their way from makers to trainers: single items, and the buffers that make batches of them."""

from coati.experience import BufferItem, make_experience_batch, split_experience_batch

__all__ = ["BufferItem", "make_experience_batch", "split_experience_batch"]

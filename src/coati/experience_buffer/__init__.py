"""Samples on their way from makers to trainers: single items, and batches of them."""

from coati.experience import BufferItem, make_experience_batch, split_experience_batch
from coati.experience_buffer.collector import BatchCollector

__all__ = ["BatchCollector", "BufferItem", "make_experience_batch", "split_experience_batch"]

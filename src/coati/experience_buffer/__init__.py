"""Samples on their way from makers to trainers: single items, and batches of them."""

from coati.experience_buffer.collector import BatchCollector
from coati.experience_buffer.utils import BufferItem, make_experience_batch, split_experience_batch

__all__ = ["BatchCollector", "BufferItem", "make_experience_batch", "split_experience_batch"]

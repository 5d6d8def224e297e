"""Names under the contract's import path; `coati.experience` and `coati.batching` define them."""

from coati.batching import make_experience_batch, split_experience_batch
from coati.experience import BufferItem

__all__ = ["BufferItem", "make_experience_batch", "split_experience_batch"]

"""The paged KV cache: its memory, and the allocation of pages to samples.

A page holds the keys and values of a fixed number of positions. Samples of the same prompt share the pages that the
prompt fills completely; each sample has its own pages from the one in which the prompt ends. Page 0 belongs to no
sample: slots without a sample write to it.

On a GPU pages are short, and the cache grows with the number of tokens. On a CPU a page is as long as the longest text,
so that attention reads the keys of a slot without copying them; for small models pages are columns (see `columns`).
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

MEMORY_SHARE = 0.5  # share of a GPU's free memory to use. The rest is for prefill, and for other processes on the GPU.
# Initial number of pages on a GPU, and the minimum factor to grow by, because growing copies the cache.
_INITIAL_PAGES = 64
_MIN_GROWTH = 1.25


def enlarged(tensor: Tensor, *shape: int) -> Tensor:
    """Return a tensor of this shape with the old one in its corner, and zeros elsewhere."""
    larger = tensor.new_zeros(shape)
    larger[tuple(map(slice, tensor.shape))] = tensor
    return larger


class PagedCache:
    """Keys and values of every layer, [P, K, S, D] each (P pages of S positions), and the users of each page."""

    def __init__(
        self, num_layers: int, num_heads: int, head_dim: int, like: Tensor, *, are_columns: bool = False
    ) -> None:
        self._are_columns = are_columns
        empty = like.new_zeros(0, num_heads, 0, head_dim)
        self.keys, self.values = [empty] * num_layers, [empty] * num_layers
        self.columns: list[NDArray[Any]] = [np.empty(0)] * num_layers
        """Keys and values of each layer in one array, [S, 2K, D, P], if they are columns."""
        self.num_pages = self.page_size = 0
        self._free: list[int] = []  # a heap, so that the first slots get the first pages
        self._num_users: Counter[int] = Counter()
        self._of_prompts: dict[tuple[int, ...], list[int]] = {}
        self._prompts: dict[int, tuple[int, ...]] = {}  # by the first page

    def tensors(self) -> tuple[Tensor, ...]:
        """Return keys and values of all layers."""
        return *self.keys, *self.values

    def layers(self) -> Iterable[tuple[Tensor, Tensor]]:
        """Return keys and values of each layer."""
        return zip(self.keys, self.values, strict=True)

    def enlarge(self, num_pages: int, page_size: int) -> None:
        """Grow to at least `num_pages` pages, including page 0, of at least `page_size` positions."""
        num_pages, page_size = max(num_pages, self.num_pages), max(page_size, self.page_size)
        if self._are_columns and (num_pages, page_size) != (self.num_pages, self.page_size):
            self._enlarge_columns(num_pages, page_size)
        for tensors in () if self._are_columns else (self.keys, self.values):
            for index, (pages, num_heads, size, head_dim) in enumerate([tensor.shape for tensor in tensors]):
                # an earlier attempt that ran out of memory may have enlarged this tensor already
                shape = (max(pages, num_pages), num_heads, max(size, page_size), head_dim)
                if tensors[index].shape != shape:
                    tensors[index] = enlarged(tensors[index], *shape)
        for page in range(max(1, self.num_pages), num_pages):
            heapq.heappush(self._free, page)
        self.num_pages, self.page_size = num_pages, page_size

    def _enlarge_columns(self, num_pages: int, page_size: int) -> None:
        for index, (keys, values) in enumerate(self.layers()):
            # an earlier attempt that ran out of memory may have enlarged this layer already
            pages, num_heads, size, head_dim = keys.shape
            pages, size = max(pages, num_pages), max(size, page_size)
            rows = keys.new_zeros(size, 2 * num_heads, head_dim, pages)
            larger = rows.permute(3, 1, 0, 2)
            larger[: len(keys), :, : keys.shape[2]] = torch.cat([keys, values], dim=1)
            self.keys[index], self.values[index] = larger[:, :num_heads], larger[:, num_heads:]
            self.columns[index] = rows.numpy()

    def _affordable(self, missing: int) -> int:
        """Return the number of pages to grow to if `missing` are missing: on a GPU up to a share of its memory."""
        if not (key := self.keys[0]).is_cuda:
            return self.num_pages
        free, _ = torch.cuda.mem_get_info(key.device)
        free += torch.cuda.memory_reserved(key.device) - torch.cuda.memory_allocated(key.device)
        page_bytes = 2 * len(self.keys) * key.shape[1] * self.page_size * key.shape[3] * key.element_size()
        most = int(MEMORY_SHARE * (free / page_bytes + self.num_pages))
        wanted = min(max(2 * self.num_pages, self.num_pages + missing + 1, _INITIAL_PAGES), most)
        return wanted if wanted >= _MIN_GROWTH * self.num_pages else self.num_pages

    def covering(self, num_positions: int) -> int:
        """Return the number of pages for `num_positions` positions."""
        return -(-num_positions // self.page_size)

    def has_free(self, count: int) -> bool:
        """Return whether `count` pages are free, growing the cache if necessary."""
        if (missing := count - len(self._free)) > 0:
            self.enlarge(self._affordable(missing), self.page_size)
        return count <= len(self._free)

    def take(self, count: int) -> list[int]:
        """Allocate `count` free pages."""
        return self.use([heapq.heappop(self._free) for _ in range(count)])

    def use(self, pages: list[int]) -> list[int]:
        """Add a sample to the users of these pages, and return the pages."""
        self._num_users.update(pages)
        return pages

    def release(self, pages: list[int]) -> list[int]:
        """Remove a sample from the users of these pages; return the pages that are free now."""
        self._num_users.subtract(pages)
        freed = [page for page in pages if not self._num_users[page]]
        for page in freed:
            heapq.heappush(self._free, page)
            if (prompt := self._prompts.pop(page, None)) is not None:
                del self._of_prompts[prompt]
        return freed

    def prompt_pages(self, tokens: Sequence[int]) -> list[int]:
        """Return the pages that this prompt fills, if a sample has prefilled it with the current weights; else none."""
        return self._of_prompts.get(self._full_pages_of(tokens), [])

    def share_prompt(self, tokens: Sequence[int], pages: list[int]) -> None:
        """Let later samples of this prompt share those of these pages that the prompt fills."""
        if (full_pages := self._full_pages_of(tokens)) and full_pages not in self._of_prompts:
            self._of_prompts[full_pages] = pages[: len(full_pages) // self.page_size]
            self._prompts[pages[0]] = full_pages

    def forget_shared_prompts(self) -> None:
        """Stop sharing prompts, because their keys and values are of older weights."""
        self._of_prompts.clear()
        self._prompts.clear()

    def _full_pages_of(self, tokens: Sequence[int]) -> tuple[int, ...]:
        return tuple(tokens[: len(tokens) // self.page_size * self.page_size])

"""The paged cache: its memory, and which pages belong to which sample.

A page holds the keys and values of so many positions of a text. Samples of one prompt share the pages that the prompt
fills; the page in which it ends, and those after it, are each sample's alone. Page 0 is no sample's: slots without one
write there.

On a GPU pages are short and their number follows what is written. On a CPU a page is as long as the longest text, so
that attention reads a slot's keys as they lie.
"""

import heapq
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

# Of the memory that is free on a GPU: the rest is for passes over prompts, and for whoever shares the card.
MEMORY_SHARE = 0.5
# Pages of a GPU's cache to begin with, and how much larger it has to become to be worth another one.
_FEWEST_PAGES = 64
_LEAST_GROWTH = 1.25


def enlarged(tensor: Tensor, *shape: int) -> Tensor:
    """A tensor of this shape with the old one in its corner, and zeros elsewhere."""
    larger = tensor.new_zeros(shape)
    larger[tuple(map(slice, tensor.shape))] = tensor
    return larger


class PagedCache:
    """Keys and values of every layer, [P, K, S, D] each: P pages of S positions; and who has which pages."""

    def __init__(self, num_layers: int, num_heads: int, head_dim: int, like: Tensor) -> None:
        empty = like.new_zeros(0, num_heads, 0, head_dim)
        self.keys, self.values = [empty] * num_layers, [empty] * num_layers
        self.num_pages = self.page_size = 0
        self._free: list[int] = []  # a heap: the first slots get the first pages
        self._num_users: Counter[int] = Counter()
        self._of_prompts: dict[tuple[int, ...], list[int]] = {}
        self._prompts: dict[int, tuple[int, ...]] = {}  # by the first page

    def tensors(self) -> tuple[Tensor, ...]:
        """Keys and values."""
        return *self.keys, *self.values

    def enlarge(self, num_pages: int, page_size: int) -> None:
        """Have at least so many pages, page 0 among them, of at least so many positions."""
        num_pages, page_size = max(num_pages, self.num_pages), max(page_size, self.page_size)
        for tensors in (self.keys, self.values):
            for index, (pages, num_heads, size, head_dim) in enumerate([tensor.shape for tensor in tensors]):
                # an attempt that ran out of memory may have come this far, and further
                shape = (max(pages, num_pages), num_heads, max(size, page_size), head_dim)
                if tensors[index].shape != shape:
                    tensors[index] = enlarged(tensors[index], *shape)
        for page in range(max(1, self.num_pages), num_pages):
            heapq.heappush(self._free, page)
        self.num_pages, self.page_size = num_pages, page_size

    def _affordable(self, missing: int) -> int:
        """How many pages to have if so many are missing: on a GPU up to a share of its memory."""
        if not (key := self.keys[0]).is_cuda:
            return self.num_pages
        free, _ = torch.cuda.mem_get_info(key.device)
        free += torch.cuda.memory_reserved(key.device) - torch.cuda.memory_allocated(key.device)
        page_bytes = 2 * len(self.keys) * key.shape[1] * self.page_size * key.shape[3] * key.element_size()
        most = int(MEMORY_SHARE * (free / page_bytes + self.num_pages))
        wanted = min(max(2 * self.num_pages, self.num_pages + missing + 1, _FEWEST_PAGES), most)
        return wanted if wanted >= _LEAST_GROWTH * self.num_pages else self.num_pages

    def covering(self, num_positions: int) -> int:
        """How many pages so many positions need."""
        return -(-num_positions // self.page_size)

    def has_free(self, count: int) -> bool:
        """Whether so many pages are free, if need be after the cache has grown."""
        if (missing := count - len(self._free)) > 0:
            self.enlarge(self._affordable(missing), self.page_size)
        return count <= len(self._free)

    def take(self, count: int) -> list[int]:
        """Hand out free pages."""
        return self.use([heapq.heappop(self._free) for _ in range(count)])

    def use(self, pages: list[int]) -> list[int]:
        """Note one more sample that has these pages."""
        self._num_users.update(pages)
        return pages

    def release(self, pages: list[int]) -> list[int]:
        """Take pages back from one sample; those that are free now."""
        self._num_users.subtract(pages)
        freed = [page for page in pages if not self._num_users[page]]
        for page in freed:
            heapq.heappush(self._free, page)
            if (prompt := self._prompts.pop(page, None)) is not None:
                del self._of_prompts[prompt]
        return freed

    def of_prompt(self, tokens: Sequence[int]) -> list[int]:
        """The pages that this prompt fills, if a sample has read it by the weights as they are."""
        return self._of_prompts.get(self._filling(tokens), [])

    def keep_prompt(self, tokens: Sequence[int], pages: list[int]) -> None:
        """Let samples of this prompt that come later use these pages, as far as the prompt fills them."""
        if (filling := self._filling(tokens)) and filling not in self._of_prompts:
            self._of_prompts[filling] = pages[: len(filling) // self.page_size]
            self._prompts[pages[0]] = filling

    def forget_prompts(self) -> None:
        """Share no page that was read by other weights."""
        self._of_prompts.clear()
        self._prompts.clear()

    def _filling(self, tokens: Sequence[int]) -> tuple[int, ...]:
        return tuple(tokens[: len(tokens) // self.page_size * self.page_size])

"""Prefill: which texts one pass reads together, and where their keys and values are stored."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coati.experience import Sample
from coati.rollout.native.slots import on_device

# Maximum tokens per pass: enough for matrix products to run at full speed on a GPU, at little memory.
PASS_TOKENS = 16384


class PrefillBatch(NamedTuple):
    """Texts that one pass prefills, packed end to end: T tokens and W writes to the cache, some to several samples."""

    tokens: Tensor  # [T]
    positions: Tensor  # [T]: positions in their texts
    starts: Tensor  # [texts + 1] int32: start of each text, and the end of the last
    lengths: tuple[int, ...]
    which: Tensor  # [samples]: index of each sample's text
    sources: Tensor  # [W]: index of the token whose key and value are written
    pages: Tensor  # [W]: page to write to
    offsets: Tensor  # [W]: offset in that page
    num_past: int  # cached tokens before these, of a single text; else 0
    past: list[int]  # pages of that text


def text_of(sample: Sample) -> list[int]:
    """Return the tokens to prefill when a sample starts, or resumes after preemption."""
    return [*sample.tokens[sample.place.num_cached :], *sample.place.written]


def prefill_passes(samples: Sequence[Sample]) -> Iterator[list[Sample]]:
    """Yield the samples of each pass, in order; a sample with tokens in the cache is a pass by itself."""
    together: list[Sample] = []
    num_tokens, last = 0, list[int]()
    for sample in samples:
        text = text_of(sample)
        num_more = len(text) if text != last else 0  # samples of a prompt are adjacent
        is_alone = bool(sample.place.num_cached or (together and together[-1].place.num_cached))
        if together and (is_alone or num_tokens + num_more > PASS_TOKENS):
            yield together
            together, num_tokens, num_more = [], 0, len(text)
        together.append(sample)
        num_tokens, last = num_tokens + num_more, text
    if together:
        yield together


def prefill_batch_of(samples: Sequence[Sample], page_size: int, device: torch.device) -> PrefillBatch:
    """Build the pass that prefills these samples; each distinct text is computed once."""
    distinct: dict[tuple[int, ...], int] = {}
    which = [distinct.setdefault(tuple(text_of(sample)), len(distinct)) for sample in samples]
    lengths = tuple(map(len, distinct))
    num_past: int = samples[0].place.num_cached
    sizes, starts = np.array(lengths), np.array([0, *accumulate(lengths)])
    tokens = np.concatenate([np.array(text) for text in distinct])
    read = on_device(np.stack([tokens, _ranges(np.full_like(sizes, num_past), sizes)]), device)
    # What a sample writes starts behind the pages that another one fills.
    first = np.array([max(num_past, sample.place.num_shared * page_size) for sample in samples])
    counts = sizes[which] + num_past - first
    places = _ranges(first, counts)
    pages = [sample.place.pages for sample in samples]
    own_pages = np.repeat([0, *accumulate(map(len, pages[:-1]))], counts) + places // page_size
    sources = np.repeat(starts[which] - num_past, counts) + places
    written = on_device(np.stack([sources, np.concatenate(pages)[own_pages], places % page_size]), device)
    return PrefillBatch(
        tokens=read[0],
        positions=read[1],
        starts=on_device(starts.astype(np.int32), device),
        lengths=lengths,
        which=on_device(which, device),
        sources=written[0],
        pages=written[1],
        offsets=written[2],
        num_past=num_past,
        past=samples[0].place.pages,
    )


def _ranges(starts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return all numbers of several ranges, given the start and size of each."""
    ends = counts.cumsum()
    return np.arange(ends[-1]) + np.repeat(starts - (ends - counts), counts)

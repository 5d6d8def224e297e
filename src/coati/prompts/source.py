"""Batches from a data loader of the user's, pass after pass."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from coati.errors import DataError


def loader_batches(
    loader_fn: Callable[[], Iterable[Any]], num_epochs: int = 1, num_steps: int = 0, *, name: str = "this maker"
) -> Iterator[Any]:
    """Yield `num_steps` batches of as many passes as it takes, or else `num_epochs` passes over `loader_fn()`.

    >>> list(loader_batches(lambda: [1, 2], num_steps=3))
    [1, 2, 1]
    """
    passes = itertools.count() if num_steps > 0 else range(num_epochs)
    batches = (batch for _ in passes for batch in _one_pass(loader_fn, name))
    return itertools.islice(batches, num_steps) if num_steps > 0 else batches


def _one_pass(loader_fn: Callable[[], Iterable[Any]], name: str) -> Iterator[Any]:
    is_empty = True
    for batch in loader_fn():
        is_empty = False
        yield batch
    if is_empty:
        raise DataError(
            f"dataloader_fn() of maker {name} gave no batch. Is the dataset empty, or smaller than one batch with "
            "drop_last=True?"
        )

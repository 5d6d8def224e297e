"""Where a maker's work comes from without leases: a data loader of the user's."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from coati.errors import DataError
from coati.experience_maker.base import PromptBatch, WorkSource


class LoaderPrompts(WorkSource):
    """`num_steps` batches of as many passes over `loader_fn()` as it takes, or else `num_epochs` passes.

    >>> loader = [{"input_ids": [[1, 2], [3, 4]]}, {"input_ids": [[5]]}]
    >>> [len(prompts) for prompts in LoaderPrompts(lambda: loader, num_steps=3)]
    [2, 1, 2]
    """

    def __init__(
        self,
        loader_fn: Callable[[], Iterable[Any]],
        num_epochs: int = 1,
        num_steps: int = 0,
        *,
        maker: str = "this maker",
    ) -> None:
        self._loader_fn = loader_fn
        self._num_epochs = num_epochs
        self._num_steps = num_steps
        self._maker = maker

    def __iter__(self) -> Iterator[PromptBatch]:
        passes = itertools.count() if self._num_steps > 0 else range(self._num_epochs)
        batches = (PromptBatch.parse(batch) for _ in passes for batch in self._one_pass())
        return itertools.islice(batches, self._num_steps) if self._num_steps > 0 else batches

    def _one_pass(self) -> Iterator[Any]:
        is_empty = True
        for batch in self._loader_fn():
            is_empty = False
            yield batch
        if is_empty:
            raise DataError(
                f"dataloader_fn() of maker {self._maker} gave no batch. Is the dataset empty, or smaller than one "
                "batch with drop_last=True?"
            )

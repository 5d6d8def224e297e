"""Where a maker draws its batches from: a data loader that can be replaced between two batches.

When makers join or leave, the prompts are divided again: all makers are held, each says how far it has come, and each
gets another loader that begins at one common position. A batch that was drawn before is finished; no other maker gets
its prompts.
"""

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from coati.errors import DataError, DeadlineExceeded

LoaderFn = Callable[[], Iterable[Any]]

_SLICE_SECONDS = 1.0
_HOLD_SECONDS = 10.0  # how long `hold` waits for a batch that is being drawn


class PromptSource:
    """Draws batches in one thread and may be held and switched from another.

    >>> source = PromptSource("maker-0")
    >>> batches = source.batches(lambda: [1, 2, 3])
    >>> next(batches)
    1
    >>> source.switch(lambda: [7, 8])
    >>> list(batches)
    [7, 8]
    """

    def __init__(
        self, name: str, *, deadline_seconds: float = 1800.0, should_stop: Callable[[], bool] = lambda: False
    ) -> None:
        self._name = name
        self._deadline_seconds = deadline_seconds
        self._should_stop = should_stop
        self._changed = threading.Condition()
        self._is_held = False
        self._is_drawing = False
        self._num_switches = 0
        self._loader_fn: LoaderFn = tuple
        self._loader: Any = ()
        self._iterator: Iterator[Any] | None = None
        self._next_position = 0
        self._skipped_before: Counter[str] = Counter()
        self._counting = threading.Lock()  # guards the two before; never held while drawing

    @property
    def skipped(self) -> Counter[str]:
        """What all loaders so far have skipped, by reason, where they count it (as `PromptStream` does)."""
        with self._counting:
            return self._skipped_before + Counter(getattr(self._loader, "skipped", {}))

    def batches(self, loader_fn: LoaderFn, num_epochs: int = 1, num_steps: int = 0) -> Iterator[Any]:
        """Yield `num_steps` batches of as many passes as it takes, or else `num_epochs` passes over `loader_fn()`."""
        self._loader_fn = loader_fn
        passes = itertools.count() if num_steps > 0 else range(num_epochs)
        batches = (batch for _ in passes for batch in self._one_pass())
        return itertools.islice(batches, num_steps) if num_steps > 0 else batches

    def hold(self) -> int:
        """Draw nothing until `switch`; return the first position that is beyond all drawn.

        Raises:
            DeadlineExceeded: when a batch that is being drawn does not come soon; nothing is held then.
        """
        with self._changed:
            self._is_held = True
            if not self._changed.wait_for(lambda: not self._is_drawing, timeout=_HOLD_SECONDS):
                self._is_held = False
                self._changed.notify_all()
                raise DeadlineExceeded(
                    f"maker {self._name} has waited for its data loader for {_HOLD_SECONDS:g} s, so its prompts cannot "
                    "be divided again now. Try again later."
                )
            return self._next_position

    def switch(self, loader_fn: LoaderFn | None) -> None:
        """Draw again, from another loader unless it is None."""
        with self._changed:
            if loader_fn is not None:
                self._loader_fn, self._iterator = loader_fn, None
                self._num_switches += 1
            self._is_held = False
            self._changed.notify_all()

    def _one_pass(self) -> Iterator[Any]:
        is_empty = True
        self._iterator = None
        while (batch := self._draw()) is not None:
            is_empty = False
            yield batch
        if is_empty and not self._should_stop():
            raise DataError(
                f"dataloader_fn() of maker {self._name} gave no batch. Is the dataset empty, or smaller than one batch "
                "with drop_last=True?"
            )

    def _draw(self) -> Any:
        """Return the next batch; None at the end of the pass, or after a stop."""
        with self._changed:
            if not self._await_switch():
                return None
            self._is_drawing = True
            iterator, loader_fn, num_switches = self._iterator, self._loader_fn, self._num_switches
        batch = None
        try:  # without the lock: a slow loader must not block `hold` and `switch`
            if iterator is None:
                loader, skipped = loader_fn(), self.skipped
                with self._counting:
                    self._loader, self._skipped_before = loader, skipped
                iterator = iter(loader)
            batch = next(iterator, None)
        finally:
            with self._changed:
                self._is_drawing = False
                if num_switches == self._num_switches:
                    self._iterator = iterator
                group_ids = batch.get("group_ids") if isinstance(batch, Mapping) else None
                if group_ids is not None:
                    self._next_position = max(self._next_position, max(map(int, group_ids)) + 1)
                self._changed.notify_all()
        return batch

    def _await_switch(self) -> bool:
        for _ in range(max(1, round(self._deadline_seconds / _SLICE_SECONDS))):
            if self._changed.wait_for(lambda: not self._is_held, timeout=_SLICE_SECONDS):
                return True
            if self._should_stop():
                return False
        raise DeadlineExceeded(
            f"maker {self._name} waited {self._deadline_seconds:g} s for its prompts to be divided again."
        )

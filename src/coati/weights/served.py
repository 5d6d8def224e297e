"""The models that a maker serves, and the short critical section in which their weights change.

`use()` brackets work that must see a single version of the weights. An update is committed immediately if the models
are free; otherwise when that work ends. No lock is held while the models work.
"""

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from coati.errors import WeightUpdateError
from coati.monitor.timeline import Timeline
from coati.weights.message import copy_all

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifiedUpdate:
    """A complete update, ready to commit: tensors by (module, name), under the receiver's names."""

    version: int
    incarnation: int = 0  # of the sender
    tensors: Mapping[tuple[str, str], Tensor]
    is_full: bool  # whether it holds every weight of every module of the receiver


class ServedModels:
    """Guards modules that some threads use while others update them. Thread-safe.

    Versions increase; restarted trainers may return to an earlier version, but with a higher `incarnation`.
    """

    def __init__(self, modules: Mapping[str, nn.Module], *, name: str = "this maker") -> None:
        """`name` is the owner's name in error messages."""
        self.modules = dict(modules)
        self.name = name
        self._changed = threading.Condition()
        self._num_users = 0
        self._fault: str | None = None  # why a commit failed halfway, so that the models must not be used
        self._pending: VerifiedUpdate | None = None
        self.version = self.incarnation = 0  # of the current weights
        self.last_commit_seconds = 0.0  # duration of the last commit, during which the models were blocked
        self.is_synced = False  # whether a full update has been committed
        self.timeline = Timeline()  # the owner replaces it with its own

    @property
    def newest(self) -> tuple[int, int]:
        """Incarnation and version of the pending update, or of the current weights if none is pending."""
        with self._changed:
            newest = self._pending or self
            return newest.incarnation, newest.version

    @property
    def has_pending(self) -> bool:
        """Whether an update is waiting for the models to be free."""
        return self._pending is not None

    @contextlib.contextmanager
    def use(self) -> Iterator[int]:
        """Use the models; yields the version of their weights, which stays the same meanwhile."""
        with self._changed:
            self._commit_if_free()
            self._check_fault()
            self._num_users += 1
            version = self.version
        try:
            yield version
        finally:
            with self._changed:
                self._num_users -= 1
                try:
                    self._commit_if_free()
                except WeightUpdateError as error:
                    # The work that ends here used intact weights and must not be lost. The next `use` raises the fault.
                    logger.error("%s", error)

    def newest_weights(self, module: str) -> dict[str, Tensor]:
        """Return a module's weights, with those of the pending update in place of the current ones; not copied."""
        with self._changed:
            pending = {} if self._pending is None else self._pending.tensors
            waiting = {name: tensor for (label, name), tensor in pending.items() if label == module}
            return {**self.modules[module].state_dict(), **waiting}

    def offer(self, update: VerifiedUpdate) -> bool:
        """Commit an update as soon as the models are free; False if it is older than the current or pending one."""
        with self._changed:
            if (update.incarnation, update.version) < self.newest:
                return False
            if (old := self._pending) is not None:  # merge: the newer update wins for each weight
                tensors = {**old.tensors, **update.tensors}
                update = dataclasses.replace(update, tensors=tensors, is_full=old.is_full or update.is_full)
            self._pending = update
            self._commit_if_free()
            return True

    def wait_for_version(self, at_least: int, *, deadline_seconds: float) -> bool:
        """Wait until the version is `at_least` this one; False after the deadline. Raises if a commit has failed."""
        with self._changed:
            self._changed.wait_for(
                lambda: self.version >= at_least or self._fault is not None, timeout=deadline_seconds
            )
            if self.version < at_least:
                self._check_fault()
            return self.version >= at_least

    def wait_for_full_update(self, deadline_seconds: float) -> bool:
        """Wait for the first full update; False after the deadline."""
        with self._changed:
            return self._changed.wait_for(lambda: self.is_synced, timeout=deadline_seconds)

    def _check_fault(self) -> None:
        if self._fault is not None:
            raise WeightUpdateError(f"{self._fault}. Send a full update before the models serve again.")

    def _commit_if_free(self) -> None:
        """Commit the pending update, if any, unless the models are in use. Needs the lock."""
        if self._pending is None or self._num_users:
            return
        update, self._pending = self._pending, None
        started = time.perf_counter()
        try:
            with self.timeline.span("commit"):
                self._commit(update)
        except BaseException as error:
            # Only a device error can stop a verified copy halfway; a half-updated model must not be used.
            self._fault = f"{self.name} could not commit version {update.version}: {error}"
            raise
        finally:
            self.last_commit_seconds = time.perf_counter() - started
            self._changed.notify_all()

    @torch.no_grad()
    def _commit(self, update: VerifiedUpdate) -> None:
        states = {label: module.state_dict() for label, module in self.modules.items()}
        copy_all([states[label][name] for label, name in update.tensors], list(update.tensors.values()))
        if update.is_full:
            self._fault, self.is_synced = None, True
        self.version = self.timeline.version = update.version
        self.incarnation = update.incarnation  # last: a lock-free reader that reads it first gets no older version

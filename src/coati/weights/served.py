"""The models a maker serves from, and the short critical section in which they change.

`use()` brackets work that must see one version of the weights. An update is committed at once, when that work ends,
or where it calls `commit_point`. Nothing is locked across calls.
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
    """A whole update, ready to be committed: (module, name) to tensor, under the receiver's own names."""

    version: int
    incarnation: int = 0  # of the sender
    tensors: Mapping[tuple[str, str], Tensor]
    is_full: bool  # every weight of every module of the receiver


class ServedModels:
    """Guards modules that some threads work with and others update.

    Versions count up; trainers that were started again may go back, and their `incarnation` counts up.
    """

    def __init__(self, modules: Mapping[str, nn.Module], *, name: str = "this maker") -> None:
        """`name` is what errors call the owner of the models."""
        self.modules = dict(modules)
        self.name = name
        self._changed = threading.Condition()
        self._num_users = 0
        self._fault: str | None = None  # why the models are torn and must not serve
        self._pending: VerifiedUpdate | None = None
        self.version = self.incarnation = 0  # of the weights that serve now
        self.last_commit_seconds = 0.0  # how long the last commit kept the models busy
        self.is_synced = False  # whether all weights have come from a sender
        self.timeline = Timeline()  # replaced by the owner's

    @property
    def newest(self) -> tuple[int, int]:
        """Incarnation and version of the weights that will serve when the pending update is committed."""
        with self._changed:
            newest = self._pending or self
            return newest.incarnation, newest.version

    @property
    def has_pending(self) -> bool:
        """Whether an update waits until the models are free."""
        return self._pending is not None

    @contextlib.contextmanager
    def use(self) -> Iterator[int]:
        """Work with the models; yields the version that serves, until `commit_point` is called."""
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
                    # The work that ends here used whole weights and must not be lost. The next `use` raises the fault,
                    # and so does a wait for this version.
                    logger.error("%s", error)

    def newest_weights(self, module: str) -> dict[str, Tensor]:
        """A module's weights as they are, or as the pending update will make them; not copied."""
        with self._changed:
            pending = {} if self._pending is None else self._pending.tensors
            waiting = {name: tensor for (label, name), tensor in pending.items() if label == module}
            return {**self.modules[module].state_dict(), **waiting}

    def commit_point(self) -> int:
        """Commit a pending update between two steps of the caller's work, the only one; returns what serves now."""
        with self._changed:
            self._commit_if_free(num_own_users=1)
            return self.version

    def offer(self, update: VerifiedUpdate) -> bool:
        """Commit an update now or as soon as the models are free; False: it is older than what serves or waits."""
        with self._changed:
            if (update.incarnation, update.version) < self.newest:
                return False
            if (old := self._pending) is not None:  # the newer wins weight by weight
                tensors = {**old.tensors, **update.tensors}
                update = dataclasses.replace(update, tensors=tensors, is_full=old.is_full or update.is_full)
            self._pending = update
            self._commit_if_free()
            return True

    def wait_for_version(self, at_least: int, *, deadline_seconds: float) -> bool:
        """Wait until this version or a newer one serves; False after the deadline, an error if a commit has failed."""
        with self._changed:
            self._changed.wait_for(
                lambda: self.version >= at_least or self._fault is not None, timeout=deadline_seconds
            )
            if self.version < at_least:
                self._check_fault()
            return self.version >= at_least

    def wait_for_full_update(self, deadline_seconds: float) -> bool:
        """Wait for the first update of all modules; False after the deadline."""
        with self._changed:
            return self._changed.wait_for(lambda: self.is_synced, timeout=deadline_seconds)

    def _check_fault(self) -> None:
        if self._fault is not None:
            raise WeightUpdateError(f"{self._fault}. Send a full update before the models serve again.")

    def _commit_if_free(self, *, num_own_users: int = 0) -> None:
        """Copy the pending update, if there is one, into the models, if nothing else uses them."""
        if self._pending is None or self._num_users > num_own_users:
            return
        update, self._pending = self._pending, None
        started = time.perf_counter()
        try:
            with self.timeline.span("commit"):
                self._commit(update)
        except BaseException as error:
            # Verified weights do not fail to copy, devices do. Half a model must not serve.
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
        self.incarnation = update.incarnation  # last: who reads it first never takes an old version for a new one

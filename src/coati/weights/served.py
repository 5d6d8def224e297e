"""The models a maker serves from, and the short critical section in which they change.

`use()` brackets work that must see one version of the weights. An update offered meanwhile is committed when the work
ends, or before the next begins; an update offered while the models are free is committed at once. Nothing is locked
across calls.
"""

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from coati.errors import WeightUpdateError
from coati.monitor.timeline import Timeline
from coati.weights.canary import Canary, canary_fault
from coati.weights.transports import copy_all

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class VerifiedUpdate:
    """A whole update, ready to be committed: (module, name) to tensor, under the receiver's own names."""

    version: int | None  # None: a plain call, which carries no version
    source: str
    tensors: Mapping[tuple[str, str], Tensor]
    is_full: bool  # every weight of every module of the receiver
    incarnation: int | None = None  # of the sender; None: that of the weights before
    adopt: Callable[[], None] = lambda: None  # called on acceptance: its base weights are W₀ of later adapters
    canary: Canary | None = None  # what the actor must compute afterwards


class ServedModels:
    """Guards modules that some threads work with and others update.

    Versions count up: an update that carries none (a plain call) counts as the next one. Only trainers that were
    started again may go back, to where they continue; `incarnation` counts up with them.
    """

    def __init__(self, modules: Mapping[str, nn.Module], *, name: str = "this maker") -> None:
        """`name` is what errors call the owner of the models."""
        self.modules = dict(modules)
        self.name = name
        self._changed = threading.Condition()
        self._num_users = 0
        self._fault: str | None = None  # why the models are torn or wrong and must not serve
        self._pending: VerifiedUpdate | None = None
        self.version = 0  # of the weights that serve now
        self.newest_version = 0  # of those that will serve when the pending update is committed
        self.incarnation = self.newest_incarnation = 0  # of the trainers that both came from
        self.last_commit_seconds = 0.0  # how long the last commit kept the models busy
        self._is_synced = False  # whether all weights have come from a sender
        self.timeline = Timeline()  # replaced by the owner's

    @contextlib.contextmanager
    def use(self) -> Iterator[int]:
        """Work with the models; yields the version that serves throughout."""
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
        """Commit a pending update between two steps of the caller's own work; returns the version that serves now.

        With several users at work nothing is committed.
        """
        with self._changed:
            self._commit_if_free(num_own_users=1)
            return self.version

    def offer(self, update: VerifiedUpdate) -> bool:
        """Commit now if the models are free, else as soon as they are. True: committed now.

        An update older than what serves is dropped: versions never go back.
        """
        with self._changed:
            version, old = self.newest_version + 1 if update.version is None else update.version, self._pending
            incarnation = self.newest_incarnation if update.incarnation is None else update.incarnation
            if (incarnation, version) < (self.newest_incarnation, self.newest_version):
                logger.warning(
                    "dropped weights of version %d from %s: have %d", version, update.source, self.newest_version
                )
                return False
            update.adopt()
            if incarnation > self.newest_incarnation:
                old = None  # of trainers that were replaced, and this one has all weights
            if old is not None:  # the newer wins weight by weight, and what only the older touched is kept
                tensors = {**old.tensors, **update.tensors}
                update = dataclasses.replace(update, tensors=tensors, is_full=old.is_full or update.is_full)
            self._pending, self.newest_version, self.newest_incarnation = update, version, incarnation
            return self._commit_if_free()

    def wait_for_version(self, at_least: int, *, deadline_seconds: float) -> bool:
        """Wait until this version (or a newer one) serves; False after the deadline.

        Raises WeightUpdateError if the models must not serve, because a commit or a canary has failed.
        """
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
            return self._changed.wait_for(lambda: self._is_synced, timeout=deadline_seconds)

    def _check_fault(self) -> None:
        if self._fault is not None:
            raise WeightUpdateError(f"{self._fault}. Send a full update before the models serve again.")

    def _commit_if_free(self, *, num_own_users: int = 0) -> bool:
        """Copy the pending update, if there is one, into the models, if nobody else uses them."""
        if self._pending is None or self._num_users > num_own_users:
            return False
        update, self._pending = self._pending, None
        started = time.perf_counter()
        try:
            with self.timeline.span("commit"):
                self._commit(update)
        except BaseException as error:
            # Verified weights do not fail to copy, devices do. Neither half a model nor a wrong one may serve.
            self._fault = f"{self.name} could not commit version {self.newest_version}: {error}"
            self.newest_version, self.newest_incarnation = self.version, self.incarnation
            raise
        finally:
            self.last_commit_seconds = time.perf_counter() - started
            self._changed.notify_all()
        return True

    @torch.no_grad()
    def _commit(self, update: VerifiedUpdate) -> None:
        targets: dict[tuple[str, str], Tensor] = {
            (label, name): tensor
            for label, module in self.modules.items()
            for name, tensor in module.state_dict().items()
        }
        copy_all([targets[key] for key in update.tensors], list(update.tensors.values()))
        if update.canary is not None and (fault := canary_fault(self.modules["actor"], update.canary)) is not None:
            raise WeightUpdateError(
                f"{self.name} does not compute what the sender of version {self.newest_version} does: {fault}. It "
                "serves nothing until a full update passes."
            )
        if update.is_full:
            self._fault, self._is_synced = None, True
        self.version = self.timeline.version = self.newest_version
        self.incarnation = self.newest_incarnation  # last: who reads it first never takes an old version for a new one

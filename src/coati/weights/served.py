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
from typing import NamedTuple

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

    update_id: str
    version: int | None  # None: a plain call, which carries no version
    source: str
    tensors: Mapping[tuple[str, str], Tensor]
    is_full: bool  # every weight of every module of the receiver
    adopt: Callable[[], None] = lambda: None  # called on acceptance: its base weights are W₀ of later adapters
    canary: Canary | None = None  # what the actor must compute afterwards
    lender: str | None = None  # the sender's memory that some of the tensors are in; None: the receiver's own


class _Pending(NamedTuple):
    """Weights that wait until the models are free."""

    version: int
    tensors: Mapping[tuple[str, str], Tensor]
    lenders: Mapping[tuple[str, str], str | None]  # whose memory each tensor is in; None: our own
    is_full: bool
    canary: Canary | None


class ServedModels:
    """Guards modules that some threads work with and others update.

    Versions count up: an update that carries none (a plain call) counts as the next one.
    """

    def __init__(self, modules: Mapping[str, nn.Module], *, name: str = "this maker") -> None:
        """`name` is what errors call the owner of the models."""
        self.modules = dict(modules)
        self.name = name
        self._changed = threading.Condition()
        self._num_users = 0
        self._fault: str | None = None  # why the models are torn or wrong and must not serve
        self._pending: _Pending | None = None
        self._version = 0
        self._is_synced = False  # whether all weights have come from a sender
        self._last_commit_seconds = 0.0
        self.timeline = Timeline()  # replaced by the owner's

    @property
    def version(self) -> int:
        """Version of the weights that serve now."""
        with self._changed:
            return self._version

    @property
    def newest_version(self) -> int:
        """Version that serves, or will when the pending update is committed."""
        with self._changed:
            return self._newest()

    @property
    def last_commit_seconds(self) -> float:
        """How long the last commit kept the models busy."""
        with self._changed:
            return self._last_commit_seconds

    @contextlib.contextmanager
    def use(self) -> Iterator[int]:
        """Work with the models; yields the version that serves throughout."""
        with self._changed:
            self._commit_if_free()
            self._check_fault()
            self._num_users += 1
            version = self._version
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

    def newest_weight(self, module: str, name: str) -> Tensor:
        """A copy of one weight as it is, or as the pending update will make it."""
        with self._changed:
            if self._pending is not None and (module, name) in self._pending.tensors:
                return self._pending.tensors[module, name].detach().clone()
            live: Tensor = self.modules[module].state_dict()[name]
            return live.detach().clone()

    def commit_point(self) -> int:
        """Commit a pending update between two steps of the caller's own work; returns the version that serves now.

        With several users at work nothing is committed.
        """
        with self._changed:
            if self._num_users == 1:
                self._num_users = 0
                try:
                    self._commit_if_free()
                finally:
                    self._num_users = 1
            return self._version

    def offer(self, update: VerifiedUpdate) -> bool:
        """Commit now if the models are free, else as soon as they are. True: committed now.

        An update older than what serves is dropped: versions never go back.
        """
        with self._changed:
            newest = self._newest()
            version = newest + 1 if update.version is None else update.version
            if version < newest:
                logger.warning("dropped weights of version %d from %s: have %d", version, update.source, newest)
                return False
            update.adopt()
            self._pending = _merged(self._pending, update, version)
            return self._commit_if_free()

    def release(self, lender: str) -> None:
        """Stop reading the memory of this name: its owner overwrites it when this returns.

        Weights that still wait there are copied, without holding up other work.
        """
        while True:
            with self._changed:  # a commit that reads from there has ended when the lock is ours
                waiting = self._pending
            if waiting is None or lender not in waiting.lenders.values():
                return
            lent = [key for key, owner in waiting.lenders.items() if owner == lender]
            copies = {key: waiting.tensors[key].clone() for key in lent}
            with self._changed:
                if self._pending is waiting:
                    self._pending = waiting._replace(
                        tensors={**waiting.tensors, **copies}, lenders={**waiting.lenders, **dict.fromkeys(lent)}
                    )

    def wait_for_version(self, at_least: int, *, deadline_seconds: float) -> bool:
        """Wait until this version (or a newer one) serves; False after the deadline.

        Raises WeightUpdateError if the models must not serve, because a commit or a canary has failed.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._version >= at_least or self._fault is not None, timeout=deadline_seconds
            )
            if self._version < at_least:
                self._check_fault()
            return self._version >= at_least

    def wait_for_full_update(self, deadline_seconds: float) -> bool:
        """Wait for the first update of all modules; False after the deadline."""
        with self._changed:
            return self._changed.wait_for(lambda: self._is_synced, timeout=deadline_seconds)

    def _check_fault(self) -> None:
        if self._fault is not None:
            raise WeightUpdateError(f"{self._fault}. Send a full update before the models serve again.")

    def _newest(self) -> int:
        return self._version if self._pending is None else self._pending.version

    def _commit_if_free(self) -> bool:
        """Copy the pending update, if there is one, into the models, if they are free."""
        if self._pending is None or self._num_users > 0:
            return False
        update, self._pending = self._pending, None
        started = time.perf_counter()
        with self.timeline.span("commit"):
            self._commit(update)
        self._last_commit_seconds = time.perf_counter() - started
        self._changed.notify_all()
        return True

    @torch.no_grad()
    def _commit(self, update: _Pending) -> None:
        targets: dict[tuple[str, str], Tensor] = {
            (label, name): tensor
            for label, module in self.modules.items()
            for name, tensor in module.state_dict().items()
        }
        try:
            copy_all([targets[key] for key in update.tensors], list(update.tensors.values()))
            fault = None if update.canary is None else canary_fault(self.modules["actor"], update.canary)
        except BaseException as error:
            # Verified weights do not fail to copy, devices do. Half a model must never serve.
            self._fault = f"{self.name}: a commit of version {update.version} failed half way: {error}"
            self._changed.notify_all()
            raise
        if fault is not None:
            self._fault = f"{self.name} does not compute what the sender of version {update.version} does: {fault}"
            self._changed.notify_all()
            raise WeightUpdateError(f"{self._fault}. It serves nothing until a full update passes.")
        if update.is_full:
            self._fault = None
        self._version = update.version
        self._is_synced |= update.is_full
        self.timeline.version = self._version


def _merged(old: _Pending | None, new: VerifiedUpdate, version: int) -> _Pending:
    """Two updates waiting: the newer wins weight by weight, and what only the older touched is kept."""
    lenders = dict.fromkeys(new.tensors, new.lender)
    if old is None:
        return _Pending(version, new.tensors, lenders, new.is_full, new.canary)
    return _Pending(
        version, {**old.tensors, **new.tensors}, {**old.lenders, **lenders}, old.is_full or new.is_full, new.canary
    )

"""The models a maker serves from, and the short critical section in which they change.

`use()` brackets a piece of work that must see one version of the weights. An update offered meanwhile waits
and is committed when the work ends, or before the next begins; an update offered while nobody works is
committed at once. Nothing is ever locked across calls.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from coati.errors import DeadlineExceeded
from coati.weights.stage import VerifiedUpdate

logger = logging.getLogger(__name__)


class ServedModels:
    """Guards modules that one thread works with and others update.

    Versions count up: an update that carries none (a plain call) counts as the next one.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = dict(modules)
        self._changed = threading.Condition()
        self._is_busy = False
        self._pending: VerifiedUpdate | None = None
        self._version = 0
        self._num_commits = 0
        self._full_commits = 0
        self._last_commit_seconds = 0.0

    @property
    def version(self) -> int:
        """Version of the weights that serve now."""
        with self._changed:
            return self._version

    @property
    def num_commits(self) -> int:
        """Updates committed so far."""
        with self._changed:
            return self._num_commits

    @property
    def last_commit_seconds(self) -> float:
        """How long the last commit kept the models busy."""
        with self._changed:
            return self._last_commit_seconds

    @contextlib.contextmanager
    def use(self) -> Iterator[int]:
        """Work with the models; yields the version that serves throughout."""
        with self._changed:
            self._commit_pending()
            self._is_busy = True
            version = self._version
        try:
            yield version
        finally:
            with self._changed:
                self._is_busy = False
                self._commit_pending()

    def offer(self, update: VerifiedUpdate) -> bool:
        """Commit now if nobody works with the models, else as soon as they are free. True: committed now.

        An update older than what serves, from anyone, is dropped: weights never go back.
        """
        with self._changed:
            newest = self._pending.version if self._pending is not None else self._version
            if update.version is not None and newest is not None and update.version < newest:
                logger.info("weights of version %s from %s come too late; %s serves", update.version, update.source, newest)
                return False
            self._pending = _merged(self._pending, update)
            if self._is_busy:
                return False
            self._commit_pending()
            return True

    def wait_for_version(self, at_least: int, *, deadline_seconds: float) -> bool:
        """Wait until this version (or a newer one) serves or is pending; False if the deadline passes first."""
        with self._changed:
            return self._changed.wait_for(lambda: self._newest() >= at_least, timeout=deadline_seconds)

    def wait_for_full_update(self, *, deadline_seconds: float, what: str) -> None:
        """Wait for the first update of all modules; DeadlineExceeded names `what` is waited for."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._full_commits > 0, timeout=deadline_seconds):
                raise DeadlineExceeded(f"waited {deadline_seconds:g} s for {what}, and none came.")

    def _newest(self) -> int:
        pending = self._pending.version if self._pending is not None else None
        return max(self._version, pending if pending is not None else self._version)

    @torch.no_grad()
    def _commit_pending(self) -> None:
        update, self._pending = self._pending, None
        if update is None:
            self._changed.notify_all()
            return
        started = time.perf_counter()
        targets: dict[tuple[str, str], Tensor] = {
            (label, name): tensor
            for label, module in self._modules.items()
            for name, tensor in module.state_dict().items()
        }
        for key, tensor in update.tensors.items():
            targets[key].copy_(tensor)
        self._version = update.version if update.version is not None else self._version + 1
        self._num_commits += 1
        self._full_commits += update.is_full
        self._last_commit_seconds = time.perf_counter() - started
        self._changed.notify_all()


def _merged(old: VerifiedUpdate | None, new: VerifiedUpdate) -> VerifiedUpdate:
    """Two updates waiting: the newer wins weight by weight, and what only the older touched is kept."""
    if old is None:
        return new
    version = new.version if new.version is not None else old.version
    return VerifiedUpdate(
        new.update_id, version, new.source, {**old.tensors, **new.tensors}, old.is_full or new.is_full
    )

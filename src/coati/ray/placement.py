"""Where on the cluster makers and trainers run: left to Ray, or reserved as one placement group (Ray's PACK or SPREAD).

With "pack", a maker and a trainer whose shares of a GPU fit one card are put into one bundle, so that 0.5 and 0.5 are
one card and not two halves. Everything is reserved before any actor starts: a run that does not fit starts nothing.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from coati.config import RunSettings
from coati.counting import counted
from coati.errors import ConfigError, DeadlineExceeded, RunStopped

_SLICE_SECONDS = 1  # Ray waits for whole seconds
_DIGITS = 4  # Ray counts resources in ten-thousandths


class Bundle(NamedTuple):
    """Actors on one node: one, or a maker and a trainer on one card."""

    names: tuple[str, ...]
    gpus: float

    @property
    def resources(self) -> dict[str, float]:
        """One CPU for each actor, and their GPUs."""
        return {"CPU": float(len(self.names))} | ({"GPU": self.gpus} if self.gpus else {})


def plan_bundles(
    trainers: Sequence[str], makers: Sequence[str], *, trainer_gpus: float, maker_gpus: float, share_cards: bool
) -> list[Bundle]:
    """Put each actor into its own bundle, or a trainer and a maker together where their shares fit one card.

    >>> plan_bundles(["t"], ["m"], trainer_gpus=0.5, maker_gpus=0.5, share_cards=True)
    [Bundle(names=('t', 'm'), gpus=1.0)]
    """
    together = round(trainer_gpus + maker_gpus, _DIGITS)
    are_shares = 0 < trainer_gpus < 1 and 0 < maker_gpus < 1 and together <= 1
    num_pairs = min(len(trainers), len(makers)) if share_cards and are_shares else 0
    pairs = itertools.islice(zip(trainers, makers, strict=False), num_pairs)
    return [
        *(Bundle(pair, together) for pair in pairs),
        *(Bundle((name,), trainer_gpus) for name in trainers[num_pairs:]),
        *(Bundle((name,), maker_gpus) for name in makers[num_pairs:]),
    ]


class Placement:
    """The reserved resources of a run's actors, from `reserve` to `release`."""

    def __init__(self, config: RunSettings, *, trainers: Sequence[str], makers: Sequence[str]) -> None:
        topology = config.topology
        self._kind = topology.placement
        self._bundles = plan_bundles(
            trainers,
            makers,
            trainer_gpus=topology.gpus_per_trainer,
            maker_gpus=topology.gpus_per_maker,
            share_cards=self._kind == "pack",
        )
        self._group: PlacementGroup | None = None

    def reserve(self, *, deadline_seconds: float, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Reserve everything, or raise an error that says what is needed and what is there."""
        if self._kind == "auto":
            return
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        for bundle in self._bundles:
            if not any(_fits(bundle.resources, node) for node in nodes):
                who = " and ".join(bundle.names)
                raise ConfigError(
                    f"topology.placement = {self._kind!r} puts {who} on one node, which needs "
                    f"{_words(bundle.resources)}, but the nodes have {_listed(nodes)}. Lower the gpus_per_… settings, "
                    'add such a node, or use topology.placement = "auto".'
                )
        bundles = [bundle.resources for bundle in self._bundles]
        self._group = placement_group(bundles, strategy=self._kind.upper())
        deadline = time.monotonic() + deadline_seconds
        while not self._group.wait(_SLICE_SECONDS):
            if should_stop():
                raise RunStopped("stopped before training began; there was nothing to save.")
            if time.monotonic() >= deadline:
                free = {kind: ray.available_resources().get(kind, 0.0) for kind in ("CPU", "GPU")}
                raise DeadlineExceeded(
                    f"waited {deadline_seconds:g} s to reserve {counted(len(self._bundles), 'bundle')} "
                    f"(topology.placement = {self._kind!r}: {_listed(bundles)}). The nodes have {_listed(nodes)}, of "
                    f"which {_words(free)} are free. Lower topology.makers, topology.trainers or their gpus_per_… "
                    "settings, add nodes, or wait until other runs have ended."
                )

    def options(self, name: str) -> dict[str, Any]:
        """Return actor or task options for the bundle of `name`; none if it has no bundle."""
        if self._group is None:
            return {}
        index = next((n for n, bundle in enumerate(self._bundles) if name in bundle.names), None)
        if index is None:  # it joined later
            return {}
        strategy = PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=index, placement_group_capture_child_tasks=False
        )
        return {"scheduling_strategy": strategy}

    def newcomer_options(self) -> dict[str, Any]:
        """Return actor options for a maker that joins later: outside the group, whose size is fixed."""
        return {"scheduling_strategy": "SPREAD"} if self._kind == "spread" else {}

    def release(self) -> None:
        """Release the reservation; Ray kills actors that still use it."""
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None


def _fits(need: dict[str, float], have: dict[str, float]) -> bool:
    return all(have.get(kind, 0.0) >= amount for kind, amount in need.items())


def _words(resources: dict[str, float]) -> str:
    return " and ".join(counted(amount, kind) for kind, amount in resources.items())


def _listed(resources: Sequence[dict[str, float]]) -> str:
    parts = [_words({kind: have.get(kind, 0.0) for kind in ("CPU", "GPU") if have.get(kind)}) for have in resources]
    return ", ".join(f"{parts.count(part)} × ({part})" for part in dict.fromkeys(parts)) or "nothing"

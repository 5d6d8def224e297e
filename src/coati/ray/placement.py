"""Where on the cluster makers and trainers run: reserved as one placement group, or left to Ray.

A bundle is what must be on one node: one actor, or those that share a card.
Packed, a maker's and a trainer's shares of a GPU are put into one bundle, so that 0.5 and 0.5 are one card and not two
halves; two trainers never share one, because NCCL does not allow it. All is reserved before any actor starts: a run
that does not fit starts nothing.
"""

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from coati.config import RunSettings
from coati.counting import counted
from coati.errors import ConfigError, DeadlineExceeded, RunStopped

logger = logging.getLogger(__name__)

_SLICE_SECONDS = 1  # Ray waits for whole seconds
_STRATEGIES = {"pack": "PACK", "spread": "SPREAD"}
_DIGITS = 4  # Ray counts resources in ten-thousandths


class Seat(NamedTuple):
    """An actor that needs a place."""

    name: str
    gpus: float
    is_trainer: bool


class Bundle(NamedTuple):
    """Actors that are placed together, on one node and, where they have shares of a GPU, on one card."""

    seats: tuple[Seat, ...]

    @property
    def resources(self) -> dict[str, float]:
        """What the bundle reserves: one CPU for each actor, and their GPUs."""
        gpus = round(sum(seat.gpus for seat in self.seats), _DIGITS)
        return {"CPU": float(len(self.seats))} | ({"GPU": gpus} if gpus else {})

    def has_room_for(self, seat: Seat) -> bool:
        """Whether the seat's share of a card fits beside those that are here."""
        shares = [*(other.gpus for other in self.seats), seat.gpus]
        two_trainers = seat.is_trainer and any(other.is_trainer for other in self.seats)
        return all(0 < share < 1 for share in shares) and round(sum(shares), _DIGITS) <= 1 and not two_trainers


def plan_bundles(seats: Sequence[Seat], *, share_cards: bool) -> list[Bundle]:
    """Put seats into bundles: each in its own, or shares of a GPU beside each other where they fit.

    >>> seats = [Seat("trainer-0", 0.5, True), Seat("maker-0", 0.5, False)]
    >>> [bundle.resources for bundle in plan_bundles(seats, share_cards=True)]
    [{'CPU': 2.0, 'GPU': 1.0}]
    >>> [bundle.resources for bundle in plan_bundles(seats, share_cards=False)]
    [{'CPU': 1.0, 'GPU': 0.5}, {'CPU': 1.0, 'GPU': 0.5}]
    """
    bundles: list[Bundle] = []
    for seat in seats:
        place = next((n for n, bundle in enumerate(bundles) if share_cards and bundle.has_room_for(seat)), None)
        if place is None:
            bundles.append(Bundle((seat,)))
        else:
            bundles[place] = Bundle((*bundles[place].seats, seat))
    return bundles


class Placement:
    """The places of a run's actors, from `reserve` to `release`."""

    def __init__(self, config: RunSettings, *, trainers: Sequence[str], makers: Sequence[str]) -> None:
        topology = config.topology
        self._kind = topology.placement
        pairs = itertools.zip_longest(
            (Seat(name, topology.gpus_per_trainer, True) for name in trainers),
            (Seat(name, topology.gpus_per_maker, False) for name in makers),
        )
        seats = [seat for pair in pairs for seat in pair if seat is not None]  # in turn: a trainer beside a maker
        self._bundles = plan_bundles(seats, share_cards=self._kind == "pack")
        self._group: PlacementGroup | None = None

    def reserve(self, *, deadline_seconds: float, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Reserve everything, or raise an error that says what is asked for and what is there."""
        if self._kind == "auto":
            return
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        for bundle in self._bundles:
            if not any(_fits(bundle.resources, node) for node in nodes):
                who = " and ".join(seat.name for seat in bundle.seats)
                raise ConfigError(
                    f"topology.placement = {self._kind!r} puts {who} on one node, which needs "
                    f"{_words(bundle.resources)}, but the nodes have {_listed(nodes)}. Lower the gpus_per_… settings, "
                    'add such a node, or use topology.placement = "auto".'
                )
        bundles = [bundle.resources for bundle in self._bundles]
        self._group = placement_group(bundles, strategy=_STRATEGIES[self._kind])
        deadline = time.monotonic() + deadline_seconds
        while not self._group.wait(_SLICE_SECONDS):
            if should_stop():
                raise RunStopped("stopped before training began; there was nothing to save.")
            if time.monotonic() >= deadline:
                free = {kind: ray.available_resources().get(kind, 0.0) for kind in ("CPU", "GPU")}
                raise DeadlineExceeded(
                    f"waited {deadline_seconds:g} s for places for {counted(len(self._bundles), 'bundle')} "
                    f"(topology.placement = {self._kind!r}: {_listed(bundles)}). The nodes have {_listed(nodes)}, of "
                    f"which {_words(free)} are free. Lower topology.makers, topology.trainers or their gpus_per_… "
                    "settings, add nodes, or wait until others have ended."
                )

    def options(self, name: str) -> dict[str, Any]:
        """Actor or task options that put somebody where `name` has its place."""
        if self._group is None:
            return {}
        seats = [[seat.name for seat in bundle.seats] for bundle in self._bundles]
        index = next((n for n, names in enumerate(seats) if name in names), None)
        if index is None:  # it joined later
            return {}
        strategy = PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=index, placement_group_capture_child_tasks=False
        )
        return {"scheduling_strategy": strategy}

    def newcomer_options(self) -> dict[str, Any]:
        """Actor options of a maker that joins later: outside the group, whose size is fixed."""
        return {"scheduling_strategy": "SPREAD"} if self._kind == "spread" else {}

    def release(self) -> None:
        """Give the places back; whoever still runs there is ended by Ray."""
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

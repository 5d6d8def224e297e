"""Bundles and placement groups: who shares a card, who shares a node, and what is said when it does not fit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ray.util.placement_group import placement_group_table

from coati.errors import ConfigError, DeadlineExceeded, RunStopped
from coati.ray.placement import Placement


def groups_left():
    return [group for group in placement_group_table().values() if group["state"] != "REMOVED"]


def test_a_card_that_no_node_has_is_said_at_once(cluster, make_config):
    config = make_config(placement="pack", gpus_per_maker=0.5, gpus_per_trainer=0.5)
    placement = Placement(config, trainers=["trainer-0"], makers=["maker-0"])
    with pytest.raises(ConfigError) as caught:
        placement.reserve(deadline_seconds=60)
    text = str(caught.value)
    assert "puts trainer-0 and maker-0 on one node, which needs 2 CPUs and 1 GPU" in text
    assert "but the nodes have 1 × (6 CPUs)" in text
    assert groups_left() == []


def test_places_that_do_not_come_free_are_waited_for_and_then_said(cluster, make_config):
    config = make_config(placement="spread", makers=8)
    placement, other = (Placement(config, trainers=["t"], makers=list("abcdefgh")) for _ in range(2))
    try:
        with pytest.raises(DeadlineExceeded) as caught:
            placement.reserve(deadline_seconds=0.1)
        text = str(caught.value)
        assert "9 bundles" in text
        assert "9 × (1 CPU)" in text
        assert "The nodes have 1 × (6 CPUs)" in text
        with pytest.raises(RunStopped):
            other.reserve(deadline_seconds=60, should_stop=lambda: True)
    finally:
        placement.release()
        other.release()
    assert groups_left() == []


NODES = """
import ray
from ray.cluster_utils import Cluster
from threading import Event
from types import SimpleNamespace
from coati.peers import wait_in_slices
from coati.ray.placement import Placement

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "num_gpus": 2, "include_dashboard": False})
for _ in range(2):
    cluster.add_node(num_cpus=4, num_gpus=2)
ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")

@ray.remote
class Probe:
    def where(self):
        return ray.get_runtime_context().get_node_id(), tuple(ray.get_gpu_ids())

def places(kind, gpus, trainers, makers):
    topology = SimpleNamespace(placement=kind, gpus_per_trainer=gpus, gpus_per_maker=gpus)
    placement = Placement(SimpleNamespace(topology=topology), trainers=trainers, makers=makers)
    placement.reserve(deadline_seconds=60)
    probes = {
        name: Probe.options(num_cpus=1, num_gpus=gpus, **placement.options(name)).remote()
        for name in (*trainers, *makers)
    }
    found = {name: ray.get(probe.where.remote(), timeout=60) for name, probe in probes.items()}
    for probe in probes.values():
        ray.kill(probe)
    placement.release()
    # Ray places by what it last heard of the nodes, and hears of freed places a little later.
    wait_in_slices(
        lambda seconds: ray.available_resources().get("GPU") == 6 or bool(Event().wait(min(seconds, 0.1))),
        deadline_seconds=60,
        what=lambda: "the places to be free again",
    )
    return found

apart = places("spread", 1.0, ["t0"], ["m0", "m1"])
assert len({node for node, _ in apart.values()}) == 3, apart
halves = places("pack", 0.5, ["t0", "t1"], ["m0", "m1"])
assert halves["t0"] == halves["m0"] and halves["t1"] == halves["m1"], halves  # one card for two
assert halves["t0"] != halves["t1"], halves
assert len({node for node, _ in halves.values()}) == 1, halves  # two cards of one node
together = places("pack", 0.0, ["t0"], ["m0", "m1"])
assert len({node for node, _ in together.values()}) == 1, together
ray.shutdown()
cluster.shutdown()
print("all placed")
"""


@pytest.mark.long
def test_halves_share_a_card_and_spread_means_nodes():
    # Three raylets with cards that are only numbers, in a process of its own: this one has a Ray already.
    done = subprocess.run(
        [sys.executable, "-c", NODES],
        env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"},
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert "all placed" in done.stdout, done.stderr[-3000:]

"""Bundles: who shares a card, and who shares a node."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coati.ray.placement import plan_bundles


def plan(trainers, trainer_gpus, makers, maker_gpus, share_cards=True):
    names = [f"t{index}" for index in range(trainers)], [f"m{index}" for index in range(makers)]
    return plan_bundles(*names, trainer_gpus=trainer_gpus, maker_gpus=maker_gpus, share_cards=share_cards)


@pytest.mark.parametrize(
    ("trainers", "trainer_gpus", "makers", "maker_gpus", "bundles"),
    [
        (1, 0.5, 1, 0.5, [("t0", "m0")]),
        (1, 0.5, 1, 0.6, [("t0",), ("m0",)]),
        (2, 0.3, 2, 0.3, [("t0", "m0"), ("t1", "m1")]),  # two trainers on one card: NCCL refuses
        (1, 0.5, 3, 0.5, [("t0", "m0"), ("m1",), ("m2",)]),
        (1, 0.0, 2, 0.0, [("t0",), ("m0",), ("m1",)]),
        (1, 1.0, 1, 0.5, [("t0",), ("m0",)]),
        (1, 0.7, 1, 0.3, [("t0", "m0")]),  # 0.7 + 0.3 in floats
    ],
)
def test_who_shares_a_card(trainers, trainer_gpus, makers, maker_gpus, bundles):
    assert [bundle.names for bundle in plan(trainers, trainer_gpus, makers, maker_gpus)] == bundles


gpus = st.sampled_from([0.0, 0.1, 0.25, 0.3, 0.5, 0.9, 1.0, 2.0])


@given(st.integers(1, 8), gpus, st.integers(1, 8), gpus, st.booleans())
def test_every_actor_has_one_bundle_and_what_it_needs(trainers, trainer_gpus, makers, maker_gpus, share_cards):
    bundles = plan(trainers, trainer_gpus, makers, maker_gpus, share_cards)
    names = [name for bundle in bundles for name in bundle.names]
    assert len(names) == len(set(names)) == trainers + makers
    assert sum(bundle.gpus for bundle in bundles) == pytest.approx(trainers * trainer_gpus + makers * maker_gpus)
    for bundle in bundles:
        assert bundle.resources["CPU"] == len(bundle.names)
        assert len(bundle.names) == 1 or (share_cards and bundle.gpus <= 1)
        assert sum(name.startswith("t") for name in bundle.names) <= 1

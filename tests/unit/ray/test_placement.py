"""Bundles: who shares a card, and who shares a node."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coati.ray.placement import Seat, plan_bundles


def seats(trainers, makers):
    return [
        *(Seat(f"t{index}", gpus, True) for index, gpus in enumerate(trainers)),
        *(Seat(f"m{index}", gpus, False) for index, gpus in enumerate(makers)),
    ]


def names(bundles):
    return [[seat.name for seat in bundle.seats] for bundle in bundles]


@pytest.mark.parametrize(
    ("trainers", "makers", "bundles"),
    [
        ([0.5], [0.5], [["t0", "m0"]]),
        ([0.5], [0.6], [["t0"], ["m0"]]),
        ([0.3, 0.3], [0.3, 0.3], [["t0", "m0", "m1"], ["t1"]]),  # two trainers on one card: NCCL refuses
        ([0.0], [0.0, 0.0], [["t0"], ["m0"], ["m1"]]),
        ([1.0], [0.5, 0.5], [["t0"], ["m0", "m1"]]),
        ([2.0], [1.0], [["t0"], ["m0"]]),
        ([0.1], [0.1] * 10, [["t0", *(f"m{n}" for n in range(9))], ["m9"]]),  # ten tenths, in floats
    ],
)
def test_who_shares_a_card(trainers, makers, bundles):
    assert names(plan_bundles(seats(trainers, makers), share_cards=True)) == bundles


shares = st.lists(st.sampled_from([0.0, 0.1, 0.25, 0.3, 0.5, 0.9, 1.0, 2.0]), min_size=1, max_size=8)


@settings(max_examples=60, deadline=None)
@given(trainers=shares, makers=shares, share_cards=st.booleans())
def test_every_seat_has_one_bundle_and_none_is_more_than_a_card_or_a_seat(trainers, makers, share_cards):
    asked = seats(trainers, makers)
    bundles = plan_bundles(asked, share_cards=share_cards)
    assert sorted(seat for bundle in bundles for seat in bundle.seats) == sorted(asked)
    for bundle in bundles:
        assert bundle.resources["CPU"] == len(bundle.seats)
        assert len(bundle.seats) == 1 or (share_cards and bundle.resources["GPU"] <= 1)
        assert sum(seat.is_trainer for seat in bundle.seats) <= 1

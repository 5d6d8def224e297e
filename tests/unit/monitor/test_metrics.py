"""The reduction travels with the number."""

import doctest
import importlib
import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coati.monitor.metrics import Max, Mean, MetricBag, Min, Sum

NAN = float("nan")


def test_each_kind_merges_its_own_way():
    assert Mean(1.0, 3).merge(Mean(5.0, 1)) == Mean(2.0, 4)  # (1·3 + 5·1) / 4
    assert Sum(2.0).merge(Sum(3.0)) == Sum(5.0)
    assert Max(2.0).merge(Max(3.0)) == Max(3.0)
    assert Max(3.0).merge(Max(2.0)) == Max(3.0)
    assert Min(2.0).merge(Min(3.0)) == Min(2.0)
    assert Min(3.0).merge(Min(2.0)) == Min(2.0)


def test_a_mean_without_weight_never_counts():
    # An empty micro-batch gives 0 / 0: its NaN must not poison the mean.
    assert Mean(NAN, 0).merge(Mean(2.0, 1)) == Mean(2.0, 1)
    assert Mean(2.0, 1).merge(Mean(NAN, 0)) == Mean(2.0, 1)


def test_a_bag_that_saw_nothing_reports_nothing():
    bag = MetricBag()
    bag.record("policy/loss", Mean(NAN, 0))
    assert bag.values() == {}


@pytest.mark.parametrize("kind", [Max, Min])
def test_nan_wins_in_either_order(kind):
    assert math.isnan(kind(NAN).merge(kind(1.0)).value)
    assert math.isnan(kind(1.0).merge(kind(NAN)).value)


@given(
    st.lists(st.tuples(st.floats(-1e6, 1e6), st.floats(0.1, 100)), min_size=1, max_size=20),
    st.integers(0, 20),
)
def test_means_merge_to_the_same_however_they_are_split(pairs, cut):
    left, right = MetricBag(), MetricBag()
    for bag, part in ((left, pairs[:cut]), (right, pairs[cut:])):
        for value, weight in part:
            bag.record("a/b", Mean(value, weight))
    left.merge(right)
    expected = math.fsum(v * w for v, w in pairs) / math.fsum(w for _, w in pairs)
    assert left.values()["a/b"] == pytest.approx(expected, rel=1e-9, abs=1e-6)


def test_values_by_name_in_order():
    bag = MetricBag()
    bag.record("train/samples", Sum(4))
    bag.record("train/samples", Sum(4))
    bag.record("reward/max", Max(0.5))
    assert list(bag.values().items()) == [("train/samples", 8.0), ("reward/max", 0.5)]
    assert isinstance(bag.values()["train/samples"], float)


def test_merge_leaves_the_other_bag_alone():
    one, other = MetricBag(), MetricBag()
    one.record("maker/samples", Sum(1))
    other.record("maker/samples", Sum(2))
    one.merge(pickle.loads(pickle.dumps(other)))
    assert one.values() == {"maker/samples": 3.0}
    assert other.values() == {"maker/samples": 2.0}


@pytest.mark.parametrize("name", ["loss", "Policy/Loss", "a/b/c", "/b", "a/", "a b/c", "reward/mean\n", ""])
def test_a_name_that_is_not_area_slash_name_is_refused(name):
    with pytest.raises(AssertionError, match="area/name"):
        MetricBag().record(name, Sum(1))


def test_a_name_keeps_its_kind():
    bag = MetricBag()
    bag.record("train/samples", Sum(1))
    with pytest.raises(AssertionError, match="train/samples was a Sum"):
        bag.record("train/samples", Mean(1))
    assert bag.values() == {"train/samples": 1.0}


@pytest.mark.parametrize("module", ["metrics", "progress", "records", "timeline", "report.drawing"])
def test_the_examples_in_docstrings(module):
    result = doctest.testmod(importlib.import_module(f"coati.monitor.{module}"))
    assert (result.attempted > 0, result.failed) == (True, 0)

"""Metrics merge by their own reduction."""

import doctest
import importlib
import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coati.monitor.metrics import Max, Mean, Sum, merge_metrics, values_of

NAN = float("nan")


def test_each_type_has_its_own_reduction():
    assert Mean(1.0, 3).merge(Mean(5.0, 1)) == Mean(2.0, 4)  # (1·3 + 5·1) / 4
    assert Sum(2.0).merge(Sum(3.0)) == Sum(5.0)
    assert Max(2.0).merge(Max(3.0)) == Max(3.0)
    assert Max(3.0).merge(Max(2.0)) == Max(3.0)


def test_a_mean_without_weight_never_counts():
    # An empty micro-batch gives 0 / 0: its NaN must not reach the mean.
    assert Mean(NAN, 0).merge(Mean(2.0, 1)) == Mean(2.0, 1)
    assert Mean(2.0, 1).merge(Mean(NAN, 0)) == Mean(2.0, 1)


def test_a_mean_without_data_is_left_out():
    assert values_of({"policy/loss": Mean(NAN, 0), "train/samples": Sum(4)}) == {"train/samples": 4.0}


def test_nan_wins_in_either_order():
    assert math.isnan(Max(NAN).merge(Max(1.0)).value)
    assert math.isnan(Max(1.0).merge(Max(NAN)).value)


@given(
    st.lists(st.tuples(st.floats(-1e6, 1e6), st.floats(0.1, 100)), min_size=1, max_size=20),
    st.integers(0, 20),
)
def test_merging_means_does_not_depend_on_the_split(pairs, cut):
    left, right = {}, {}
    for held, part in ((left, pairs[:cut]), (right, pairs[cut:])):
        for value, weight in part:
            merge_metrics(held, {"a/b": Mean(value, weight)})
    merge_metrics(left, right)
    expected = math.fsum(v * w for v, w in pairs) / math.fsum(w for _, w in pairs)
    assert values_of(left)["a/b"] == pytest.approx(expected, rel=1e-9, abs=1e-6)


def test_merging_does_not_change_the_other():
    one, other = {"maker/samples": Sum(1)}, {"maker/samples": Sum(2), "reward/max": Max(0.5)}
    merge_metrics(one, pickle.loads(pickle.dumps(other)))
    assert list(values_of(one).items()) == [("maker/samples", 3.0), ("reward/max", 0.5)]
    assert isinstance(values_of(one)["maker/samples"], float)
    assert other["maker/samples"] == Sum(2)


def test_the_type_of_a_metric_cannot_change():
    held = {"train/samples": Sum(1)}
    with pytest.raises(AssertionError, match="train/samples was Sum"):
        merge_metrics(held, {"train/samples": Mean(1)})
    assert held == {"train/samples": Sum(1)}


@pytest.mark.parametrize("module", ["metrics", "live"])
def test_docstring_examples(module):
    result = doctest.testmod(importlib.import_module(f"coati.monitor.{module}"))
    assert (result.attempted > 0, result.failed) == (True, 0)

"""The search for the deepest model that trains, with machines that are a line of arithmetic."""

from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.fixture
def search(monkeypatch):
    """Search on a machine where so many layers fit, and an attempt takes a while for each of its layers."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from largest_model import find_deepest

    def run(fitting, *, most=13, seconds_per_layer=0.0, seconds=100.0, tries=10):
        tried, now = [], [0.0]

        def attempt(layers):
            tried.append(layers)
            now[0] += seconds_per_layer * layers
            return "the cap" if layers > fitting else ""

        answer = find_deepest(
            attempt, most=most, limit="arithmetic", seconds=seconds, tries=tries, clock=lambda: now[0]
        )
        return (answer.layers, answer.too_many, answer.limit), tried

    return run


@pytest.mark.parametrize("fitting", range(13))
def test_the_deepest_that_fits_is_found_and_the_cap_named(fitting, search):
    assert search(fitting)[0] == (fitting, fitting + 1, "the cap")


def test_all_then_half_then_halfway(search):
    assert search(9)[1] == [13, 6, 9, 11, 10]
    assert search(4)[1] == [13, 6, 3, 4, 5]


def test_all_that_arithmetic_allows_needs_one_attempt(search):
    assert search(99) == ((13, 14, "arithmetic"), [13])


def test_an_attempt_that_would_last_too_long_is_not_made(search):
    # 12 layers take 24 s and do not fit, 6 take 12 and do; 9 more would end after 54.
    answer, tried = search(6, most=12, seconds_per_layer=2.0, seconds=50.0)
    assert tried == [12, 6]
    assert answer == (6, 12, "time (7 to 11 layers were not tried)")


def test_so_many_tries_and_no_more(search):
    assert search(9, tries=3) == ((9, 13, "the cap"), [13, 6, 9])


def test_nothing_fits(search):
    assert search(0, most=0) == ((0, 1, "arithmetic"), [])
    assert search(0, most=1) == ((0, 1, "the cap"), [1])

"""avg@k, pass@k and their intervals, computed by hand."""

import itertools
import math

import numpy as np
import pytest

from coati.evaluation.estimates import _student, estimate, paired_difference, pass_at_k, prompt_values


@pytest.mark.parametrize(
    ("samples", "passed", "k", "expected"),
    [
        (4, 1, 2, 0.5),  # 3 of the 6 pairs contain the one that passed
        (5, 2, 3, 0.9),  # 1 of the 10 triples contains neither
        (8, 2, 1, 0.25),
        (8, 0, 8, 0.0),
        (4, 3, 2, 1.0),  # no two failed
        (4, 4, 4, 1.0),
    ],
)
def test_pass_at_k_by_hand(samples, passed, k, expected):
    assert pass_at_k(samples, passed, k) == pytest.approx(expected)


def test_pass_at_k_is_the_fraction_of_choices_with_a_sample_that_passed():
    for samples, passed in itertools.product(range(1, 8), range(8)):
        for k in range(1, samples + 1):
            if passed <= samples:
                choices = list(itertools.combinations([True] * passed + [False] * (samples - passed), k))
                assert pass_at_k(samples, passed, k) == pytest.approx(sum(map(any, choices)) / len(choices))


def test_pass_at_k_is_unbiased():
    # Over all outcomes of 6 samples that pass with probability 0.3, its mean is 1 - 0.7^k; 1 - (1 - c/n)^k is biased.
    n, p = 6, 0.3
    chances = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    for k in (1, 2, 4, 6):
        mean = sum(chance * pass_at_k(n, c, k) for c, chance in enumerate(chances))
        assert mean == pytest.approx(1 - 0.7**k)
    naive = sum(chance * (1 - (1 - c / n) ** 4) for c, chance in enumerate(chances))
    assert abs(naive - (1 - 0.7**4)) > 0.01


def test_values_of_prompts_by_hand():
    # Prompt 0: scores 1, 0, 0, 1. Prompt 3: 0.5 and 1, two samples without a score. Prompt 5: no scores.
    scores = {0: [1.0, 0.0, 0.0, 1.0], 3: [0.5, 1.0], 5: []}
    values = prompt_values(scores, 4, [1, 2, 4], pass_score=1.0)
    assert values == {
        "avg@4": {0: 0.5, 3: 0.75},
        "pass@1": {0: 0.5, 3: 0.5},
        "pass@2": {0: pytest.approx(5 / 6), 3: 1.0},
        "pass@4": {0: 1.0},
    }
    assert prompt_values(scores, 4, [1], pass_score=0.5)["pass@1"] == {0: 0.5, 3: 1.0}


def test_the_interval_of_unbounded_scores_is_students():
    # Mean 2, standard deviation 2, of 5 prompts: 2 / sqrt(5) = 0.8944, times 2.776 for 4 degrees of freedom.
    found = estimate([0.0, 1.0, 1.0, 3.0, 5.0])
    assert found.mean == 2.0
    assert (found.low, found.high) == (pytest.approx(2 - 2.483, abs=2e-3), pytest.approx(2 + 2.483, abs=2e-3))


@pytest.mark.parametrize(("degrees", "quantile"), [(1, 12.706), (2, 4.303), (3, 3.182), (10, 2.228), (100, 1.984)])
def test_quantiles_of_students_t_are_those_of_tables(degrees, quantile):
    assert _student(degrees) == pytest.approx(quantile, rel=2e-3)


def test_the_interval_of_values_from_0_to_1_is_wilsons():
    # 8 of 10 prompts: variance 10 / 9 * 0.16 / 10 = 0.01778, worth 0.16 / 0.01778 = 9 trials; t = 2.262.
    # t^2 / 9 = 0.5686; middle (0.8 + 0.2843) / 1.5686 = 0.6912; half sqrt(0.5686 * (0.16 + 0.1421)) / 1.5686 = 0.2642
    found = estimate([1.0] * 8 + [0.0] * 2)
    assert found == (pytest.approx(0.8), pytest.approx(0.427, abs=1e-3), pytest.approx(0.955, abs=1e-3))


def test_solving_all_prompts_is_not_certainty():
    found = estimate([1.0] * 30)
    assert (found.mean, found.high) == (1.0, pytest.approx(1.0))
    assert 0.85 < found.low < 0.9
    assert estimate([0.0] * 30).high == pytest.approx(1 - found.low)


def test_an_interval_without_information_is_unknown():
    for values in ([2.5], [7.0, 7.0, 7.0]):  # one prompt; equal scores of any size
        found = estimate(values)
        assert found == (values[0], -math.inf, math.inf)
        assert "unknown" in str(found)
    assert estimate([0.25]) == (0.25, 0.0, 1.0)
    assert "unknown" in str(paired_difference({1: 5.0, 2: 7.0}, {1: 4.0, 2: 6.0}))


def test_equal_values_are_not_certainty():
    # 4 prompts, t = 3.182 for 3 degrees: up to 10.13 / 14.13 = 0.717 of all prompts may have other values.
    scores = dict.fromkeys(range(4), 0.5)
    found = paired_difference(scores, scores)
    assert found == (0.0, pytest.approx(-0.717, abs=2e-3), pytest.approx(0.717, abs=2e-3))
    ones, zeros = dict.fromkeys(range(4), 1.0), dict.fromkeys(range(4), 0.0)
    assert paired_difference(ones, zeros) == (1.0, pytest.approx(1 - 2 * 0.717, abs=4e-3), 1.0)
    # Rounding makes 0.3 - 0.1 and 0.7 - 0.5 differ.
    found = paired_difference({0: 0.3, 1: 0.7, 2: 0.3, 3: 0.7}, {0: 0.1, 1: 0.5, 2: 0.1, 3: 0.5})
    assert (found.low, found.high) == (
        pytest.approx(0.2 - 0.717 * 1.2, abs=3e-3),
        pytest.approx(0.2 + 0.717 * 0.8, abs=3e-3),
    )
    # The same for values from 0 to 1: 0.5 plus and minus 0.717 of the distance to the bounds.
    assert estimate([0.5] * 4) == (0.5, pytest.approx(0.141, abs=2e-3), pytest.approx(0.859, abs=2e-3))


def test_19_of_20_intervals_cover_the_truth_despite_correlated_samples():
    # 60 prompts of very different difficulty, 8 samples each. Intervals for independent samples are far too narrow.
    random, covered, naive = np.random.default_rng(0), 0, 0
    for _ in range(500):
        difficulty = random.beta(0.4, 0.6, size=60)  # mean 0.4
        passed = random.binomial(8, difficulty)
        found = estimate([float(value) for value in passed / 8])
        covered += found.low <= 0.4 <= found.high
        half = 1.96 * math.sqrt(found.mean * (1 - found.mean) / 480)
        naive += abs(found.mean - 0.4) <= half
    assert 0.91 <= covered / 500 <= 0.99
    assert naive / 500 < 0.75


def test_a_difference_uses_the_common_prompts():
    # 1 - 0.5, 0.5 - 0.5 and 1 - 0: mean 0.5, deviation 0.5 / sqrt(3), times 4.303 for 2 degrees of freedom
    found = paired_difference({1: 1.0, 2: 0.5, 3: 1.0, 9: 0.0}, {1: 0.5, 2: 0.5, 3: 0.0, 4: 1.0})
    assert found.mean == pytest.approx(0.5)
    assert found.mean - found.low == pytest.approx(4.303 * 0.5 / math.sqrt(3), rel=1e-3)
    assert found.high == 1.0  # values from 0 to 1 cannot differ by more
    assert paired_difference({1: 1.0}, {2: 1.0}) is None


def test_a_paired_interval_is_narrower_than_the_intervals_of_both_models():
    random = np.random.default_rng(1)
    difficulty = random.uniform(0, 1, size=100)
    base = {i: float(value) for i, value in enumerate(difficulty)}
    better = {i: min(1.0, value + 0.05) for i, value in base.items()}
    found, own = paired_difference(better, base), estimate(list(better.values()))
    assert found.low > 0
    assert (found.high - found.low) < 0.2 * (own.high - own.low)

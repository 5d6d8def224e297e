"""avg@k and pass@k with 95 % confidence intervals.

Samples of one prompt are correlated, so each prompt contributes one value, and intervals come from the spread of these
values (the normal approximation clustered by prompt, with Student's t for small sets).

If all values lie in [0, 1], as those of pass@k do, the interval is Wilson's, for the number of independent trials that
matches the spread. It stays in [0, 1], and 30 of 30 prompts solved is not reported as certainty. Equal values or
differences of any other size are not reported as certainty either: the fraction of prompts that Wilson's limit allows
may have other values.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

_NORMAL = statistics.NormalDist().inv_cdf(0.975)
_EQUAL = 1e-9  # a smaller deviation is rounding error


class Estimate(NamedTuple):
    """A mean over prompts, with its 95 % confidence interval.

    The interval is infinite if it is unknown: one prompt, or equal values for all of them, and values without bounds.
    """

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        limits = "unknown" if math.isinf(self.low) else f"{self.low:.3f}, {self.high:.3f}"
        return f"{self.mean:.3f} [{limits}]"


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Return the unbiased estimate of the probability that at least one of k samples passes; `num_samples` >= k.

    >>> pass_at_k(4, 1, 2)  # 3 of the 6 pairs contain the one that passed
    0.5
    """
    return 1.0 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of the values of independent prompts, with its interval."""
    if not _are_shares(values):
        return _interval(values)
    mean, deviation = statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0
    if deviation < _EQUAL:
        return _interval(values, 0.0, 1.0)
    spread = mean * (1.0 - mean)
    shrink = (_student(len(values) - 1) * deviation) ** 2 / len(values) / spread  # t² / number of trials
    middle, half = (mean + shrink / 2) / (1 + shrink), math.sqrt(shrink * (spread + shrink / 4)) / (1 + shrink)
    return Estimate(mean, max(0.0, middle - half), min(1.0, middle + half))


def prompt_values(
    scores: Mapping[int, Sequence[float]], samples_per_prompt: int, pass_at: Sequence[int], *, pass_score: float
) -> dict[str, dict[int, float]]:
    """Return the value of every prompt, by metric: `avg@N` is the mean score, for `pass@k` see `pass_at_k`.

    A prompt without scores has no avg@N, one with fewer than k scores has no pass@k.
    """
    values = {f"avg@{samples_per_prompt}": {one: statistics.fmean(own) for one, own in scores.items() if own}}
    passed = {one: sum(score >= pass_score for score in own) for one, own in scores.items()}
    for k in pass_at:
        values[f"pass@{k}"] = {one: pass_at_k(len(own), passed[one], k) for one, own in scores.items() if len(own) >= k}
    return values


def paired_difference(values: Mapping[int, float], base: Mapping[int, float]) -> Estimate | None:
    """Return the mean difference to the values of another model, prompt by prompt; None without common prompts."""
    common = values.keys() & base.keys()
    differences = [values[prompt] - base[prompt] for prompt in sorted(common)]
    bounds = (-1.0, 1.0) if _are_shares([*values.values(), *base.values()]) else ()
    return _interval(differences, *bounds) if differences else None


def _are_shares(values: Sequence[float]) -> bool:
    return min(values, default=0.0) >= 0.0 and max(values, default=0.0) <= 1.0


def _interval(values: Sequence[float], lowest: float = -math.inf, highest: float = math.inf) -> Estimate:
    """Return Student's interval. For equal values, Wilson's for the fraction of prompts that may be at either bound."""
    count, mean = len(values), statistics.fmean(values)
    if count < 2:
        return Estimate(mean, lowest, highest)
    t, deviation = _student(count - 1), statistics.stdev(values)
    if deviation < _EQUAL:
        different = t**2 / (count + t**2)
        return Estimate(mean, mean - different * (mean - lowest), mean + different * (highest - mean))
    half = t * deviation / math.sqrt(count)
    return Estimate(mean, max(mean - half, lowest), min(mean + half, highest))


def _student(degrees: int) -> float:
    """Return the 97.5 % quantile of Student's t: exact for one and two degrees, else from an expansion."""
    if degrees <= 2:
        return math.tan(0.475 * math.pi) if degrees == 1 else 0.95 * math.sqrt(2 / 0.0975)
    z, nu = _NORMAL, float(degrees)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return sum(term / nu**power for power, term in enumerate(terms))

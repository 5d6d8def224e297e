"""avg@k and pass@k with 95 % confidence intervals.

Samples of a prompt resemble each other, so each prompt gives one value, and intervals come from the spread of these
values (the normal approximation clustered by prompt, with Student's t for small sets).

Where all values lie in [0, 1], as those of pass@k do, the interval has Wilson's form, with the number of independent
trials that the spread is worth. It stays in [0, 1], and 30 of 30 prompts solved is not reported as certainty. Nor are
equal values, or differences, of any other size: as many prompts as Wilson's limit allows may have other ones.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

_NORMAL = statistics.NormalDist().inv_cdf(0.975)
_EQUAL = 1e-9  # what rounding leaves of a deviation


class Estimate(NamedTuple):
    """A mean over prompts, and its 95 % confidence interval.

    It is infinite where nothing tells of it: there is one prompt, or all have equal values, and the values no bounds.
    """

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        limits = "unknown" if math.isinf(self.low) else f"{self.low:.3f}, {self.high:.3f}"
        return f"{self.mean:.3f} [{limits}]"


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """The chance that at least one of k samples passes, estimated without bias from `num_samples` >= k of them.

    Of all ways to choose k samples, the share that holds one that passed: 1 - C(n - c, k) / C(n, k).

    >>> pass_at_k(4, 1, 2)  # 3 of the 6 pairs hold the one that passed
    0.5
    """
    return 1.0 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of the values of independent prompts, with its interval."""
    if not _are_shares(values):
        return _interval(values)
    mean, deviation = statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0
    if deviation < _EQUAL:
        return _interval(values, 0.0, 1.0)
    spread = mean * (1.0 - mean)
    shrink = (_student(len(values) - 1) * deviation) ** 2 / len(values) / spread  # t squared over the number of trials
    middle, half = (mean + shrink / 2) / (1 + shrink), math.sqrt(shrink * (spread + shrink / 4)) / (1 + shrink)
    return Estimate(mean, max(0.0, middle - half), min(1.0, middle + half))


def prompt_values(
    scores: Mapping[int, Sequence[float]], samples_per_prompt: int, pass_at: Sequence[int], *, pass_score: float
) -> dict[str, dict[int, float]]:
    """The value of every prompt, by metric: `avg@N` is its mean score, `pass@k` as `pass_at_k` says.

    A prompt has no avg@N without any scores, and no pass@k with fewer than k.
    """
    values = {f"avg@{samples_per_prompt}": {one: statistics.fmean(own) for one, own in scores.items() if own}}
    passed = {one: sum(score >= pass_score for score in own) for one, own in scores.items()}
    for k in pass_at:
        values[f"pass@{k}"] = {one: pass_at_k(len(own), passed[one], k) for one, own in scores.items() if len(own) >= k}
    return values


def paired_difference(values: Mapping[int, float], base: Mapping[int, float]) -> Estimate | None:
    """How much greater the values are than those of another model, prompt by prompt; None without common prompts."""
    common = values.keys() & base.keys()
    differences = [values[prompt] - base[prompt] for prompt in sorted(common)]
    bounds = (-1.0, 1.0) if _are_shares([*values.values(), *base.values()]) else ()
    return _interval(differences, *bounds) if differences else None


def _are_shares(values: Sequence[float]) -> bool:
    return min(values, default=0.0) >= 0.0 and max(values, default=0.0) <= 1.0


def _interval(values: Sequence[float], lowest: float = -math.inf, highest: float = math.inf) -> Estimate:
    """Student's interval; for equal values that of Wilson, for the share of prompts with any other up to the bounds."""
    count, mean = len(values), statistics.fmean(values)
    if count < 2:
        return Estimate(mean, lowest, highest)
    t, deviation = _student(count - 1), statistics.stdev(values)
    if deviation < _EQUAL:
        others = t**2 / (count + t**2)
        return Estimate(mean, mean - others * (mean - lowest), mean + others * (highest - mean))
    half = t * deviation / math.sqrt(count)
    return Estimate(mean, max(mean - half, lowest), min(mean + half, highest))


def _student(degrees: int) -> float:
    """The 97.5 % quantile of Student's t by the first terms of its expansion: 1 % low for 3 prompts, then exact."""
    z, nu = _NORMAL, float(degrees)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return sum(term / nu**power for power, term in enumerate(terms))

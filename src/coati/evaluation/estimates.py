"""avg@k and pass@k with 95 % confidence intervals.

Prompts are the random draw that an evaluation generalizes from, and the samples of a prompt resemble each other. So
each prompt gives one value, and intervals come from the spread of these values (the normal approximation clustered by
prompt, with Student's t for small sets). It has a closed form: unlike a bootstrap, the same scores give the same
interval everywhere, and a paired difference is the same formula on differences.

Where all values lie in [0, 1], as those of pass@k do, the interval has Wilson's form, with the number of independent
trials that the spread is worth. It stays in [0, 1], and 30 of 30 prompts solved is not reported as certainty.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

_NORMAL = statistics.NormalDist().inv_cdf(0.975)


class Estimate(NamedTuple):
    """A mean over prompts, and its 95 % confidence interval; NaN limits for a single prompt, which has no spread."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """The chance that at least one of k samples passes, estimated without bias from `num_samples` >= k of them.

    Of all ways to choose k samples, the share that holds one that passed: 1 - C(n - c, k) / C(n, k).

    >>> pass_at_k(4, 1, 2)  # 3 of the 6 pairs hold the one that passed
    0.5
    """
    return 1.0 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of the values of independent prompts, with its interval."""
    plain, count = _student_interval(values), len(values)
    mean, half = plain.mean, plain.high - plain.mean
    is_share = min(values) >= 0.0 and max(values) <= 1.0 and (half > 0.0 or mean in (0.0, 1.0))
    if count < 2 or not is_share:
        return plain
    spread = mean * (1.0 - mean)
    shrink = half**2 / spread if spread else _student(count - 1) ** 2 / count  # t squared over the number of trials
    middle, half = (mean + shrink / 2) / (1 + shrink), math.sqrt(shrink * (spread + shrink / 4)) / (1 + shrink)
    return Estimate(mean, max(0.0, middle - half), min(1.0, middle + half))


def prompt_values(
    scores: Mapping[int, Sequence[float]], samples_per_prompt: int, pass_at: Sequence[int], *, pass_score: float
) -> dict[str, dict[int, float]]:
    """The value of every prompt, by metric: `avg@N` is its mean score, `pass@k` as `pass_at_k` says.

    `scores` are those of each prompt's samples that have one. A prompt has no avg@N without any, and no pass@k with
    fewer than k.
    """
    values = {f"avg@{samples_per_prompt}": {one: statistics.fmean(own) for one, own in scores.items() if own}}
    passed = {one: sum(score >= pass_score for score in own) for one, own in scores.items()}
    for k in pass_at:
        values[f"pass@{k}"] = {one: pass_at_k(len(own), passed[one], k) for one, own in scores.items() if len(own) >= k}
    return values


def paired_difference(values: Mapping[int, float], base: Mapping[int, float]) -> Estimate | None:
    """How much greater the values are than those of another model, prompt by prompt; None without common prompts.

    What makes a prompt easy or hard for both cancels, so the interval is narrower than either model's own.
    """
    differences = [value - base[prompt] for prompt, value in values.items() if prompt in base]
    return _student_interval(differences) if differences else None


def _student_interval(values: Sequence[float]) -> Estimate:
    count, mean = len(values), statistics.fmean(values)
    half = _student(count - 1) * statistics.stdev(values) / math.sqrt(count) if count > 1 else math.nan
    return Estimate(mean, mean - half, mean + half)


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

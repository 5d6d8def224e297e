"""How old training data is: versions between the weights that wrote it and the weights that learn from it."""

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from coati.algos.masked import masked_mean
from coati.experience import Experience

# Youngest age of each bucket of the distribution. One by one where runs mostly are, wider where few go.
_BUCKET_STARTS = (0, 1, 2, 3, 4, 5, 9)


class Ages(NamedTuple):
    """Mean and largest age of a batch's samples, each sample as old as its oldest token."""

    mean: float
    oldest: float


def ages_of(experience: Experience, trainer_version: int) -> Ages:
    """Ages in versions; (0, 0) where the versions are unknown."""
    measured = _measured(experience, trainer_version)
    return Ages(0.0, 0.0) if measured is None else _summary(*measured)


def age_metrics(experience: Experience, trainer_version: int, *, max_staleness: int | None = None) -> dict[str, float]:
    """How old a batch is, as metrics: mean and greatest age, and which share of samples and tokens has which age.

    Shares are reported for all ages that the bound allows, zeros too, so that they stack up in a plot. A sample is as
    old as its oldest token; tokens tell the two apart where new weights came in the middle of a sample. Where no
    version is known there are no shares.
    """
    measured = _measured(experience, trainer_version)
    if measured is None:
        return {"train/age_mean": 0.0, "train/age_max": 0.0, "train/token_age_mean": 0.0}
    age_of_token, is_known = measured
    mean, oldest = _summary(age_of_token, is_known)
    of_samples = age_of_token.amax(dim=1)[is_known.any(dim=1)]
    of_tokens = age_of_token[is_known]
    bound = oldest if max_staleness is not None and oldest > max_staleness else max_staleness
    return {
        "train/age_mean": mean,
        "train/age_max": oldest,
        "train/token_age_mean": float(of_tokens.double().mean()),
        **_shares("samples", of_samples, bound),
        **_shares("tokens", of_tokens, bound),
    }


def bucket_names(prefix: str) -> list[str]:
    """The metrics that a distribution consists of, youngest first.

    >>> bucket_names("samples")[-3:]
    ['age/samples_4', 'age/samples_5_to_8', 'age/samples_9_up']
    """
    names = [
        f"age/{prefix}_{start}" if end == start + 1 else f"age/{prefix}_{start}_to_{end - 1}"
        for start, end in itertools.pairwise(_BUCKET_STARTS)
    ]
    return [*names, f"age/{prefix}_{_BUCKET_STARTS[-1]}_up"]


def _measured(experience: Experience, trainer_version: int) -> tuple[Tensor, Tensor] | None:
    """Age of each token, 0 where unknown, and where it is known, both [B, A]; None if nowhere."""
    if experience.policy_versions is None or experience.num_actions == 0:
        return None
    is_known = experience.full_action_mask() & (experience.policy_versions >= 0)
    if not bool(is_known.any()):
        return None
    return (trainer_version - experience.policy_versions).masked_fill(~is_known, 0), is_known


def _summary(age_of_token: Tensor, is_known: Tensor) -> Ages:
    age_of_sample = age_of_token.amax(dim=1).double()
    return Ages(float(masked_mean(age_of_sample, is_known.any(dim=1))), float(age_of_sample.max()))


def _shares(prefix: str, ages: Tensor, bound: float | None) -> dict[str, float]:
    starts = torch.tensor(_BUCKET_STARTS, device=ages.device)
    # The number of starts at or below an age, less one, is its bucket; an age below 0 counts as 0.
    buckets = torch.bucketize(ages.clamp(min=0), starts, right=True) - 1
    counts = torch.bincount(buckets, minlength=len(_BUCKET_STARTS)).tolist()
    return {
        name: count / ages.numel()
        for name, start, count in zip(bucket_names(prefix), _BUCKET_STARTS, counts, strict=True)
        if bound is None or start <= bound
    }

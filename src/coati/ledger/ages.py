"""How old training data is: versions between the weights that wrote it and the weights that learn from it."""

from typing import NamedTuple

from coati.algos import masked_mean
from coati.experience_maker.base import Experience


class Ages(NamedTuple):
    """Mean and largest age of a batch's samples, each sample as old as its oldest token."""

    mean: float
    oldest: float


def ages_of(experience: Experience, trainer_version: int) -> Ages:
    """Ages in versions; (0, 0) where the versions are unknown."""
    if experience.policy_versions is None or experience.num_actions == 0:
        return Ages(0.0, 0.0)
    is_known = experience.full_action_mask() & (experience.policy_versions >= 0)
    if not bool(is_known.any()):
        return Ages(0.0, 0.0)
    age_of_token = (trainer_version - experience.policy_versions).masked_fill(~is_known, 0)
    age_of_sample = age_of_token.amax(dim=1).double()
    return Ages(float(masked_mean(age_of_sample, is_known.any(dim=1))), float(age_of_sample.max()))

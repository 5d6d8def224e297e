"""How old training data is: versions between the weights that wrote it and the weights that learn from it."""

from coati.algos.masked import masked_mean
from coati.experience import Experience


def age_metrics(experience: Experience, trainer_version: int) -> dict[str, float]:
    """Mean and greatest age of a batch's samples, each as old as its oldest token, and the mean age of its tokens.

    All are 0 where no version is known.
    """
    ages = dict.fromkeys(("train/age_mean", "train/age_max", "train/token_age_mean"), 0.0)
    if experience.policy_versions is None or experience.num_actions == 0:
        return ages
    is_known = experience.full_action_mask() & (experience.policy_versions >= 0)  # [B, A]
    if not bool(is_known.any()):
        return ages
    of_tokens = (trainer_version - experience.policy_versions).masked_fill(~is_known, 0)
    of_samples = of_tokens.amax(dim=1).double()
    return {
        "train/age_mean": float(masked_mean(of_samples, is_known.any(dim=1))),
        "train/age_max": float(of_samples.max()),
        "train/token_age_mean": float(of_tokens[is_known].double().mean()),
    }

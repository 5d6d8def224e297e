"""The algorithms as a table: what each does differently, in the maker and in the learner.

They share one pipeline. A maker turns scores into advantages (and may leave out groups that teach nothing); a learner
clips a ratio, adds up tokens in one way or another, and may hold the policy near the reference by a term of the loss.
An algorithm is a choice for each of these. Light on purpose: settings are read without torch.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from coati.errors import ConfigError

AdvantageKind = Literal["gae", "group_normalized", "group_centered", "leave_one_out", "returns", "returns_above_group"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Algorithm:
    """One row of the table. The first two fields are what it is; the others are settings with its own defaults."""

    advantages: AdvantageKind
    """How scores become advantages:

    - "gae": rewards per token, a critic, generalised advantage estimation.
    - "group_normalized": score less the mean of its group, over the group's standard deviation.
    - "group_centered": the same undivided.
    - "leave_one_out": score less the mean of the *others* of its group.
    - "returns": discounted rewards from each token on.
    - "returns_above_group": the same less the group's mean.
    """

    ratio: Literal["token", "sequence"] = "token"
    """Whether tokens are clipped one by one, or a response as a whole (GSPO)."""

    kl_in: Literal["reward", "loss"] = "reward"
    kl_coef: float = 0.1
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    eps_clip: float = 0.2
    eps_clip_high: float = 0.2
    normalization: Literal["token", "sequence", "constant"] = "token"
    whiten_advantages: bool = False
    dynamic_sampling: bool = False

    @property
    def uses_critic(self) -> bool:
        """Whether there is a critic to train."""
        return self.advantages == "gae"

    @property
    def uses_groups(self) -> bool:
        """Whether the samples of one prompt are held against each other."""
        return self.advantages not in ("gae", "returns")

    @property
    def defaults(self) -> dict[str, object]:
        """The settings this algorithm comes with."""
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in ("advantages", "ratio")
        }


ALGORITHMS: Mapping[str, Algorithm] = MappingProxyType(
    {
        "ppo": Algorithm(advantages="gae", whiten_advantages=True),
        "grpo": Algorithm(
            advantages="group_normalized", kl_in="loss", kl_coef=0.04, kl_estimator="k3", normalization="sequence"
        ),
        # Neither division by the group's deviation nor by a response's own length, which favour easy and hard prompts
        # and long wrong answers.
        "dr_grpo": Algorithm(
            advantages="group_centered", kl_in="loss", kl_coef=0.0, kl_estimator="k3", normalization="constant"
        ),
        "rloo": Algorithm(advantages="leave_one_out", kl_coef=0.05),
        "reinforce++": Algorithm(advantages="returns", kl_coef=0.01, whiten_advantages=True),
        "reinforce++_baseline": Algorithm(advantages="returns_above_group", kl_coef=0.01, whiten_advantages=True),
        "dapo": Algorithm(
            advantages="group_normalized",
            kl_in="loss",
            kl_coef=0.0,
            kl_estimator="k3",
            eps_clip_high=0.28,
            dynamic_sampling=True,
        ),
        "gspo": Algorithm(
            advantages="group_normalized",
            ratio="sequence",
            kl_in="loss",
            kl_coef=0.0,
            kl_estimator="k3",
            eps_clip=3e-4,
            eps_clip_high=4e-4,
            normalization="sequence",
        ),
    }
)
"""Every algorithm by the name that `algorithm.name` calls it."""


def algorithm_of(algorithm: str | Algorithm) -> Algorithm:
    """The row of the table that a name means; a row, perhaps changed, is taken as it is.

    >>> algorithm_of("grpo").uses_critic, algorithm_of("ppo").uses_critic
    (False, True)
    """
    if isinstance(algorithm, Algorithm):
        return algorithm
    if algorithm not in ALGORITHMS:
        raise ConfigError(f"algorithm must be one of {', '.join(ALGORITHMS)}, got {algorithm!r}.")
    return ALGORITHMS[algorithm]

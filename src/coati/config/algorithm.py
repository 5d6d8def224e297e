"""The section that says what is optimised: algorithm, KL penalty, clipping and the correction for old data."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from pydantic import model_validator

from coati.algorithms import ALGORITHMS, Algorithm
from coati.config.section import Section, setting

AlgorithmName = Literal["ppo", "grpo", "dr_grpo", "rloo", "reinforce++", "reinforce++_baseline", "dapo", "gspo"]


class AlgorithmSettings(Section):
    """`[algorithm]`: the maths of the update.

    `algorithm = "grpo"` at the top of the file is short for `name` in this section. Settings that are left out have the
    algorithm's own defaults (docs/algorithms.md); those shown here are PPO's.
    """

    name: AlgorithmName = setting(
        "ppo",
        "How to learn from scores: PPO with a critic, or one of the others, without.",
        rule="one of " + ", ".join(f'"{name}"' for name in ALGORITHMS),
    )
    kl_coef: float = setting(0.1, "Weight of the KL penalty against the reference.", rule="a number, 0 or more", ge=0)
    kl_in: Literal["reward", "loss"] = setting(
        "reward",
        "Where the KL penalty goes: into each token's reward, or into the loss as a term of its own.",
        rule='"reward" or "loss"',
    )
    kl_estimator: Literal["k1", "k2", "k3"] = setting(
        "k1",
        "Per-token KL estimate.",
        rule='"k1" (unbiased; not in the loss), "k2" (squared) or "k3" (unbiased, never negative)',
    )
    gamma: float = setting(1.0, "Discount per token.", rule="a number from 0 to 1", ge=0, le=1)
    lam: float = setting(0.95, "Lambda of GAE.", rule="a number from 0 to 1", ge=0, le=1)
    eps_clip: float = setting(
        0.2, "Clips the policy ratio to at least 1 - this.", rule="a number above 0 and below 1", gt=0, lt=1
    )
    eps_clip_high: float = setting(
        0.2,
        "Clips the policy ratio to at most 1 + this; left out, eps_clip, or the algorithm's own where its range is not "
        "symmetric.",
        rule="a number above 0",
        gt=0,
    )
    value_clip: float = setting(0.4, "Clips how far new values move from old ones.", rule="a number above 0", gt=0)
    normalization: Literal["token", "sequence", "constant"] = setting(
        "token",
        "How the tokens of a step add up: all count the same (token), all responses count the same (sequence), or each "
        "token counts 1 / (responses × rollout.max_new_tokens), whatever the lengths (constant).",
        rule='"token", "sequence" or "constant"',
    )
    whiten_advantages: bool = setting(
        True, "Give the advantages of a batch mean 0 and deviation 1.", rule="true or false"
    )
    dynamic_sampling: bool = setting(
        False,
        "Replace (and count) prompts whose samples all score the same: they teach nothing.",
        rule="true or false, and true only with an algorithm that compares the samples of a prompt",
    )
    entropy_coef: float = setting(0.0, "Weight of the entropy bonus; 0 = off.", rule="a number, 0 or more", ge=0)
    correction: Literal["auto", "none", "decoupled"] = setting(
        "auto",
        "How the policy loss treats data that older weights wrote: clip around the weights that sampled it (none), or "
        "around the ones the step starts from, with importance weights (decoupled).",
        rule='"none", "decoupled", or "auto": decoupled unless topology.max_staleness is 0',
    )
    importance: Literal["truncate", "mask", "none"] = setting(
        "truncate",
        "What the decoupled loss does with importance weights above the cap: cut them down, drop their tokens, or use "
        "no weights at all.",
        rule='"truncate", "mask" or "none"',
    )
    importance_level: Literal["token", "sequence"] = setting(
        "token", "Importance weights of single tokens, or of whole responses.", rule='"token" or "sequence"'
    )
    importance_cap: float = setting(2.0, "Largest importance weight.", rule="a number, 1 or more", ge=1)
    estimator: Literal["gae", "vtrace"] = setting(
        "gae",
        "PPO's advantages and critic targets: the maker's (gae), or corrected by the trainer for the data's age "
        "(vtrace).",
        rule='"gae" or "vtrace"',
    )

    @model_validator(mode="before")
    @classmethod
    def _with_defaults_of_algorithm(cls, data: Any) -> Any:
        """Write the algorithm's own defaults out, so that a saved config says what it means."""
        algorithm = ALGORITHMS.get(str(data.get("name", "ppo"))) if isinstance(data, dict) else None
        if algorithm is None:
            return data  # what is wrong with it is said elsewhere
        filled = {**algorithm.defaults, **data}
        if algorithm.eps_clip == algorithm.eps_clip_high and "eps_clip" in data:
            filled["eps_clip_high"] = data.get("eps_clip_high", data["eps_clip"])
        return filled

    @property
    def resolved(self) -> Algorithm:
        """The algorithm with these settings."""
        own = ALGORITHMS[self.name]
        return dataclasses.replace(own, **{name: getattr(self, name) for name in own.defaults})

    def problems(self) -> list[str]:
        """Settings that the algorithm has no use for, or that cancel each other."""
        algorithm = ALGORITHMS[self.name]
        found = []
        if self.kl_in == "loss" and self.kl_coef > 0 and self.kl_estimator == "k1":
            found.append(
                'algorithm.kl_estimator must be "k2" or "k3" while algorithm.kl_in is "loss", got "k1", whose gradient '
                "averages to zero. Use k3."
            )
        if self.estimator == "vtrace" and not algorithm.uses_critic:
            found.append(
                f'algorithm.estimator must be "gae" with algorithm.name = "{self.name}", which has no critic, got '
                '"vtrace". Leave it out, or use ppo.'
            )
        if self.dynamic_sampling and not algorithm.uses_groups:
            found.append(
                f'algorithm.dynamic_sampling must be false with algorithm.name = "{self.name}", which does not compare '
                "the samples of a prompt, got true. Use dapo or grpo."
            )
        if algorithm.ratio == "sequence" and self.normalization != "sequence":
            found.append(
                f'algorithm.normalization must be "sequence" with algorithm.name = "{self.name}", whose ratios are of '
                f'whole responses, got "{self.normalization}". Leave it out.'
            )
        return found

"""The tables of algorithms and policy losses, and the section `[algorithm]` with their settings.

A maker turns scores into advantages; a learner turns advantages and ratios into a loss, which `loss` can replace.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Self

from pydantic import model_validator

from coati.config.section import Section, setting

AlgorithmName = Literal[
    "ppo", "grpo", "dr_grpo", "rloo", "reinforce++", "reinforce++_baseline", "dapo", "gspo", "maxrl", "vapo", "distill"
]
AdvantageKind = Literal[
    "gae", "group_normalized", "group_centered", "group_over_mean", "leave_one_out", "returns", "returns_above_group"
]
RatioKind = Literal["token", "sequence"]


class AlgorithmRow(NamedTuple):
    """An algorithm: how it computes advantages (docs/algorithms.md), and its defaults that differ from PPO's."""

    advantages: AdvantageKind
    defaults: Mapping[str, Any]


class LossRow(NamedTuple):
    """A policy loss: its surrogate in `coati.algos.losses`, and its defaults that differ from those of "clip"."""

    surrogate: str
    defaults: Mapping[str, Any] = MappingProxyType({})
    ratio: RatioKind = "token"  # per token, or of a whole response (GSPO)
    corrects_age: bool = False  # its ratio is relative to the sampling policy: stale data needs no importance weights


_MASK = {"importance": "mask"}

LOSSES: Mapping[str, LossRow] = MappingProxyType(
    {
        "clip": LossRow("clipped"),
        # No lower bound, as in the paper; an upper bound of 5, as in ScaleRL.
        "cispo": LossRow("cispo", {"eps_clip": 1.0, "eps_clip_high": 4.0}, corrects_age=True),
        "dppo": LossRow("dppo", {"eps_clip": 0.2, "eps_clip_high": 0.2, "importance_cap": 20.0}, corrects_age=True),
        "sapo": LossRow("sapo"),
        "gspo": LossRow(
            "clipped", {"eps_clip": 3e-4, "eps_clip_high": 4e-4, "normalization": "sequence"}, ratio="sequence"
        ),
        "icepop": LossRow("clipped", {**_MASK, "importance_floor": 0.5, "importance_cap": 5.0}),
        "geometric_mask": LossRow(
            "clipped", {**_MASK, "importance_level": "geometric", "importance_floor": 0.999, "importance_cap": 1.001}
        ),
    }
)

_CRITIC_KEYS = ("adaptive_lam", "critic_warmup_steps")
_OWN_LOSS = LossRow("own", corrects_age=True)

_IN_LOSS = {"kl_in": "loss", "kl_coef": 0.0, "kl_estimator": "k3", "whiten_advantages": False}

ALGORITHMS: Mapping[AlgorithmName, AlgorithmRow] = MappingProxyType(
    {
        "ppo": AlgorithmRow("gae", {}),
        "grpo": AlgorithmRow("group_normalized", {**_IN_LOSS, "kl_coef": 0.04, "normalization": "sequence"}),
        # Divides neither by the group's standard deviation, which favours easy and hard prompts, nor by the length of
        # a response, which favours long wrong answers.
        "dr_grpo": AlgorithmRow("group_centered", {**_IN_LOSS, "normalization": "constant"}),
        "rloo": AlgorithmRow("leave_one_out", {"kl_coef": 0.05, "whiten_advantages": False}),
        "reinforce++": AlgorithmRow("returns", {"kl_coef": 0.01}),
        "reinforce++_baseline": AlgorithmRow("returns_above_group", {"kl_coef": 0.01}),
        "dapo": AlgorithmRow("group_normalized", {**_IN_LOSS, "eps_clip_high": 0.28, "dynamic_sampling": True}),
        "gspo": AlgorithmRow("group_normalized", {**_IN_LOSS, "loss": "gspo"}),
        "maxrl": AlgorithmRow("group_over_mean", _IN_LOSS),
        "vapo": AlgorithmRow(
            "gae", {"adaptive_lam": 0.05, "critic_lam": 1.0, "nll_coef": 0.1, "eps_clip_high": 0.28, "kl_coef": 0.0}
        ),
        # The return of a token is its own KL to the reference (the teacher), without later tokens. Without whitening, a
        # distant teacher would make every sampled token less likely.
        "distill": AlgorithmRow("returns", {"gamma": 0.0, "kl_coef": 1.0}),
    }
)


class AlgorithmSettings(Section, section="algorithm"):
    """`[algorithm]`: the algorithm and its coefficients.

    Unset keys take the algorithm's own defaults (docs/algorithms.md); the defaults shown here are PPO's.
    `algorithm = "grpo"` at the top of a file, before any section, is short for `name`.
    """

    name: AlgorithmName = setting("ppo", "The algorithm. ppo and vapo train a critic; the others do not.")
    loss: str = setting(
        "clip",
        "The policy loss: PPO's clip, another loss of docs/algorithms.md, or your own function.",
        rule=", ".join(f'"{name}"' for name in LOSSES) + ' or "module:function"',
        remedy='For my_loss() in losses.py write "losses:my_loss".',
        pattern=rf"^({'|'.join(LOSSES)}|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$",
    )
    kl_coef: float = setting(0.1, "Weight of the penalty on the KL to the reference model.", ge=0)
    kl_in: Literal["reward", "loss"] = setting(
        "reward", "Where the KL penalty is applied: in each token's reward, or as a separate term of the loss."
    )
    kl_estimator: Literal["k1", "k2", "k3"] = setting(
        "k1",
        "Estimator of the KL per token.",
        rule='"k1" (unbiased; not in the loss), "k2" (squared) or "k3" (unbiased, never negative)',
    )
    kl_target: float = setting(
        0.0, "With kl_in loss: adapt kl_coef to keep the KL (policy/kl_loss) near this value; 0 = fixed kl_coef.", ge=0
    )
    gamma: float = setting(1.0, "Discount factor per token.", ge=0, le=1)
    lam: float = setting(0.95, "Lambda of GAE.", ge=0, le=1)
    critic_lam: float = setting(0.95, "Lambda of GAE for the critic's targets; if unset, lam.", ge=0, le=1)
    adaptive_lam: float = setting(
        0.0, "If above 0, replaces lam: lambda is 1 - 1 / (adaptive_lam × response length), as in VAPO.", ge=0
    )
    critic_warmup_steps: int = setting(0, "Number of optimizer steps at the start that train only the critic.", ge=0)
    nll_coef: float = setting(0.0, "Weight of -log π on responses with a reward above 0, as in VAPO; 0 = off.", ge=0)
    eps_clip: float = setting(
        0.2,
        "Clips the policy ratio to at least 1 - eps_clip; dppo: masks tokens whose probability fell by more.",
        gt=0,
        le=1,
    )
    eps_clip_high: float = setting(
        0.2,
        "Clips the policy ratio to at most 1 + eps_clip_high; dppo: masks tokens whose probability rose by more. If "
        "unset, eps_clip, or the algorithm's own value if its range is not symmetric.",
        gt=0,
    )
    sapo_tau: float = setting(1.0, "sapo: steepness of the gate for positive advantages.", gt=0)
    sapo_tau_negative: float = setting(1.05, "sapo: steepness of the gate for negative advantages.", gt=0)
    behavior_kl_coef: float = setting(
        0.0, "Weight of log²(policy / sampling policy) in the loss, which pulls the policy back; 0 = off.", ge=0
    )
    value_clip: float = setting(0.4, "Maximum change of values from old values, for clipping in the value loss.", gt=0)
    normalization: Literal["token", "sequence", "constant"] = setting(
        "token",
        "Weights of tokens in the loss of a step: equal for all tokens (token), equal for all responses (sequence), or "
        "1 / (responses × rollout.max_new_tokens) for each token, whatever the lengths (constant).",
    )
    whiten_advantages: bool = setting(True, "Normalize the advantages of a batch to mean 0 and standard deviation 1.")
    dynamic_sampling: bool = setting(False, "Replace (and count) prompts whose samples all score the same: no signal.")
    mask_cut_responses: bool = setting(
        False,
        "Exclude responses truncated by the length limit from the losses; they still count in their group's mean.",
    )
    entropy_coef: float = setting(0.0, "Weight of the entropy bonus; 0 = off.", ge=0)
    correction: Literal["auto", "none", "decoupled"] = setting(
        "auto",
        "How the policy loss treats data from older weights: clip around the weights that sampled it (none), or around "
        "the weights at the start of the step, with importance weights (decoupled).",
        rule='"none", "decoupled", or "auto": decoupled unless topology.max_staleness is 0',
    )
    importance: Literal["truncate", "mask", "none"] = setting(
        "truncate",
        "How the decoupled loss treats importance weights above the cap: clamp them (truncate), drop their tokens and "
        "those below the floor (mask), or use no weights at all (none).",
    )
    importance_level: Literal["token", "sequence", "geometric"] = setting(
        "token", "Importance weights per token, per response, or the geometric mean over the tokens of a response."
    )
    importance_cap: float = setting(2.0, "Maximum importance weight; dppo: maximum ratio.", ge=1)
    importance_floor: float = setting(0.0, "Minimum importance weight that a mask keeps.", ge=0, le=1)

    @model_validator(mode="before")
    @classmethod
    def _with_defaults_of_algorithm(cls, data: Any) -> Any:
        """Fill in the algorithm's own defaults, so that a saved config is complete. A string is the name."""
        if isinstance(data, str):
            data = {"name": data}
        name = data.get("name", "ppo") if isinstance(data, dict) else None
        row = next((row for known, row in ALGORITHMS.items() if known == name), None)
        if row is None:
            return data  # the field's own validation reports it
        loss = data.get("loss", row.defaults.get("loss"))
        defaults = {**row.defaults, **(LOSSES[loss].defaults if isinstance(loss, str) and loss in LOSSES else {})}
        filled = {**defaults, **data}
        clip, is_symmetric = data.get("eps_clip"), defaults.get("eps_clip") == defaults.get("eps_clip_high")
        if is_symmetric and isinstance(clip, int | float) and 0 < clip <= 1:  # report an invalid value once, not twice
            filled["eps_clip_high"] = data.get("eps_clip_high", clip)  # a symmetric range stays symmetric
        if isinstance(lam := data.get("lam"), int | float) and 0 <= lam <= 1:
            filled.setdefault("critic_lam", lam)
        return filled

    @property
    def advantages(self) -> AdvantageKind:
        """How advantages are computed from scores."""
        return ALGORITHMS[self.name].advantages

    @property
    def loss_row(self) -> LossRow:
        """The row of the policy loss in `LOSSES`, or that of your own function."""
        return LOSSES.get(self.loss, _OWN_LOSS)

    @property
    def uses_critic(self) -> bool:
        """Whether the algorithm trains a critic."""
        return self.advantages == "gae"

    @property
    def uses_groups(self) -> bool:
        """Whether the samples of one prompt are compared with each other."""
        return self.advantages not in ("gae", "returns")

    @property
    def kl_reward_coef(self) -> float:
        """Weight of the KL penalty in the rewards of tokens; 0 if it is in the loss."""
        return self.kl_coef if self.kl_in == "reward" else 0.0

    @property
    def kl_loss_coef(self) -> float:
        """Weight of the KL term of the loss; 0 if the penalty is in the reward."""
        return self.kl_coef if self.kl_in == "loss" else 0.0

    def resolved(self, max_staleness: int) -> Self:
        """Return these settings with `correction` "auto" resolved for a staleness bound.

        On-policy data needs no correction, with two exceptions: the clip range of sequence-level ratios is so narrow
        that rounding in another engine would exceed it, and a mask is meant to catch the errors of such engines.
        """
        if self.correction != "auto":
            return self
        row = self.loss_row
        is_off_policy = max_staleness != 0 and not row.corrects_age
        is_off_policy |= row.ratio == "sequence" or self.importance == "mask"
        return self.model_copy(update={"correction": "decoupled" if is_off_policy else "none"})

    def _conflicts(self) -> Iterator[tuple[str, str, Any, str]]:
        with_name = f'with algorithm.name = "{self.name}", which'
        if self.kl_in == "loss" and self.kl_coef > 0 and self.kl_estimator == "k1":
            rule = '"k2" or "k3" while algorithm.kl_in is "loss" (the gradient of k1 averages to zero)'
            yield "kl_estimator", rule, "k1", "Use k3."
        if self.dynamic_sampling and not self.uses_groups:
            rule = f"false {with_name} does not compare the samples of a prompt"
            yield "dynamic_sampling", rule, True, "Use dapo or grpo."
        if self.advantages == "group_over_mean" and self.kl_reward_coef:
            rule = f'"loss" {with_name} divides by the mean score: a penalty in the reward can make that 0 or less'
            yield "kl_in", rule, self.kl_in, "Remove it."
        if not self.uses_critic and (key := next((key for key in _CRITIC_KEYS if getattr(self, key)), None)):
            yield key, f"0 {with_name} has no critic", getattr(self, key), "Use ppo or vapo."
        if self.kl_target and not self.kl_loss_coef:
            rule = '0 unless algorithm.kl_in is "loss" and algorithm.kl_coef, the initial weight, is above 0'
            yield "kl_target", rule, self.kl_target, "Set both, or remove it."
        with_loss = f'with algorithm.loss = "{self.loss}", which'
        if self.loss_row.ratio == "sequence" and self.normalization != "sequence":
            rule = f'"sequence" {with_loss} has ratios of whole responses'
            yield "normalization", rule, self.normalization, "Remove it."
        if self.loss == "dppo" and self.correction == "decoupled":
            rule = f'"none" {with_loss} already weights by its own ratio: importance weights would apply it twice'
            yield "correction", rule, "decoupled", "Remove it."
        if self.importance == "mask" and (self.loss == "dppo" or self.correction == "none"):
            here = f"{with_loss} has its own mask" if self.loss == "dppo" else 'while algorithm.correction is "none"'
            yield "importance", f'"truncate" {here}', "mask", "Remove one of the two."
        if self.importance_floor > 0 and self.importance != "mask":
            rule = f'0 while algorithm.importance is "{self.importance}", which drops nothing'
            yield "importance_floor", rule, self.importance_floor, 'Set algorithm.importance to "mask".'

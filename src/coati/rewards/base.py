"""What a reward is asked and what it answers: one score per sample, NaN where there is none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from coati.errors import ConfigError


@dataclass(frozen=True, kw_only=True, eq=False)
class RewardRequest:
    """A batch of finished samples, as text and as tokens: functions read the text, models the tokens."""

    prompts: list[str]
    completions: list[str]
    """Both empty for a reward that says that it reads no text (`reads_text`), which is spared the decoding."""
    columns: dict[str, list[Any]] = field(default_factory=dict)
    """Further columns of the dataset, B values each."""
    sequences: Tensor  # [B, S] left-padded prompt, then response, S = P + A
    attention_mask: Tensor  # [B, S]
    action_mask: Tensor  # [B, A] True on response tokens
    ready: Mapping[nn.Module, Tensor] = field(default_factory=dict)
    """Scores [B] of reward models that were asked already, together with the reference and the critic."""

    def __len__(self) -> int:
        return len(self.completions) or int(self.sequences.shape[0])


@runtime_checkable
class Reward(Protocol):
    """Anything with a name that scores a batch."""

    @property
    def name(self) -> str:
        """What metrics and errors call it."""

    def score(self, request: RewardRequest) -> Tensor:
        """Return one score per sample, [B] float32; NaN = no score, so the caller drops the sample.

        Raises:
            RewardError: when the reward as a whole failed.
        """


def is_host_work(reward: Reward) -> bool:
    """Whether a reward computes with Python and not with models, so that it may run beside them, on another thread.

    It says so itself, by an attribute of this name; one that does not is taken for a model.
    """
    return bool(getattr(reward, "is_host_work", False))


def reads_text(reward: Reward) -> bool:
    """Whether a reward looks at prompts and completions as text; one that has no attribute of this name may."""
    return bool(getattr(reward, "reads_text", True))


def models_of(reward: Reward) -> tuple[nn.Module, ...]:
    """The models that a reward asks, called as `model(sequences, attention_mask)`; it names them by `models`.

    Makers ask those that are `RewardModel`s beforehand, so a reward that names them takes their scores from
    `RewardRequest.ready` if they are there.
    """
    return tuple(getattr(reward, "models", ()))


def longest_seconds(reward: Reward) -> float:
    """How long a reward may take over a batch: its own `timeout_seconds`, or half an hour."""
    return float(getattr(reward, "timeout_seconds", 1800.0))


class WeightedSum:
    """The weighted sum of several rewards. A sample that one of them gives no score has none.

    Args:
        terms: (reward, weight) pairs whose rewards have different names.
        name: what metrics and errors call the sum.

    Attributes:
        last_terms: mean score of each term in the latest batch, before weighting, over the samples that have
            one (NaN when none has).
    """

    def __init__(self, terms: Sequence[tuple[Reward, float]], name: str = "sum") -> None:
        names = [reward.name for reward, _ in terms]
        if not terms or len(set(names)) != len(names):
            raise ConfigError(
                f"reward.terms must be one or more rewards with different names, got {names}. "
                "Give each term a name of its own."
            )
        self.name = name
        self.last_terms: dict[str, float] = {}
        self._terms = tuple(terms)

    @property
    def is_host_work(self) -> bool:
        """Whether all of the rewards may run beside the models."""
        return all(is_host_work(reward) for reward, _ in self._terms)

    @property
    def reads_text(self) -> bool:
        """Whether any of the rewards does; a subclass with a `score` of its own may too."""
        is_own = type(self).score is not WeightedSum.score
        return is_own or any(reads_text(reward) for reward, _ in self._terms)

    @property
    def models(self) -> tuple[nn.Module, ...]:
        """All models that they ask."""
        return tuple(model for reward, _ in self._terms for model in models_of(reward))

    @property
    def timeout_seconds(self) -> float:
        """The longest that they may take, one after the other."""
        return sum(longest_seconds(reward) for reward, _ in self._terms)

    def score(self, request: RewardRequest) -> Tensor:
        """Return the weighted sum, [B] float32."""
        scores = [reward.score(request).float() for reward, _ in self._terms]  # each [B]
        self.last_terms = {
            reward.name: score.nanmean().item() for (reward, _), score in zip(self._terms, scores, strict=True)
        }
        total = torch.zeros(len(request), dtype=torch.float32, device=scores[0].device)
        for (_, weight), score in zip(self._terms, scores, strict=True):
            # A weight of 0 must not hide that a term failed: 0 × NaN stays NaN.
            total = total + weight * score.to(total.device)
        return total

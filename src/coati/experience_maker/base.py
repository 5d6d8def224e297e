"""The interface of a maker. `Experience` is defined in `coati.experience`; this is the contract's import path."""

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor, nn

from coati.experience import Experience

__all__ = ["Experience", "ExperienceMaker"]


class ExperienceMaker(ABC):
    """Turns prompts into experience with four models: actor, critic, reward model and initial model.

    `critic` is None for algorithms that need none. `actor` and `initial_model` may be plain transformers models or an
    `Actor`; the reward model may be any module that maps (sequences, attention_mask) to one score per sample, or a
    `RewardScorer`.
    """

    def __init__(self, actor: nn.Module, critic: nn.Module | None, reward_model: Any, initial_model: nn.Module) -> None:
        self.actor = actor
        self.critic = critic
        self.reward_model = reward_model
        self.initial_model = initial_model

    @property
    def trained_models(self) -> dict[str, nn.Module]:
        """The models that a trainer updates, by the names that weight updates use."""
        return {"actor": self.actor} | ({} if self.critic is None else {"critic": self.critic})

    @abstractmethod
    def make_experience(self, input_ids: Tensor, attention_mask: Tensor, **generate_kwargs: Any) -> Experience:
        """Generate a response to each prompt and score it."""

"""What a maker makes, and the interface of a maker.

`Experience` is the one data container between generation and learning. Shapes: B samples, P prompt tokens
(left-padded), A response tokens (right-padded), S = P + A.
"""

import dataclasses
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Self

import torch
from torch import Tensor, nn

from coati.errors import DataError

logger = logging.getLogger(__name__)
_said_no_pinning = False


@dataclasses.dataclass
class Experience:
    """A batch of samples with everything PPO needs to learn from them.

    The first eight fields are the contract; the others say where each sample came from and default to None.

    >>> tokens, floats = torch.tensor([[5, 6, 7]]), torch.zeros(1, 2)
    >>> experience = Experience(tokens, floats, floats, torch.ones(1), floats, floats, None, None)
    >>> experience.num_samples, experience.num_prompt_tokens, experience.num_actions
    (1, 1, 2)
    """

    # What was written: prompt and response token ids, [B, S].
    sequences: Tensor
    # log π(token) of each response token under the policy that sampled it, [B, A].
    action_log_probs: Tensor
    # The critic's estimate V(state before the token), [B, A]; zeros without a critic.
    values: Tensor
    # The score of each sequence, without the KL penalty, [B].
    reward: Tensor
    # Per-token estimate of KL(policy || initial model), [B, A].
    kl: Tensor
    # Advantages, not whitened; with a critic, advantages + values is its target, [B, A].
    advantages: Tensor
    # 1 on real tokens, 0 on padding, [B, S].
    attention_mask: Tensor | None
    # True on response tokens, the end-of-sequence token included, False after it, [B, A].
    action_mask: Tensor | None

    # Which sample this is: keys its randomness and its fate, [B] int64.
    sample_ids: Tensor | None = None
    # Samples of one prompt share a group id, [B] int64.
    group_ids: Tensor | None = None
    # Version of the weights that wrote each token, [B, A] int64.
    policy_versions: Tensor | None = None
    # log-probs as the rollout engine saw them while sampling, [B, A]; our makers' action_log_probs are these.
    rollout_log_probs: Tensor | None = None
    # Sampling temperature; log-probs above and in training are those of softmax(logits / temperature), [B].
    temperatures: Tensor | None = None
    # log-probs under the weights with which the learner first saw the batch, [B, A]; written by the learner.
    proximal_log_probs: Tensor | None = None
    # The critic's target where it is not advantages + values (V-trace), [B, A]; written by the learner.
    returns: Tensor | None = None
    # log-probs under the initial model, [B, A]; only where the KL penalty is a term of the loss.
    reference_log_probs: Tensor | None = None

    @classmethod
    def empty(cls) -> Self:
        """No sample at all: what a rank without data passes to the learner while others have some."""
        tokens, ids = torch.zeros(0, 2, dtype=torch.long), torch.zeros(0, dtype=torch.long)
        scores, floats = torch.zeros(0), torch.zeros(0, 1)
        return cls(
            *(tokens, floats, floats, scores, floats, floats, tokens, floats.bool()),
            sample_ids=ids,
            group_ids=ids,
            policy_versions=floats.long(),
            rollout_log_probs=floats,
            temperatures=scores,
            reference_log_probs=floats,
        )

    @property
    def num_samples(self) -> int:
        """B."""
        return int(self.sequences.shape[0])

    @property
    def num_actions(self) -> int:
        """A, the padded length of the responses."""
        return int(self.action_log_probs.shape[1])

    @property
    def num_prompt_tokens(self) -> int:
        """P, the padded length of the prompts."""
        return int(self.sequences.shape[1]) - self.num_actions

    def full_action_mask(self) -> Tensor:
        """`action_mask`, or all True where the experience has none, [B, A] bool."""
        if self.action_mask is not None:
            return self.action_mask.bool()
        return torch.ones_like(self.action_log_probs, dtype=torch.bool)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every field that is present, by name."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None:
                yield field.name, value

    @torch.no_grad()
    def to_device(self, device: torch.device | str) -> None:
        """Move every tensor in place, leaving None alone."""
        for name, tensor in list(self.tensors()):
            setattr(self, name, tensor.to(device, non_blocking=tensor.device.type == "cpu" and tensor.is_pinned()))

    def pin_memory(self) -> Self:
        """Pin every tensor for fast copies to the GPU; without CUDA a no-op that says so once, at debug."""
        global _said_no_pinning
        if not torch.cuda.is_available():
            if not _said_no_pinning:
                logger.debug("pin_memory() does nothing here: this machine has no CUDA device")
                _said_no_pinning = True
            return self
        for name, tensor in list(self.tensors()):
            if tensor.device.type == "cpu" and not tensor.is_pinned():
                setattr(self, name, tensor.pin_memory())
        return self

    def select(self, rows: Tensor | slice) -> "Experience":
        """The samples that `rows` picks (an index tensor, a bool mask or a slice), as a new experience.

        All fields have the samples as their first dimension, so the same selection fits them all.
        """
        return dataclasses.replace(self, **{name: tensor[rows] for name, tensor in self.tensors()})

    def validate(self) -> None:
        """Raise DataError if the fields do not fit each other: a ragged batch must not get any further."""
        for name, shape in (("sequences", "[B, S]"), ("action_log_probs", "[B, A]")):
            tensor = getattr(self, name)
            if not isinstance(tensor, Tensor) or tensor.ndim != 2:
                came = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
                raise DataError(
                    f"experience.{name} must be a tensor {shape}, got {came}. "
                    "Pad ragged samples with make_experience_batch."
                )
        batch, length = self.sequences.shape
        actions = self.num_actions
        if actions > length:
            raise DataError(
                f"experience.action_log_probs has {actions} response tokens, more than the {length} of "
                "experience.sequences. Sequences hold the prompt and the response."
            )
        for field in dataclasses.fields(self):
            tensor = getattr(self, field.name)
            if tensor is None and field.name not in REQUIRED_FIELDS:
                continue
            if not isinstance(tensor, Tensor):
                raise DataError(f"experience.{field.name} must be a tensor, got {type(tensor).__name__}.")
            expected: tuple[int, ...] = (batch, actions)
            if field.name in PER_TOKEN_FIELDS:
                expected = (batch, length)
            elif field.name in PER_SAMPLE_FIELDS:
                expected = (batch,)
            if tuple(tensor.shape) != expected:
                raise DataError(
                    f"experience.{field.name} must be {list(expected)}, got {list(tensor.shape)}. "
                    "All fields of one experience share B, S and A; pad ragged samples with "
                    "make_experience_batch."
                )


EXPERIENCE_FIELDS = tuple(field.name for field in dataclasses.fields(Experience))
REQUIRED_FIELDS = EXPERIENCE_FIELDS[:6]
PER_TOKEN_FIELDS = ("sequences", "attention_mask")  # [B, S]
PER_SAMPLE_FIELDS = ("reward", "sample_ids", "group_ids", "temperatures")  # [B]; all others are [B, A]


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
        """The models that a trainer updates, by the names that weight updates call them."""
        return {"actor": self.actor} | ({} if self.critic is None else {"critic": self.critic})

    @abstractmethod
    def make_experience(self, input_ids: Tensor, attention_mask: Tensor, **generate_kwargs: Any) -> Experience:
        """Generate a response to each prompt and score it."""

"""Batches, cut into passes that fit into the device's memory."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from coati.config import TrainSettings
from coati.devices import HOST_MEMORY, device_errors_explained
from coati.errors import ConfigError, OutOfMemory
from coati.experience import Experience
from coati.models.actor import packed_scoring_problem
from coati.models.packing import row_parts, row_tokens
from coati.models.value_head import packs
from coati.trainer.strategies import Strategy

logger = logging.getLogger(__name__)

LARGEST_PASS = 32768
FIXED_PASS = 16384


class PassTooLarge(Exception):
    """A pass ran out of memory; passes need less now, and the step has to start over."""


class MicroBatch(NamedTuple):
    """The rows of one forward and backward pass."""

    part: Experience
    advantages: Tensor
    """[B, A] of these rows, as the policy loss takes them."""
    tokens: int
    """What it costs; see `row_tokens`."""
    is_real: bool
    """False for a pass that only keeps this rank in step with the others."""
    is_last: bool


class PassSize:
    """Most tokens of a pass: `train.micro_batch_tokens` or, with "auto", what has fitted into memory so far.

    "auto" starts with `LARGEST_PASS` on a GPU (more would not be faster) and halves it when a pass runs out of memory.
    When a single sample does, it calls `checkpoint`, which has models checkpoint their activations, and starts again.
    It is `FIXED_PASS` where a step cannot start over: with several ranks, which wait for each other in a pass, and with
    sharded parameters, because FSDP2 cannot leave one halfway. On a CPU it starts with that.
    """

    def __init__(self, train: TrainSettings, strategy: Strategy, checkpoint: Callable[[], None]) -> None:
        self._train = train
        self._checkpoint = None if train.activation_checkpointing else checkpoint
        setting = train.micro_batch_tokens
        self._starts_over = setting == "auto" and strategy.world_size == 1 and not strategy.shards_parameters
        auto = LARGEST_PASS if self._starts_over and strategy.device.type != "cpu" else FIXED_PASS
        self.tokens: int = auto if setting == "auto" else setting
        self._first_tokens = self.tokens

    @contextlib.contextmanager
    def guard(self, label: str, one: MicroBatch) -> Iterator[None]:
        """Turn errors of the device in a pass into ours; `PassTooLarge` if smaller passes may do."""
        is_single = one.part.num_samples < 2
        if is_single:
            remedy = "A pass has at least one sample: lower rollout.max_new_tokens or prompts.max_tokens"
        else:
            remedy = f"Set train.micro_batch_tokens, which is {self._train.micro_batch_tokens}, to {one.tokens // 2}"
        if not self._train.activation_checkpointing:
            remedy += ", or set train.activation_checkpointing"
        what = f"the {label}'s pass over {one.part.num_samples} samples, {one.tokens} tokens,"
        try:
            with device_errors_explained(what, f"{remedy}."):
                yield
        except OutOfMemory as error:
            if not self._starts_over or HOST_MEMORY in str(error) or (is_single and self._checkpoint is None):
                raise
            if is_single:
                self._turn_on_checkpointing(error)
            while not is_single and self.tokens >= one.tokens:
                self.tokens //= 2
            how = "activations are computed again in the backward pass (train.activation_checkpointing), and "
            logger.warning(
                "%s; %spasses have at most %d tokens from now on, and the step starts over",
                str(error).partition(". ")[0],
                how * is_single,
                self.tokens,
            )
            raise PassTooLarge from None

    def _turn_on_checkpointing(self, error: OutOfMemory) -> None:
        assert self._checkpoint is not None
        checkpoint, self._checkpoint = self._checkpoint, None
        try:
            checkpoint()
        except ConfigError:  # a model that cannot
            raise error from None
        self.tokens = self._first_tokens


def micro_batches(
    experience: Experience,
    advantages: Tensor,  # [B, A] of the whole batch, as the policy loss takes them
    *,
    actor: nn.Module,
    critic: nn.Module | None,
    strategy: Strategy,
    max_rows: int,
    max_tokens: int,
) -> Iterator[MicroBatch]:
    """Cut a batch into passes; all ranks make as many, at least one, because they gather parameters together."""
    parts: list[slice] = []
    costs: list[int] = []
    if experience.num_samples > 0 and experience.num_actions > 0:
        is_packed = not packed_scoring_problem(actor) and (critic is None or packs(critic))
        costs = row_tokens(experience.sequences, experience.attention_mask, is_packed=is_packed)
        parts = row_parts(costs, max_tokens=max_tokens, max_rows=max_rows)
    num_passes = int(strategy.all_gather(torch.tensor([max(1, len(parts))])).max())
    for index in range(num_passes):
        is_last = index == num_passes - 1
        if index < len(parts):
            rows = parts[index]
            part, tokens = experience.select(rows), sum(costs[rows])
            yield MicroBatch(part, advantages[rows], tokens, is_real=True, is_last=is_last)
        else:
            part = _weightless_row(experience)
            yield MicroBatch(part, part.advantages, part.sequences.numel(), is_real=False, is_last=is_last)


def _weightless_row(like: Experience) -> Experience:
    """One row of two tokens, of which none counts."""
    tokens = torch.zeros(1, 2, dtype=torch.long, device=like.sequences.device)
    floats = like.action_log_probs.new_zeros(1, 1)
    return Experience(
        sequences=tokens,
        action_log_probs=floats,
        values=floats,
        reward=floats[0],
        kl=floats,
        advantages=floats,
        attention_mask=torch.ones_like(tokens),
        action_mask=torch.zeros_like(floats, dtype=torch.bool),
        reference_log_probs=floats,
        proximal_log_probs=floats,
    )

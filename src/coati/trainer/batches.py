"""Batches, cut into passes that fit into the device's memory."""

import contextlib
import logging
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from coati.config import TrainSettings
from coati.devices import HOST_MEMORY, device_errors_explained
from coati.errors import OutOfMemory
from coati.experience import Experience
from coati.models.actor import packed_scoring_problem
from coati.models.packing import row_parts, row_tokens
from coati.models.value_head import packs
from coati.trainer.strategies import Strategy

logger = logging.getLogger(__name__)

LARGEST_PASS = 32768
FIXED_PASS = 16384


class PassTooLarge(Exception):
    """A pass ran out of memory; passes are smaller now, and the step has to start over."""


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
    It is `FIXED_PASS` where a step cannot start over: with several ranks, which wait for each other in a pass, and with
    sharded parameters, because FSDP2 cannot leave one halfway. On a CPU it starts with that.
    """

    def __init__(self, train: TrainSettings, strategy: Strategy) -> None:
        self._train = train
        setting = train.micro_batch_tokens
        self._starts_over = setting == "auto" and strategy.world_size == 1 and not strategy.shards_parameters
        auto = LARGEST_PASS if self._starts_over and strategy.device.type != "cpu" else FIXED_PASS
        self.tokens: int = auto if setting == "auto" else setting

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
            if is_single or not self._starts_over or HOST_MEMORY in str(error):
                raise
            while self.tokens >= one.tokens:
                self.tokens //= 2
            reason = str(error).partition(". ")[0]
            logger.warning(
                "%s; passes have at most %d tokens from now on, and the step starts over", reason, self.tokens
            )
            raise PassTooLarge from None


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

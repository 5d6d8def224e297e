"""Batches, cut into passes that fit into the device's memory."""

import contextlib
import gc
import logging
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from coati.config import TrainSettings
from coati.errors import OutOfMemory
from coati.experience import Experience
from coati.gpu import HOST_MEMORY, device_errors_explained
from coati.models.actor import packed_scoring_problem
from coati.models.packing import row_parts, row_tokens
from coati.models.value_head import packs
from coati.trainer.strategies import Strategy

logger = logging.getLogger(__name__)

LARGEST_PASS = 32768
FIXED_PASS = 16384


class PassTooLarge(Exception):
    """A pass ran out of memory on some rank; passes are smaller now, and the step has to start over."""


class PassSize:
    """Most tokens of a pass: `train.micro_batch_tokens` or, with "auto", what has fitted into memory so far.

    "auto" starts with `LARGEST_PASS` on a GPU, and halves it when a pass runs out of memory, for the rest of the run.
    It never tries more, because that would not be faster: so many tokens keep all processors of a large card busy in
    every kernel, even those of a small model, and the memory may be wanted by a maker on the same card. Where a step
    cannot start over it is `FIXED_PASS`: on a CPU, whose bits must not depend on the machine, and where parameters are
    sharded, because FSDP2 cannot leave a pass halfway, and the other ranks wait for this one's part of the weights.
    """

    def __init__(self, train: TrainSettings, strategy: Strategy) -> None:
        self._train = train
        self._strategy = strategy
        self._proven = 0  # tokens of the largest pass that has fitted beside the optimizer's state
        setting, is_gpu = train.micro_batch_tokens, strategy.device.type != "cpu"
        can_leave_a_pass = not strategy.shards_parameters and (is_gpu or strategy.world_size == 1)
        self.starts_over = setting == "auto" and can_leave_a_pass
        """Whether a step whose pass runs out of memory is made again with smaller ones."""
        auto = LARGEST_PASS if is_gpu and self.starts_over else FIXED_PASS
        self.tokens: int = auto if setting == "auto" else setting

    def is_proven(self, tokens: int) -> bool:
        """Whether a pass of so many tokens has fitted before, so that ranks may exchange gradients during it."""
        return tokens <= self._proven

    def note_fitting(self, tokens: int) -> None:
        """Note that all passes of a step fitted, the largest of which had so many tokens."""
        self._proven = max(self._proven, tokens)

    @contextlib.contextmanager
    def agreed(self, batches: "MicroBatches") -> Iterator[None]:
        """Make passes; if one runs out of memory on any rank, halve the size and raise `PassTooLarge` on all."""
        if not batches.may_start_over:
            yield
            return
        tokens, failure = self.tokens, "a pass of another rank ran out of memory (its own message has the size)"
        try:
            yield
        except OutOfMemory as error:
            # Nothing but its text: the traceback holds what the pass had computed.
            tokens, failure = batches.half_of_pass(self.tokens), str(error)
            if HOST_MEMORY in failure:
                tokens = 0
        tokens = int(self._strategy.all_gather(torch.tensor([tokens])).min())
        if tokens == self.tokens:
            return
        if tokens == 0:
            raise OutOfMemory(failure)
        reason = failure.partition(". ")[0]
        logger.warning("%s; passes have at most %d tokens from now on, and the step starts over", reason, tokens)
        self.tokens = tokens
        raise PassTooLarge

    def explained(self, label: str, one: "MicroBatch") -> contextlib.AbstractContextManager[None]:
        """Turn errors of the device in a pass into ours, with its size and the settings to change."""
        if one.part.num_samples > 1:
            remedy = f"Set train.micro_batch_tokens, which is {self._train.micro_batch_tokens}, to {one.tokens // 2}"
        else:
            remedy = "A pass has at least one sample: lower rollout.max_new_tokens or prompts.max_tokens"
        if not self._train.activation_checkpointing:
            remedy += ", or set train.activation_checkpointing"
        what = f"the {label}'s pass over {one.part.num_samples} samples, {one.tokens} tokens,"
        return device_errors_explained(what, f"{remedy}.")


def free_memory() -> None:
    """Give back what a pass that failed has left behind, so that others on the card may have it too."""
    gc.collect()
    torch.cuda.empty_cache()


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


class MicroBatches:
    """The passes that a batch is cut into by `train.micro_batch_size` and a `PassSize`.

    Sharded parameters are gathered by all ranks together, so all ranks make as many passes, and at least one: a rank
    that finished early would leave the others waiting in their next forward pass. Ranks with whole models exchange
    gradients in the last pass. Where that might not fit, an empty one is added for it: then every pass before it is a
    rank's own, and all can start over.
    """

    def __init__(
        self,
        experience: Experience,
        actor: nn.Module,
        critic: nn.Module | None,
        strategy: Strategy,
        train: TrainSettings,
        size: PassSize,
    ) -> None:
        self._experience = experience
        rows: list[slice] = []
        self._costs: list[int] = []
        if experience.num_samples > 0 and experience.num_actions > 0:
            is_packed = not packed_scoring_problem(actor) and (critic is None or packs(critic))
            self._costs = row_tokens(experience.sequences, experience.attention_mask, is_packed=is_packed)
            rows = row_parts(self._costs, max_tokens=size.tokens, max_rows=train.micro_batch_size)
        own = torch.tensor([max(1, len(rows)), max((sum(self._costs[part]) for part in rows), default=0)])
        num_passes, self.largest = strategy.all_gather(own).amax(dim=0).tolist()
        is_group = strategy.world_size > 1
        self.may_start_over = size.starts_over and not (is_group and size.is_proven(self.largest))
        num_passes += is_group and self.may_start_over
        self._rows: Sequence[slice | None] = rows + [None] * (num_passes - len(rows))
        self.num_own = num_passes - is_group
        """Passes before the one in which ranks exchange gradients."""
        self._current: slice | None = None

    def passes(self, advantages: Tensor) -> Iterator[MicroBatch]:
        """Yield the passes; `advantages`, [B, A], are those of the whole batch."""
        for index, rows in enumerate(self._rows):
            self._current, is_last = rows, index == len(self._rows) - 1
            if rows is None:
                part = _weightless_row(self._experience)
                yield MicroBatch(part, part.advantages, part.sequences.numel(), is_real=False, is_last=is_last)
            else:
                part, tokens = self._experience.select(rows), sum(self._costs[rows])
                yield MicroBatch(part, advantages[rows], tokens, is_real=True, is_last=is_last)

    def half_of_pass(self, tokens: int) -> int:
        """Halve a number until it cuts the pass under way; 0 if that is a single sample."""
        if self._current is None or self._current.stop - self._current.start < 2:
            return 0
        while tokens >= sum(self._costs[self._current]) > 0:
            tokens //= 2
        return tokens

    def joined(self, of_passes: Sequence[Tensor]) -> Tensor:
        """Join what the real passes gave, [B, A] each; zeros if there were none."""
        return torch.cat(list(of_passes)) if of_passes else torch.zeros_like(self._experience.action_log_probs)


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

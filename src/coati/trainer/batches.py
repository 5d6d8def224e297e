"""Batches on their way to the device, and cut into passes."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from coati.config import TrainSettings
from coati.experience import Experience
from coati.models.actor import packed_scoring_problem
from coati.models.packing import row_parts, row_tokens
from coati.models.value_head import packs
from coati.trainer.strategies import Strategy


class MicroBatch(NamedTuple):
    """The rows of one forward and backward pass."""

    part: Experience
    advantages: Tensor
    """[B, A] of these rows, as the policy loss takes them."""
    is_real: bool
    """False for a pass that only keeps this rank in step with the others."""
    is_last: bool


class MicroBatches:
    """The passes that a batch is cut into by `train.micro_batch_size` and `train.micro_batch_tokens`.

    Sharded parameters are gathered by all ranks together, so all ranks make as many passes, and at least one: a rank
    that finished early would leave the others waiting in their next forward pass.
    """

    def __init__(
        self,
        experience: Experience,
        actor: nn.Module,
        critic: nn.Module | None,
        strategy: Strategy,
        train: TrainSettings,
    ) -> None:
        self._experience = experience
        rows: list[slice] = []
        if experience.num_samples > 0 and experience.num_actions > 0:
            is_packed = not packed_scoring_problem(actor) and (critic is None or packs(critic))
            costs = row_tokens(experience.sequences, experience.attention_mask, is_packed=is_packed)
            rows = row_parts(costs, max_tokens=train.micro_batch_tokens, max_rows=train.micro_batch_size)
        num_passes = int(strategy.all_gather(torch.tensor([max(1, len(rows))])).max())
        self._rows: Sequence[slice | None] = rows + [None] * (num_passes - len(rows))

    def passes(self, advantages: Tensor) -> Iterator[MicroBatch]:
        """Yield the passes; `advantages`, [B, A], are those of the whole batch."""
        for index, rows in enumerate(self._rows):
            part = _weightless_row(self._experience) if rows is None else self._experience.select(rows)
            own = part.advantages if rows is None else advantages[rows]
            yield MicroBatch(part, own, is_real=rows is not None, is_last=index == len(self._rows) - 1)

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


class BatchMover:
    """Copies batches to a GPU on a separate stream; where there is no GPU, batches stay as they are.

    `used_on` is the stream of the training steps, if that is not the default one.
    """

    def __init__(self, device: torch.device, used_on: torch.cuda.Stream | None = None) -> None:
        self._device = device
        self._used_on = used_on
        # Stream has no annotations.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def __call__(self, batch: Experience) -> Experience:
        """Move the batch; it is on the device when this returns. Pinned memory is copied while others compute."""
        if self._stream is None:
            return batch
        with torch.cuda.stream(self._stream):
            batch.to_device(self._device)
        self._stream.synchronize()
        used_on = self._used_on or torch.cuda.default_stream(self._device)
        for _, tensor in batch.tensors():
            # The memory belongs to our stream, which may give it out again as soon as it is freed; the training step
            # uses it on another one.
            tensor.record_stream(used_on)
        return batch

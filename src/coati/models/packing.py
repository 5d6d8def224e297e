"""Rows of a padded batch joined end to end: the models compute real tokens and nothing else.

        [. . a b c d . .]
        [e f g h i . . .]    →    [a b c d e f g h i j k]    positions 0 1 2 3 0 1 2 3 4 0 1
        [. . . j k . . .]

The joined row is an ordinary call of the model, with attention that stays inside of each row (`packed_attention.py`).
Where rows begin alike, as several responses to one prompt do, what they have in common is computed once:

        [p q r a b]                                       a row's token    computed at
        [p q r c .]    →    computed: p q r a b c d e     p q r a b        0 1 2 3 4
        [p q r d e]                                       p q r c          0 1 2 5
                                                          p q r d e        0 1 2 6 7

Only attention sees whole rows, so log-probs, values and gradients are those of whole rows to rounding. Models that are
not known to pass these arguments on to their attention are called with padding; `packing_problem` gives the reason.
"""

import dataclasses
import functools
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from coati.models.packed_attention import PACKED_ATTENTION, drop_flash_on_old_gpus, take, take_often
from coati.models.tiles import active_tile

logger = logging.getLogger(__name__)

SCORED_TOKENS = 32768
"""Tokens that are scored in one pass: enough to keep a large GPU busy, and a bound on what it has to hold."""
# Decoders whose layers hand on what they do not know to their attention, and whose body ends in what the head reads:
# no scaling, no soft cap. Each is held against its padded self in the tests.
PACKED_MODEL_TYPES = (
    "llama", "mistral", "qwen2", "qwen3", "smollm3", "gemma", "gemma3_text", "phi", "phi3", "olmo2", "gpt2", "gpt_neox",
    "opt",
)  # fmt: skip

LEAST_TOKENS = 4
"""A beginning in common that is worth its bookkeeping."""
_LEAST_SHARE = 8  # of all tokens it must be at least one in so many


@dataclasses.dataclass(frozen=True)
class SharedPrefixes:
    """Which of the N tokens of packed rows are computed, T of them; the others are as in another row."""

    owners: Tensor
    """[T] of each token that is computed: where it is among the N."""
    slots: Tensor
    """[N] of each token: where it is among the T."""

    @classmethod
    def of(cls, sequences: Tensor, is_real: Tensor, *, least: int = LEAST_TOKENS) -> "SharedPrefixes | None":
        """What the rows of a padded batch `[B, S]` have in common with the rows right before them; None if too little.

        >>> rows = torch.tensor([[5, 6, 7, 1], [5, 6, 7, 2], [5, 6, 8, 9]])
        >>> shared = SharedPrefixes.of(rows, torch.ones_like(rows, dtype=torch.bool), least=2)
        >>> shared.owners.tolist(), shared.slots.tolist()
        ([0, 1, 2, 3, 7, 10, 11], [0, 1, 2, 3, 0, 1, 2, 4, 0, 1, 5, 6])
        """
        if sequences.shape[0] < 2 or sequences.shape[1] < least:
            return None
        is_like = (is_real[1:] == is_real[:-1]) & ((sequences[1:] == sequences[:-1]) | ~is_real[1:])
        in_common = (is_like.cumprod(dim=1).bool() & is_real[1:]).sum(dim=1)
        lengths = is_real.sum(dim=1)
        *counts, num_tokens = torch.cat([in_common, lengths.sum().unsqueeze(0)]).tolist()
        heads, shared = _lenders(counts, least)
        if sum(shared) * _LEAST_SHARE < max(num_tokens, 1):
            return None
        head_of, shared_of = torch.tensor([heads, shared], device=sequences.device)  # [B] each
        spots = is_real.flatten().nonzero().squeeze(1)  # [N]
        rows = spots // sequences.shape[1]
        positions = (is_real.cumsum(dim=1) - 1).flatten()[spots]
        is_taken = positions < shared_of[rows]
        own_slots = (~is_taken).cumsum(dim=0) - 1
        starts = lengths.cumsum(dim=0) - lengths  # [B]
        return cls(
            owners=(~is_taken).nonzero().squeeze(1),
            slots=torch.where(is_taken, own_slots[starts[head_of[rows]] + positions], own_slots),
        )


def _lenders(in_common: Sequence[int], least: int) -> tuple[list[int], list[int]]:
    """From which row each one takes its first tokens, and how many; `in_common` is what it shares with the one before.

    >>> _lenders([40, 35, 3, 50], 32)
    ([0, 0, 0, 3, 3], [0, 40, 35, 0, 50])
    """
    heads, shared = [0], [0]
    for row, count in enumerate(in_common, start=1):
        is_head = heads[-1] == row - 1
        length = count if is_head else min(count, shared[-1])
        heads.append(heads[-1] if length >= least else row)
        shared.append(length if length >= least else 0)
    return heads, shared


@dataclasses.dataclass(frozen=True)
class PackedRows:
    """The real tokens of a padded batch `[B, S]`, N of them, and where they came from."""

    tokens: Tensor
    """[N]"""
    positions: Tensor
    """[N] of each token in its row, from 0."""
    spots: Tensor
    """[N] of each token in the padded batch, row · S + column."""
    starts: Tensor
    """[rows + 1] int32: where each row begins here, and where the last one ends. Rows without a token are left out."""
    max_length: int
    shape: torch.Size
    """[B, S]"""
    shared: SharedPrefixes | None = None
    """Which of the tokens are computed, T of them; None for all."""

    @classmethod
    def of(cls, sequences: Tensor, attention_mask: Tensor | None) -> "PackedRows":
        """Join the rows of a batch; without a mask all tokens are real.

        >>> rows = PackedRows.of(torch.tensor([[0, 7, 8], [9, 0, 0]]), torch.tensor([[0, 1, 1], [1, 0, 0]]))
        >>> rows.tokens.tolist(), rows.positions.tolist(), rows.starts.tolist()
        ([7, 8, 9], [0, 1, 0], [0, 2, 3])
        """
        if attention_mask is None:
            attention_mask = torch.ones_like(sequences)
        is_real = attention_mask.ne(0)
        spots = is_real.flatten().nonzero().squeeze(1)
        lengths = is_real.sum(dim=1)
        lengths = lengths[lengths > 0]
        return cls(
            tokens=sequences.flatten()[spots],
            positions=(is_real.cumsum(dim=1) - 1).flatten()[spots],
            spots=spots,
            starts=F.pad(lengths.cumsum(0), (1, 0)).int(),
            max_length=int(lengths.max()) if len(lengths) else 0,
            shape=sequences.shape,
            # In a row of another length the common part would be rounded differently.
            shared=None if active_tile() else SharedPrefixes.of(sequences, is_real),
        )

    def __len__(self) -> int:
        return len(self.tokens)

    def computed(self, values: Tensor) -> Tensor:
        """[N, …] to [T, …]: what belongs to tokens that are computed."""
        return values if self.shared is None else values[self.shared.owners]

    def at(self, values: Tensor, tokens: Tensor) -> Tensor:
        """[T, …] to [n, …]: what was computed for some of the N tokens, each of which is named once."""
        return take(values, tokens) if self.shared is None else take_often(values, self.shared.slots[tokens])

    def actions(self, num_actions: int) -> tuple[Tensor, Tensor, Tensor]:
        """The tokens of the last `num_actions` columns that have one before them: index among the N, row and column.

        [n] each; columns are counted from the first of those.
        """
        columns = self.spots % self.shape[1] - (self.shape[1] - num_actions)
        at = ((columns >= 0) & (self.positions > 0)).nonzero().squeeze(1)
        return at, self.spots[at] // self.shape[1], columns[at]

    def unpacked(self, values: Tensor) -> Tensor:
        """[T] back to [B, S], with 0 at padding."""
        if self.shared is not None:
            values = take_often(values, self.shared.slots)
        rows, columns = self.spots // self.shape[1], self.spots % self.shape[1]
        # Not a view of something flat: sharding hangs its backward hook on what a module returns.
        return values.new_zeros(self.shape).index_put((rows, columns), values)


def row_parts(row_tokens: Sequence[int], *, max_tokens: int = 0, max_rows: int = 0) -> list[slice]:
    """Consecutive rows in as few parts as their order allows: at most so many tokens and rows in each, 0 for no limit.

    >>> row_parts([3, 3, 3, 9, 1], max_tokens=6)
    [slice(0, 2, None), slice(2, 3, None), slice(3, 4, None), slice(4, 5, None)]
    """
    parts: list[slice] = []
    start, tokens = 0, 0
    for row, more in enumerate(row_tokens):
        is_over = (max_tokens and tokens + more > max_tokens) or (max_rows and row - start >= max_rows)
        if is_over and row > start:
            parts.append(slice(start, row))
            start, tokens = row, 0
        tokens += more
    if row_tokens:
        parts.append(slice(start, len(row_tokens)))
    return parts


def row_tokens(sequences: Tensor, attention_mask: Tensor | None, *, is_packed: bool) -> list[int]:
    """What each row of a batch costs: its real tokens or, where padding is computed too, the width of the batch."""
    if attention_mask is None or not is_packed:
        return [sequences.shape[1]] * sequences.shape[0]
    counts: list[int] = attention_mask.ne(0).sum(dim=1).tolist()
    return counts


def packing_problem(model: nn.Module) -> str | None:
    """Why this transformers model, or body of one, has to be called with padding; None if it has not."""
    if not isinstance(model, PreTrainedModel) and not hasattr(model, "get_base_model"):
        return f"{type(model).__name__} is not a transformers model"
    if str(getattr(model, "peft_type", "LORA")).rpartition(".")[2] != "LORA":
        return f"its adapters are of the kind {model.peft_type}"
    base = base_of(model)
    kind = getattr(base.config, "model_type", "")
    # A class from outside transformers may do anything in its forward pass, whatever its config is called.
    if kind not in PACKED_MODEL_TYPES or not type(base).__module__.startswith("transformers.models."):
        return f"{type(base).__name__} is not one of the known decoders ({', '.join(PACKED_MODEL_TYPES)})"
    if base.config._attn_implementation not in ("sdpa", PACKED_ATTENTION):
        return f"its attention is set to {base.config._attn_implementation!r}, and not to 'sdpa'"
    return None


def packed_hidden(model: nn.Module, packed: PackedRows) -> Tensor:
    """Last hidden states of a body over packed rows, [T, d]. The model must have no `packing_problem`."""
    shared = {} if packed.shared is None else {"row_owners": packed.shared.owners, "row_slots": packed.shared.slots}
    body = base_of(model).base_model
    if body.config._attn_implementation != PACKED_ATTENTION:
        body.set_attn_implementation(PACKED_ATTENTION)
    if packed.tokens.is_cuda:
        drop_flash_on_old_gpus(packed.tokens.device)
    hidden: Tensor = body(
        input_ids=packed.computed(packed.tokens).unsqueeze(0),
        # transformers takes a mask of four dimensions as ready and builds none; this one is never read.
        attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=packed.tokens.device),
        position_ids=packed.computed(packed.positions).unsqueeze(0),
        use_cache=False,
        cu_seq_lens_q=packed.starts,
        # Rounded up, which costs nothing, so that compiled blocks see few values of it.
        max_length_q=1 << (packed.max_length - 1).bit_length(),
        **shared,
    )[0]
    return hidden[0]


def base_of(model: nn.Module) -> Any:
    """The transformers model below adapters; they are in its layers, so it computes with them all the same."""
    inner: Any = model
    return inner.get_base_model() if hasattr(inner, "get_base_model") else inner


@functools.cache  # once for each reason
def log_padding_once(name: str, problem: str) -> None:
    """Log that a model computes its padding too."""
    logger.info("%s is called with padding: %s", name, problem)

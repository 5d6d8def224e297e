"""Packing: joins the rows of a padded batch end to end, so that models compute real tokens only.

        [. . a b c d . .]
        [e f g h i . . .]    →    [a b c d e f g h i j k]    positions 0 1 2 3 0 1 2 3 4 0 1
        [. . . j k . . .]

The packed row is an ordinary call of the model, with attention that stays within each row (`packed_attention.py`).
Where rows start with the same tokens, like several responses to one prompt, the shared prefix is computed once:

        [p q r a b]                                       a row's token    computed at
        [p q r c .]    →    computed: p q r a b c d e     p q r a b        0 1 2 3 4
        [p q r d e]                                       p q r c          0 1 2 5
                                                          p q r d e        0 1 2 6 7

Attention still sees whole rows, so log-probs, values and gradients equal those of whole rows up to rounding. Models not
known to pass these arguments on to their attention are called with padding; `packing_problem` gives the reason.
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

from coati.models.packed_attention import PACKED_ATTENTION, drop_flash_on_old_gpus, take, take_repeated
from coati.models.tiles import active_tile

logger = logging.getLogger(__name__)

SCORED_TOKENS = 32768
"""Maximum number of tokens scored in one pass: enough to keep a large GPU busy, and a bound on its memory."""
# Decoders whose layers pass unknown arguments on to their attention, and whose body returns what the head reads: no
# scaling, no soft cap. Tests compare each of them packed and padded.
PACKED_MODEL_TYPES = (
    "llama", "mistral", "qwen2", "qwen3", "smollm3", "gemma", "gemma3_text", "phi", "phi3", "olmo2", "gpt2", "gpt_neox",
    "opt",
)  # fmt: skip

MIN_SHARED_TOKENS = 4  # minimum length of a shared prefix that is worth its bookkeeping
_MAX_TOKENS_PER_SHARED = 8  # at least one in this many tokens must be shared


@dataclasses.dataclass(frozen=True)
class SharedPrefixes:
    """Which T of the N tokens of packed rows are computed; the others equal a computed token of another row."""

    owners: Tensor  # [T] index of each computed token among the N
    slots: Tensor  # [N] index of each token among the T computed ones

    @classmethod
    def of(cls, sequences: Tensor, is_real: Tensor, *, min_tokens: int = MIN_SHARED_TOKENS) -> "SharedPrefixes | None":
        """Find the prefixes that rows of a padded batch `[B, S]` share with the row before them; None if too short.

        >>> rows = torch.tensor([[5, 6, 7, 1], [5, 6, 7, 2], [5, 6, 8, 9]])
        >>> shared = SharedPrefixes.of(rows, torch.ones_like(rows, dtype=torch.bool), min_tokens=2)
        >>> shared.owners.tolist(), shared.slots.tolist()
        ([0, 1, 2, 3, 7, 10, 11], [0, 1, 2, 3, 0, 1, 2, 4, 0, 1, 5, 6])
        """
        if sequences.shape[0] < 2 or sequences.shape[1] < min_tokens:
            return None
        is_like = (is_real[1:] == is_real[:-1]) & ((sequences[1:] == sequences[:-1]) | ~is_real[1:])
        in_common = (is_like.cumprod(dim=1).bool() & is_real[1:]).sum(dim=1)
        lengths = is_real.sum(dim=1)
        *counts, num_tokens = torch.cat([in_common, lengths.sum().unsqueeze(0)]).tolist()
        sources, shared = _prefix_sources(counts, min_tokens)
        if sum(shared) * _MAX_TOKENS_PER_SHARED < max(num_tokens, 1):
            return None
        source_of, shared_of = torch.tensor([sources, shared], device=sequences.device)  # [B] each
        indices = is_real.flatten().nonzero().squeeze(1)  # [N]
        rows = indices // sequences.shape[1]
        positions = (is_real.cumsum(dim=1) - 1).flatten()[indices]
        is_taken = positions < shared_of[rows]
        own_slots = (~is_taken).cumsum(dim=0) - 1
        starts = lengths.cumsum(dim=0) - lengths  # [B]
        return cls(
            owners=(~is_taken).nonzero().squeeze(1),
            slots=torch.where(is_taken, own_slots[starts[source_of[rows]] + positions], own_slots),
        )


def _prefix_sources(in_common: Sequence[int], min_tokens: int) -> tuple[list[int], list[int]]:
    """Return from which row each row takes its prefix, and the prefix lengths.

    `in_common` is the number of leading tokens that each row, from the second on, shares with the row before it.

    >>> _prefix_sources([40, 35, 3, 50], 32)
    ([0, 0, 0, 3, 3], [0, 40, 35, 0, 50])
    """
    sources, shared = [0], [0]
    for row, count in enumerate(in_common, start=1):
        follows_source = sources[-1] == row - 1
        length = count if follows_source else min(count, shared[-1])
        sources.append(sources[-1] if length >= min_tokens else row)
        shared.append(length if length >= min_tokens else 0)
    return sources, shared


@dataclasses.dataclass(frozen=True)
class PackedRows:
    """The N real tokens of a padded batch `[B, S]`, and where they came from."""

    tokens: Tensor  # [N]
    positions: Tensor  # [N] position of each token in its row, from 0
    indices: Tensor  # [N] index of each token in the padded batch, row · S + column
    starts: Tensor  # [rows + 1] int32: start of each row that is not empty among the N, and the end of the last one
    max_length: int
    shape: torch.Size  # [B, S]
    shared: SharedPrefixes | None = None  # which T of the tokens are computed; None for all

    @classmethod
    def of(cls, sequences: Tensor, attention_mask: Tensor | None) -> "PackedRows":
        """Pack the rows of a batch; without a mask all tokens are real.

        >>> rows = PackedRows.of(torch.tensor([[0, 7, 8], [9, 0, 0]]), torch.tensor([[0, 1, 1], [1, 0, 0]]))
        >>> rows.tokens.tolist(), rows.positions.tolist(), rows.starts.tolist()
        ([7, 8, 9], [0, 1, 0], [0, 2, 3])
        """
        if attention_mask is None:
            attention_mask = torch.ones_like(sequences)
        is_real = attention_mask.ne(0)
        indices = is_real.flatten().nonzero().squeeze(1)
        lengths = is_real.sum(dim=1)
        lengths = lengths[lengths > 0]
        return cls(
            tokens=sequences.flatten()[indices],
            positions=(is_real.cumsum(dim=1) - 1).flatten()[indices],
            indices=indices,
            starts=F.pad(lengths.cumsum(0), (1, 0)).int(),
            max_length=int(lengths.max()) if len(lengths) else 0,
            shape=sequences.shape,
            # A shared prefix would be rounded differently in a row of another length.
            shared=None if active_tile() else SharedPrefixes.of(sequences, is_real),
        )

    def __len__(self) -> int:
        return len(self.tokens)

    def computed(self, values: Tensor) -> Tensor:
        """Select the entries of computed tokens, [N, …] to [T, …]."""
        return values if self.shared is None else values[self.shared.owners]

    def at(self, values: Tensor, tokens: Tensor) -> Tensor:
        """Look up computed values, [T, …], for unique indices of some of the N tokens, [n, …]."""
        return take(values, tokens) if self.shared is None else take_repeated(values, self.shared.slots[tokens])

    def actions(self, num_actions: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return index among the N, row and column of the tokens to score, [n] each.

        These are the tokens in the last `num_actions` columns, counted from 0, except the first token of a row.
        """
        columns = self.indices % self.shape[1] - (self.shape[1] - num_actions)
        at = ((columns >= 0) & (self.positions > 0)).nonzero().squeeze(1)
        return at, self.indices[at] // self.shape[1], columns[at]

    def unpacked(self, values: Tensor) -> Tensor:
        """Unpack [T] to [B, S], with 0 at padding."""
        if self.shared is not None:
            values = take_repeated(values, self.shared.slots)
        rows, columns = self.indices // self.shape[1], self.indices % self.shape[1]
        # Not a view of a flat tensor: sharding attaches its backward hook to what a module returns.
        return values.new_zeros(self.shape).index_put((rows, columns), values)


def row_parts(row_tokens: Sequence[int], *, max_tokens: int = 0, max_rows: int = 0) -> list[slice]:
    """Split rows, in order, into the fewest parts of at most `max_tokens` tokens and `max_rows` rows; 0 for no limit.

    A row with more than `max_tokens` tokens is a part by itself.

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
    """Return the cost of each row in tokens: its real tokens or, if padding is computed too, the width of the batch."""
    if attention_mask is None or not is_packed:
        return [sequences.shape[1]] * sequences.shape[0]
    counts: list[int] = attention_mask.ne(0).sum(dim=1).tolist()
    return counts


def packing_problem(model: nn.Module) -> str | None:
    """Return why this transformers model, or body of one, has to be called with padding; None if it does not."""
    if not isinstance(model, PreTrainedModel) and not hasattr(model, "get_base_model"):
        return f"{type(model).__name__} is not a transformers model"
    if str(getattr(model, "peft_type", "LORA")).rpartition(".")[2] != "LORA":
        return f"its adapters are of type {model.peft_type}, not LoRA"
    base = base_of(model)
    kind = getattr(base.config, "model_type", "")
    # A class from outside transformers may do anything in its forward pass, whatever its model_type.
    if kind not in PACKED_MODEL_TYPES or not type(base).__module__.startswith("transformers.models."):
        return f"{type(base).__name__} is not one of the known decoders ({', '.join(PACKED_MODEL_TYPES)})"
    if base.config._attn_implementation not in ("sdpa", PACKED_ATTENTION):
        return f"its attention implementation is {base.config._attn_implementation!r}, not 'sdpa'"
    return None


def packed_hidden(model: nn.Module, packed: PackedRows) -> Tensor:
    """Return the last hidden states of a body over packed rows, [T, d]. The model must have no `packing_problem`."""
    shared = {} if packed.shared is None else {"row_owners": packed.shared.owners, "row_slots": packed.shared.slots}
    body = base_of(model).base_model
    if body.config._attn_implementation != PACKED_ATTENTION:
        body.set_attn_implementation(PACKED_ATTENTION)
    if packed.tokens.is_cuda:
        drop_flash_on_old_gpus(packed.tokens.device)
    hidden: Tensor = body(
        input_ids=packed.computed(packed.tokens).unsqueeze(0),
        # transformers uses a 4-dimensional mask as it is and builds none; this one is never read.
        attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=packed.tokens.device),
        position_ids=packed.computed(packed.positions).unsqueeze(0),
        use_cache=False,
        cu_seq_lens_q=packed.starts,
        # Rounded up, which costs nothing, so that compiled blocks see few different values.
        max_length_q=1 << (packed.max_length - 1).bit_length(),
        **shared,
    )[0]
    return hidden[0]


def base_of(model: nn.Module) -> Any:
    """Return the transformers model below peft's wrapper; its layers contain the adapters, so it computes with them."""
    inner: Any = model
    return inner.get_base_model() if hasattr(inner, "get_base_model") else inner


@functools.cache
def log_padding_once(name: str, problem: str) -> None:
    """Log that a model is called with padding, once for each model class and reason."""
    logger.info("%s is called with padding: %s", name, problem)

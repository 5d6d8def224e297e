"""Conversion between padded batches and unpadded samples."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from coati.errors import DataError
from coati.experience import (
    EXPERIENCE_FIELDS,
    PER_SAMPLE_FIELDS,
    PER_TOKEN_FIELDS,
    UNKNOWN_ID,
    BufferItem,
    Experience,
    Sample,
)


def columns_of(samples: Sequence[Sample]) -> dict[str, list[Any]]:
    """Return the dataset columns of samples, which all have the same columns."""
    return {name: [sample.columns[name] for sample in samples] for name in samples[0].columns}


def group_ids_of(samples: Sequence[Sample]) -> Tensor | None:
    """Return the group ids of samples, [B]; None if any sample has none."""
    groups = [sample.group for sample in samples]
    return None if None in groups else torch.tensor(groups)


def pad_prompts(samples: Sequence[Sample], *, pad_token: int, width: int = 0) -> tuple[Tensor, Tensor]:
    """Return input ids and attention mask, [B, P] each, left-padded to at least `width` tokens."""
    width = max(width, *(len(sample.tokens) for sample in samples))
    gaps = [width - len(sample.tokens) for sample in samples]
    ids = [[pad_token] * gap + sample.tokens for gap, sample in zip(gaps, samples, strict=True)]
    return torch.tensor(ids), torch.tensor([[0] * gap + [1] * (width - gap) for gap in gaps])


def pad_samples(samples: Sequence[Sample], *, pad_token: int, device: torch.device) -> Experience:
    """Return a padded batch of prompts and responses. The fields that scoring computes are 0."""
    input_ids, attention_mask = (matrix.to(device) for matrix in pad_prompts(samples, pad_token=pad_token))
    lengths, source_device = [len(sample.response) for sample in samples], samples[0].response.device
    padding = _Padding(starts=[0] * len(samples), lengths=lengths, width=max(lengths), device=source_device)
    responses = padding.padded([sample.response for sample in samples], pad_token).to(device)
    log_probs = padding.padded([sample.log_probs for sample in samples]).to(device)
    mask = torch.arange(max(lengths), device=device) < torch.tensor(lengths, device=device).unsqueeze(1)
    group_ids = group_ids_of(samples)
    return Experience(
        sequences=torch.cat([input_ids, responses], dim=1),
        action_log_probs=log_probs,
        values=torch.zeros_like(log_probs),
        reward=log_probs.new_zeros(len(log_probs)),
        kl=torch.zeros_like(log_probs),
        advantages=torch.zeros_like(log_probs),
        attention_mask=torch.cat([attention_mask, mask.long()], dim=1),
        action_mask=mask,
        sample_ids=torch.tensor([sample.id for sample in samples], device=device),
        group_ids=None if group_ids is None else group_ids.to(device),
        policy_versions=padding.padded([sample.versions for sample in samples]).to(device),
        temperatures=torch.tensor([sample.options.sampling_temperature for sample in samples], device=device),
        is_cut=torch.tensor([sample.is_cut for sample in samples], device=device),
    )


def split_experience_batch(experience: Experience) -> list[BufferItem]:
    """Split a batch into one item per sample, without padding. The items share memory."""
    experience.validate()
    num_prompt_tokens, device = experience.num_prompt_tokens, experience.sequences.device
    starts = [0] * experience.num_samples  # prompt positions before the first real token
    if experience.attention_mask is not None and num_prompt_tokens:
        starts = (experience.attention_mask[:, :num_prompt_tokens].ne(0).cumsum(dim=1) == 0).sum(dim=1).tolist()
    token_columns = torch.arange(experience.sequences.shape[1], device=device)
    # One past the last True of each row; 0 if there is none.
    ends = experience.full_action_mask() * (token_columns[: experience.num_actions] + 1)
    lengths = F.pad(ends, (1, 0)).amax(dim=1).tolist()
    starts_at, ends_at = torch.tensor([starts, lengths], device=device).unsqueeze(-1)  # [B, 1] each
    is_response = token_columns[: experience.num_actions] < ends_at
    is_token = (token_columns >= starts_at) & (token_columns < num_prompt_tokens + ends_at)
    num_tokens = [num_prompt_tokens + length - start for start, length in zip(starts, lengths, strict=True)]
    columns: dict[str, Sequence[Any]] = dict.fromkeys(EXPERIENCE_FIELDS, [None] * experience.num_samples)
    for name, tensor in experience.tensors():
        tensor = tensor.detach()
        if name in PER_SAMPLE_FIELDS:
            columns[name] = tensor.clone().unbind()
        elif name in PER_TOKEN_FIELDS:
            columns[name] = torch.split(tensor[is_token], num_tokens)
        else:
            columns[name] = torch.split(tensor[is_response], lengths)
    return [BufferItem(*row) for row in zip(*columns.values(), strict=True)]


def make_experience_batch(items: Sequence[BufferItem]) -> Experience:
    """Pad items (prompts left, responses right) and stack them into a batch.

    >>> tokens, floats = torch.tensor([[5, 6, 7]]), torch.zeros(1, 2)
    >>> experience = Experience(tokens, floats, floats, torch.ones(1), floats, floats, None, None)
    >>> make_experience_batch(split_experience_batch(experience)).sequences
    tensor([[5, 6, 7]])
    """
    if not items:
        raise DataError("make_experience_batch needs at least one item, got none.")
    check_items(items)
    return pad_items(items)


def check_items(items: Sequence[BufferItem]) -> None:
    """Raise DataError unless every item is a well-formed `BufferItem`."""
    for item in items:
        if not isinstance(item, BufferItem):
            raise DataError(
                f"a buffer takes a list of BufferItem, got a {type(item).__name__} in it. Use split_experience_batch "
                "to split a batch into items."
            )
        item.validate()


def pad_items(items: Sequence[BufferItem]) -> Experience:
    """Pad and stack items that have been checked. See `make_experience_batch`."""
    prompts, responses = [item.num_prompt_tokens for item in items], [item.num_actions for item in items]
    width_prompt, width_response = max(prompts), max(responses)
    is_ragged = min(prompts) != width_prompt or min(responses) != width_response
    device = items[0].sequences.device
    tokens = _Padding(
        starts=[width_prompt - length for length in prompts],
        lengths=[prompt + response for prompt, response in zip(prompts, responses, strict=True)],
        width=width_prompt + width_response,
        device=device,
    )
    response_tokens = _Padding(starts=[0] * len(items), lengths=responses, width=width_response, device=device)
    fields: dict[str, Tensor | None] = {}
    for name in EXPERIENCE_FIELDS:
        tensors = [getattr(item, name) for item in items]
        needs_mask = is_ragged and name in ("attention_mask", "action_mask")
        if all(tensor is None for tensor in tensors) and not needs_mask:
            fields[name] = None
            continue
        # Items of different makers may lack different fields, which get a neutral value.
        tensors = [_default(item, name) if found is None else found for item, found in zip(items, tensors, strict=True)]
        if name in PER_SAMPLE_FIELDS:
            fields[name] = torch.stack([tensor.reshape(()) for tensor in tensors])
        else:
            fields[name] = (tokens if name in PER_TOKEN_FIELDS else response_tokens).padded(tensors)
    return Experience(**fields)  # type: ignore[arg-type]


class _Padding:
    """Positions of the entries of all rows in a padded batch, computed once for all fields of the same shape."""

    def __init__(self, *, starts: list[int], lengths: list[int], width: int, device: torch.device) -> None:
        self._shape = (len(lengths), width)
        counts = torch.tensor(lengths, device=device)
        # The entries of row r are contiguous from r·width + start.
        begins = torch.arange(len(lengths), device=device) * width + torch.tensor(starts, device=device)
        before = counts.cumsum(0) - counts
        total = sum(lengths)  # known on the host, so that nothing waits for a GPU
        self._flat = torch.arange(total, device=device) + (begins - before).repeat_interleave(counts, output_size=total)

    def padded(self, rows: Sequence[Tensor], fill: int = 0) -> Tensor:
        """Return one matrix of all rows, with `fill` in the padding."""
        entries, size = torch.cat(list(rows)), self._shape[0] * self._shape[1]
        return entries.new_full((size,), fill).index_copy_(0, self._flat, entries).view(self._shape)


def _default(item: BufferItem, name: str) -> Tensor:
    if name == "attention_mask":
        return torch.ones_like(item.sequences, dtype=torch.long)
    if name == "action_mask":
        return torch.ones_like(item.action_log_probs, dtype=torch.bool)
    if name in ("proximal_log_probs", "reference_log_probs"):
        return item.action_log_probs
    if name == "returns":
        return item.advantages + item.values
    if name in ("temperatures", "is_cut"):
        return torch.tensor(1.0 if name == "temperatures" else False, device=item.sequences.device)
    if name == "policy_versions":
        return torch.full_like(item.action_log_probs, UNKNOWN_ID, dtype=torch.long)
    return torch.tensor(UNKNOWN_ID, device=item.sequences.device)

"""The reference engine: transformers' own `generate`, with draws keyed by sample id.

`generate` samples from torch's global generator, so the same prompt gets another continuation when its batch changes.
Here `generate` runs in greedy mode over scores that a logits processor has already decided: it draws each row's token
by inverse CDF from that row's own uniform numbers.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)

from coati.models.actor import unwrap
from coati.models.calls import context_length_of
from coati.models.tiles import padded_length, same_in_any_company
from coati.randomness import keyed_uniforms
from coati.rollout.engine import Rollout, RolloutRequest
from coati.rollout.sampling import Sampler, stop_strings_of


class ReferenceEngine:
    """Correct for every causal LM that transformers can generate with; other engines are tested against it."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    @torch.no_grad()
    def generate(self, request: RolloutRequest) -> Rollout:
        """Continue every prompt; the result is as wide as the longest response.

        A row that has ended is computed until the last one has, but never past the end of the model's context, where
        some models have no positions: rows that come near it are generated in calls that stop in time. On a CPU, rows
        of one call are filled up to the same length; see `coati.models.tiles`.
        """
        limits, lengths = request.limits, request.attention_mask.sum(dim=1)
        context = context_length_of(unwrap(self._model))
        longest = limits.max() if context is None else torch.minimum(limits.max(), context - lengths)
        widths = torch.full_like(lengths, request.input_ids.shape[1])
        if lengths.device.type == "cpu":
            # Each row has padding, because `generate` builds no mask for a batch without any.
            widths = torch.tensor([padded_length(length + 1) for length in lengths.tolist()])
        kinds = torch.stack([longest.expand(lengths.shape), widths], dim=1)
        rollouts, calls, version = [], [], request.version
        for kind in torch.unique(kinds, dim=0):
            rows = (kinds == kind).all(dim=1)
            part = dataclasses.replace(
                request,
                input_ids=request.input_ids[rows],
                attention_mask=request.attention_mask[rows],
                sample_ids=request.sample_ids[rows],
                max_new_tokens=limits[rows],
                version=version,
            )
            with same_in_any_company(self._model, lengths):
                rollout, version = self._generate(part, int(kind[1]))
            rollouts.append(rollout)
            calls.append(rows)
        return _joined(rollouts, calls)

    def _generate(self, request: RolloutRequest, width: int) -> tuple[Rollout, int]:
        """Continue the prompts, padded to a width, in one call; returns the version that the weights have then too."""
        model: Any = unwrap(self._model)
        eos_token_ids = request.options.eos_token_ids(model)
        dice = _KeyedDice(request)
        stops = _Stops(request, width)
        # Less than nothing cuts off what is padding in all of these rows.
        padding = (width - request.input_ids.shape[1], 0)
        config = _greedy_config(model, request, eos_token_ids)
        was_training = model.training
        model.eval()
        try:
            with _without_saved_defaults(model, config):
                sequences = model.generate(
                    F.pad(request.input_ids, padding),
                    attention_mask=F.pad(request.attention_mask, padding),
                    generation_config=config,
                    logits_processor=LogitsProcessorList([dice]),
                    stopping_criteria=StoppingCriteriaList([stops]),
                )
        finally:
            model.train(was_training)
        responses = sequences[:, width:]
        # By position and not by value: the padding may be an end token too.
        is_end = torch.isin(responses, torch.tensor(eos_token_ids, dtype=responses.dtype, device=responses.device))
        action_mask = (is_end.cumsum(dim=1) - is_end.long() == 0) & stops.mask(responses.shape[1])
        rollout = Rollout(
            sequences=torch.cat([request.input_ids, responses], dim=1),
            attention_mask=torch.cat([request.attention_mask, action_mask.to(request.attention_mask.dtype)], dim=1),
            action_mask=action_mask,
            rollout_log_probs=dice.log_probs(responses.shape[1]).masked_fill(~action_mask, 0.0),
            is_cut=~(is_end & action_mask).any(dim=1) & ~stops.has_stopped,
            token_versions=dice.versions(responses),
        )
        return rollout, dice.version


def _joined(rollouts: Sequence[Rollout], calls: Sequence[Tensor]) -> Rollout:
    """Put rows that were generated in separate calls into one batch, in the order of the request."""
    order = torch.cat([rows.nonzero().squeeze(1) for rows in calls]).argsort()

    def joined(tensors: list[Tensor]) -> Tensor:
        if tensors[0].ndim == 2:
            width = max(tensor.shape[1] for tensor in tensors)
            tensors = [F.pad(tensor, (0, width - tensor.shape[1])) for tensor in tensors]
        return torch.cat(tensors)[order]

    names = [field.name for field in dataclasses.fields(Rollout)]
    return Rollout(**{name: joined([getattr(rollout, name) for rollout in rollouts]) for name in names})


def _greedy_config(model: PreTrainedModel, request: RolloutRequest, eos_token_ids: tuple[int, ...]) -> GenerationConfig:
    options = request.options
    extra = {name: value for name, value in options.extra.items() if name != "stopping_criteria"}
    extra.setdefault("bos_token_id", getattr(model.config, "bos_token_id", None))
    return GenerationConfig(
        do_sample=False,
        max_new_tokens=int(request.limits.max()),
        eos_token_id=list(eos_token_ids) or None,
        pad_token_id=options.pad_token(model),
        **extra,
    )


@contextlib.contextmanager
def _without_saved_defaults(model: Any, config: GenerationConfig) -> Iterator[None]:
    """Replace the model's saved generation config, from which `generate` fills in what ours does not set.

    A repetition penalty that came with a model must not change what is sampled.
    """
    # A peft wrapper has its own, which its `generate` writes over that of the model inside.
    owners = [model, model.get_base_model()] if hasattr(model, "get_base_model") else [model]
    saved = [owner.generation_config for owner in owners]
    for owner in owners:
        owner.generation_config = config
    try:
        yield
    finally:
        for owner, original in zip(owners, saved, strict=True):
            owner.generation_config = original


class _KeyedDice(LogitsProcessor):  # type: ignore[misc]
    """Draws each row's next token, records its log-prob, and leaves `generate` that token alone to choose."""

    def __init__(self, request: RolloutRequest) -> None:
        self._sampler = Sampler(request.options)
        self._log_probs: list[Tensor] = []
        self.version = request.version
        self._versions: list[int] = []
        self._between_tokens = request.between_tokens
        draws = keyed_uniforms(request.seed, request.sample_ids.tolist(), int(request.limits.max()))
        self._uniforms = torch.from_numpy(draws).to(request.input_ids.device)  # [B, A]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # noqa: ARG002
        tokens, log_probs = self._sampler(scores, self._uniforms[:, len(self._log_probs)])
        self._log_probs.append(log_probs)
        self._versions.append(self.version)
        if self._between_tokens is not None:
            # These scores are used up; the next ones may come from other weights, over the same cache.
            self.version = self._between_tokens()
        return torch.full_like(scores, float("-inf")).scatter(1, tokens.unsqueeze(1), 0.0)

    def log_probs(self, num_actions: int) -> Tensor:
        """log-probs of what was drawn, [B, num_actions]."""
        return torch.stack(self._log_probs, dim=1)[:, :num_actions]

    def versions(self, responses: Tensor) -> Tensor:
        """Version that wrote each token of the responses, [B, A]."""
        row = torch.tensor(self._versions[: responses.shape[1]], dtype=torch.long, device=responses.device)
        return row.expand(responses.shape[0], -1)


class _Stops(StoppingCriteria):  # type: ignore[misc]
    """Limits of rows, stop strings and the user's criteria; records where each row met one.

    A row that has stopped is continued, as padding or as text, until the last one is: the tokens do not show it.
    """

    def __init__(self, request: RolloutRequest, num_prompt_tokens: int) -> None:
        options, device = request.options, request.input_ids.device
        num_rows, self._num_prompt_tokens = len(request.input_ids), num_prompt_tokens
        self._criteria: list[Any] = list(options.extra.get("stopping_criteria", ()))
        self._strings = None
        if options.stop_strings:
            self._strings = stop_strings_of(options.tokenizer, options.stop_strings, device)
            self._states = torch.zeros(num_rows, dtype=torch.long, device=device)
        self.has_stopped = torch.zeros(num_rows, dtype=torch.bool, device=device)  # [B]
        self._limits = request.limits
        self._lengths = self._limits.clone()  # [B]

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        stops_here = torch.zeros_like(self.has_stopped)
        for criterion in self._criteria:
            stops_here |= criterion(input_ids, scores, **kwargs)
        if self._strings is not None:
            self._states = self._strings.advance(self._states, input_ids[:, -1])
            stops_here |= self._states == self._strings.found
        num_written = input_ids.shape[1] - self._num_prompt_tokens
        # What is written past a row's limit is no response, and so has no stop in it.
        is_first = stops_here & ~self.has_stopped & (num_written <= self._limits)
        self._lengths[is_first] = num_written
        self.has_stopped |= is_first
        return self.has_stopped | (num_written >= self._limits)

    def mask(self, num_actions: int) -> Tensor:
        """True up to and with the token that stopped the row, [B, num_actions]."""
        return torch.arange(num_actions, device=self._lengths.device) < self._lengths.unsqueeze(1)

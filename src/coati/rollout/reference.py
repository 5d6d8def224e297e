"""The reference engine: runs any causal LM of transformers with its own cache; draws are keyed by sample id.

Prompts submitted together are computed as a batch until the longest response has ended; finished rows become padding.
"""

import time
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from coati.batching import pad_prompts
from coati.experience import Sample
from coati.models.actor import unwrap
from coati.models.calls import accepts, forward_causal, position_ids_from_mask
from coati.models.tiles import batch_invariant, padded_length
from coati.randomness import keyed_uniforms
from coati.rollout.engine import copied_for_engine
from coati.rollout.sampling import Sampler, stop_strings_of

_MAX_ROWS = 256  # rows at once, as reported by `room`


class ReferenceEngine:
    """An engine for every causal LM of transformers; other engines are tested against it."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._version = 0
        self._batches: list[_Batch] = []
        self._kept: dict[int, Sample] = {}

    @property
    def room(self) -> int:
        """Number of further rows it should get."""
        return max(0, _MAX_ROWS - len(self._kept) - sum(len(batch.samples) for batch in self._batches))

    def submit(self, samples: Sequence[Sample]) -> None:
        """Start samples with the next token; see `RolloutEngine.submit`. Rows of a batch are padded to equal length."""
        samples = copied_for_engine(samples)
        longest = max((len(sample.tokens) for sample in samples), default=0)
        widths = {sample.id: longest for sample in samples}
        device = next(self.model.parameters()).device
        if device.type == "cpu":
            # Give every row some padding, because transformers builds no mask for a batch without any.
            widths = {sample.id: padded_length(len(sample.tokens) + 1) for sample in samples}
        for width in sorted({*widths.values()}):
            rows = [sample for sample in samples if widths[sample.id] == width]
            self._batches.append(_Batch(unwrap(self.model), rows, width, device))

    @torch.no_grad()
    def advance(self) -> list[Sample]:
        """Generate one token of each sample and return those that have finished."""
        was_training = self.model.training
        self.model.eval()
        try:
            ended = [sample for batch in self._batches for sample in batch.step(self._version)]
        finally:
            self.model.train(was_training)
        self._kept |= {sample.id: sample for sample in ended if sample.is_kept}
        self._batches = [batch for batch in self._batches if batch.samples]
        return ended

    def extend(self, sample_id: int, tokens: Sequence[int], max_new_tokens: int) -> None:
        """Continue a sample; see `RolloutEngine.extend`. Earlier tokens are computed again."""
        sample = self._kept.pop(sample_id)
        turn = sample.next_turn(sample.response.tolist(), tokens, max_new_tokens)
        device = next(self.model.parameters()).device
        self._batches.append(_Batch(unwrap(self.model), [turn], padded_length(len(turn.tokens) + 1), device))

    def commit(self, version: int) -> None:
        """Record the version of the weights; see `RolloutEngine.commit`."""
        self._version = version

    def cancel(self, sample_ids: Collection[int]) -> None:
        """Drop samples; see `RolloutEngine.cancel`."""
        for sample_id in sample_ids:
            self._kept.pop(sample_id, None)
        for batch in self._batches:
            batch.samples = {row: sample for row, sample in batch.samples.items() if sample.id not in sample_ids}
        self._batches = [batch for batch in self._batches if batch.samples]


class _Batch:
    """Rows that are generated together."""

    def __init__(self, model: nn.Module, samples: list[Sample], width: int, device: torch.device) -> None:
        self._model = model
        self.samples = dict(enumerate(samples))  # samples that have not finished, by row
        self._cache: Any = None
        options = samples[0].options
        self._sampler = Sampler(options)
        self._end_tokens = torch.tensor(options.eos_token_ids(model), dtype=torch.long, device=device)
        self._pad_token = options.pad_token(model)
        self._criteria: list[Any] = list(options.extra.get("stopping_criteria", ()))
        self._deadline = time.monotonic() + options.extra.get("max_time", float("inf"))
        self._has_cache = options.extra.get("use_cache", True) and accepts(model, "past_key_values")
        self._stops = stop_strings_of(options.tokenizer, options.stop_strings, device) if options.stop_strings else None
        self._stop_states = torch.zeros(len(samples), dtype=torch.long, device=device)
        prompts = pad_prompts(samples, pad_token=self._pad_token, width=width)
        self._ids, self._mask = (matrix.to(device) for matrix in prompts)  # [n, W]
        self._limits = torch.tensor([sample.limit for sample in samples], device=device)
        num_draws = max(sample.num_drawn + sample.limit for sample in samples)
        first = samples[0].num_drawn  # equal for all: a later turn is a batch by itself
        draws = keyed_uniforms(samples[0].seed, [sample.id for sample in samples], num_draws)[:, first:]
        self._uniforms = torch.from_numpy(draws.copy()).to(device)
        self._drawn: list[tuple[Tensor, Tensor]] = []  # tokens and log-probs, [n] each
        self._versions: list[int] = []

    def step(self, version: int) -> list[Sample]:
        """Generate a token of each row and return the samples that it finished."""
        is_active = torch.tensor([row in self.samples for row in range(len(self._ids))], device=self._ids.device)
        tokens, log_probs = self._sampler(self._logits(), self._uniforms[:, len(self._drawn)])
        tokens = tokens.where(is_active, self._pad_token)
        self._drawn.append((tokens, log_probs))
        self._versions.append(version)
        # Masked tokens do not advance positions, so finished rows stay within the context length.
        self._ids = torch.cat([self._ids, tokens.unsqueeze(1)], dim=1)
        self._mask = torch.cat([self._mask, is_active.long().unsqueeze(1)], dim=1)
        has_ended = self._has_ended(tokens)
        is_cut = (len(self._drawn) >= self._limits) | (time.monotonic() > self._deadline)
        states = zip(has_ended.tolist(), (has_ended | is_cut).tolist(), strict=True)
        finished = [(row, ended) for row, (ended, is_over) in enumerate(states) if is_over and row in self.samples]
        return [self._finish(row, is_cut=not ended) for row, ended in finished]

    def _logits(self) -> Tensor:
        """Return the logits of the next token of each row, [n, vocabulary]."""
        inputs, kwargs = self._ids, dict[str, Any]()
        if self._has_cache:
            kwargs["use_cache"] = True
            if self._cache is not None:
                inputs, kwargs["past_key_values"] = self._ids[:, -1:], self._cache
        if accepts(self._model, "position_ids"):
            kwargs["position_ids"] = position_ids_from_mask(self._mask)[:, -inputs.shape[1] :]
        if accepts(self._model, "logits_to_keep"):
            kwargs["logits_to_keep"] = 1
        with batch_invariant(self._model, inputs):
            output = forward_causal(self._model, inputs, self._mask, **kwargs)
        self._cache = getattr(output, "past_key_values", None) if self._has_cache else None
        logits: Tensor = output.logits[:, -1]
        return logits

    def _has_ended(self, tokens: Tensor) -> Tensor:
        """Return whether the newest token ends each row: by an end token, a stop string or the user's criteria."""
        has_ended = torch.isin(tokens, self._end_tokens)
        if self._stops is not None:
            self._stop_states = self._stops.advance(self._stop_states, tokens)
            has_ended |= self._stop_states == self._stops.found
        for criterion in self._criteria:
            has_ended |= criterion(self._ids, None)
        return has_ended

    def _finish(self, row: int, *, is_cut: bool) -> Sample:
        sample = self.samples.pop(row)
        sample.response = torch.stack([tokens[row] for tokens, _ in self._drawn])
        sample.log_probs = torch.stack([log_probs[row] for _, log_probs in self._drawn])
        sample.versions = torch.tensor(self._versions, dtype=torch.long, device=self._ids.device)
        sample.is_cut = is_cut
        return sample

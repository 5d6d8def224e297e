"""The protocol of rollout engines: a stream that takes prompts whenever it has room and returns finished responses."""

import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import torch

from coati.batching import pad_samples
from coati.config.generate import GenerateOptions
from coati.errors import DataError
from coati.experience import Experience, Sample
from coati.models.actor import unwrap
from coati.models.calls import context_length_of


def with_limits(
    samples: Sequence[Sample], options: GenerateOptions, *, model: torch.nn.Module, **fields: Any
) -> list[Sample]:
    """Return copies for an engine, with its options and the response limits that these and the model's context allow.

    `fields` are further fields to change in all copies.
    """
    context = context_length_of(unwrap(model)) or sys.maxsize
    lengths = [len(sample.tokens) for sample in samples]
    limits = [min(options.new_token_limit(length), context - length) for length in lengths]
    return [
        sample.changed(limit=limit, options=options, **fields) for sample, limit in zip(samples, limits, strict=True)
    ]


def copied_for_engine(samples: Sequence[Sample]) -> list[Sample]:
    """Return copies for an engine to work on; raise DataError if two have the same id."""
    ids = [sample.id for sample in samples]
    if len({*ids}) < len(ids):
        raise DataError(f"sample_ids of a request must be unique, got {sorted(ids)[:16]}.")
    return [sample.changed(is_over=False) for sample in samples]


class RolloutEngine(Protocol):
    """Generates responses. Samples are identified by their ids, which are unique among those in the engine."""

    model: torch.nn.Module  # the policy to generate with

    @property
    def room(self) -> int:
        """Number of further samples it can generate at once; samples submitted beyond that wait in the engine."""

    def submit(self, samples: Sequence[Sample]) -> None:
        """Queue samples with equal options; the engine works on copies and starts them in order as it has room."""

    def advance(self) -> list[Sample]:
        """Generate a few tokens of each sample (on a CPU: one) and return finished samples with their responses."""

    def extend(self, sample_id: int, tokens: Sequence[int], max_new_tokens: int) -> None:
        """Continue a sample that was kept: append `tokens` to its response, then generate the next response.

        Its random draws continue, and its KV cache is kept. For library users: samples of a training run have one turn.
        """

    def commit(self, version: int) -> None:
        """Record the version of the actor's weights. Call this between two `advance`s, after any change of weights.

        New weights must be written into the memory of the old ones. Keys and values in the cache are not recomputed.
        """

    def cancel(self, sample_ids: Collection[int]) -> None:
        """Drop these samples, whether waiting, in flight or kept; unknown ids are ignored."""


def generate(
    engine: RolloutEngine,
    samples: Sequence[Sample],
    *,
    version: int = 0,
    between_tokens: Callable[[], int] | None = None,
) -> Experience:
    """Generate the responses of all samples with an otherwise idle engine.

    `between_tokens` is called after every `advance`. It may change the weights, and returns their version.
    """
    ids = [sample.id for sample in samples]
    found: dict[int, Sample] = {}
    try:
        engine.commit(version)
        engine.submit(samples)
        while len(found) < len(ids):
            found |= {sample.id: sample for sample in engine.advance()}
            if between_tokens is not None and len(found) < len(ids):
                engine.commit(between_tokens())
    finally:
        engine.cancel(ids)
    return join_samples([found[one] for one in ids], engine.model)


def join_samples(samples: Sequence[Sample], model: torch.nn.Module) -> Experience:
    """Collate samples into a padded batch on the model's device; fields that scoring computes are 0."""
    return pad_samples(
        samples, pad_token=samples[0].options.pad_token(unwrap(model)), device=next(model.parameters()).device
    )

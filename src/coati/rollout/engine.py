"""What every rollout engine is: a stream. Prompts go in whenever there is room, responses come out as they end."""

import dataclasses
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


def prepared(sample: Sample, options: GenerateOptions, *, model: torch.nn.Module, **changes: Any) -> Sample:
    """A copy for an engine: its options, and the most tokens that these and the model's context allow."""
    context, length = context_length_of(unwrap(model)) or sys.maxsize, len(sample.tokens)
    limit = min(options.new_token_limit(length), context - length)
    return dataclasses.replace(sample, limit=limit, options=options, **changes)


def admitted(samples: Sequence[Sample]) -> list[Sample]:
    """Copies for an engine to work on; DataError if two have the same id."""
    ids = [sample.id for sample in samples]
    if len({*ids}) < len(ids):
        raise DataError(f"sample_ids of a request must be different, got {sorted(ids)[:16]}.")
    return [dataclasses.replace(sample, is_over=False) for sample in samples]


class RolloutEngine(Protocol):
    """Generates responses. A sample is named by its id, and no two at a time have the same."""

    model: torch.nn.Module  # whose weights it generates with

    @property
    def room(self) -> int:
        """How many more samples it can write at the same time; what is submitted beyond that waits in it."""

    def submit(self, samples: Sequence[Sample]) -> None:
        """Take in samples with equal options; copies are begun when there is a place for them, in this order."""

    def advance(self) -> list[Sample]:
        """Write a few tokens of each sample (on a CPU: one), and return those that have ended, with their responses."""

    def extend(self, sample_id: int, tokens: Sequence[int], max_new_tokens: int) -> None:
        """Continue a sample that was kept: these tokens follow its response, and then the next response is written.

        Its draws go on where they were; what it has in the cache stays. For programs: a run's samples have one turn.
        """

    def commit(self, version: int) -> None:
        """Note that the actor's weights are of this version now. Call it between two `advance`s, after any change.

        Weights of another version must lie in the memory that held the old ones. Keys and values in the cache stay as
        the old weights made them.
        """

    def cancel(self, sample_ids: Collection[int]) -> None:
        """Forget these samples, waiting, half written or kept; unknown ones are ignored."""


def generate(
    engine: RolloutEngine,
    samples: Sequence[Sample],
    *,
    version: int = 0,
    between_tokens: Callable[[], int] | None = None,
) -> Experience:
    """Continue every sample by an engine that has nothing else to do.

    `between_tokens` is called after every `advance`, may change the weights, and returns their version."""
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
    """Samples as a padded batch on the model's device; what scoring computes is 0 so far."""
    return pad_samples(
        samples, pad_token=samples[0].options.pad_token(unwrap(model)), device=next(model.parameters()).device
    )

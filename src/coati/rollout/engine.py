"""What every rollout engine is: a stream. Prompts go in whenever there is room, responses come out as they end."""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from coati.config.generate import GenerateOptions
from coati.errors import DataError
from coati.experience import Experience
from coati.models.actor import unwrap


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutRequest:
    """Prompts, and how to continue them."""

    input_ids: Tensor  # [B, P], left-padded
    attention_mask: Tensor  # [B, P]
    sample_ids: Tensor  # [B] int64: names of the samples, and keys of their randomness
    seed: int
    options: GenerateOptions
    max_new_tokens: int | Tensor  # where responses are cut: one number, or [B] of each row
    is_kept: bool = False
    """Whether a sample whose response has ended keeps its place, to be continued (`extend`) or let go (`cancel`)."""
    needs_log_probs: bool = True
    """False where none are read, as in an evaluation: any options go then, and log-probs may be of what a cut left."""

    @property
    def limits(self) -> Tensor:
        """Most new tokens of each row, [B]."""
        limits = torch.as_tensor(self.max_new_tokens, device=self.input_ids.device)
        return limits.expand(self.input_ids.shape[0])

    def samples(self) -> list["Sample"]:
        """What an engine writes for this request."""
        ids, limits = self.sample_ids.tolist(), self.limits.tolist()
        if len({*ids}) < len(ids):
            raise DataError(f"sample_ids of a request must be different, got {sorted(ids)[:16]}.")
        rows = zip(self.input_ids.tolist(), self.attention_mask.sum(dim=1).tolist(), strict=True)
        prompts = [tokens[len(tokens) - length :] for tokens, length in rows]
        return [
            Sample(one, prompt, limit, self.seed, self.options, self.is_kept)
            for one, prompt, limit in zip(ids, prompts, limits, strict=True)
        ]


@dataclasses.dataclass(eq=False)
class Sample:
    """One turn of a sample in an engine."""

    id: int
    tokens: list[int]  # what it is continued from: the prompt, and whatever came in earlier turns
    limit: int  # the most tokens of the response
    seed: int
    options: GenerateOptions
    is_kept: bool
    num_drawn: int = 0  # tokens drawn in earlier turns
    is_over: bool = False  # whether it has ended, or was cancelled
    place: Any = None  # where it is written; up to the engine

    def next_turn(self, response: Sequence[int], tokens: Sequence[int], limit: int) -> "Sample":
        """The turn that follows: after the response come further tokens, and then the next response."""
        return dataclasses.replace(
            self,
            tokens=[*self.tokens, *response, *tokens],
            limit=limit,
            num_drawn=self.num_drawn + len(response),
            is_over=False,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Response:
    """What an engine wrote for a sample, with the token that ended it."""

    sample_id: int
    tokens: Tensor  # [A]
    log_probs: Tensor  # [A] at the sampling temperature, before top-k/top-p cut anything
    versions: Tensor  # [A] int64: version of the weights that wrote each token
    is_cut: bool  # the length limit ended it, and no end-of-sequence token or stop string


def join_responses(
    input_ids: Tensor,
    attention_mask: Tensor,
    responses: Sequence[Response],
    options: GenerateOptions,
    *,
    pad_token: int,
) -> Experience:
    """Prompts [B, P] with the response to each; what scoring computes is 0 so far."""
    device = input_ids.device
    lengths = torch.tensor([len(response.tokens) for response in responses], device=device)

    def padded(name: str, fill: float = 0) -> Tensor:
        rows = [getattr(response, name) for response in responses]
        return pad_sequence(rows, batch_first=True, padding_value=fill).to(device)

    mask = torch.arange(int(lengths.max()), device=device) < lengths.unsqueeze(1)
    log_probs = padded("log_probs")
    return Experience(
        sequences=torch.cat([input_ids, padded("tokens", pad_token)], dim=1),
        action_log_probs=log_probs,
        values=torch.zeros_like(log_probs),
        reward=log_probs.new_zeros(len(log_probs)),
        kl=torch.zeros_like(log_probs),
        advantages=torch.zeros_like(log_probs),
        attention_mask=torch.cat([attention_mask, mask.to(attention_mask.dtype)], dim=1),
        action_mask=mask,
        sample_ids=torch.tensor([response.sample_id for response in responses], device=device),
        policy_versions=padded("versions"),
        temperatures=torch.full(mask.shape[:1], options.sampling_temperature, device=device),
        is_cut=torch.tensor([response.is_cut for response in responses], device=device),
    )


class RolloutEngine(Protocol):
    """Generates responses. A sample is named by its id, and no two at a time have the same."""

    model: torch.nn.Module  # whose weights it generates with

    @property
    def room(self) -> int:
        """How many more samples it can write at the same time; what is submitted beyond that waits in it."""

    def submit(self, request: RolloutRequest) -> None:
        """Take prompts in; they are begun when there is a place for them, in this order."""

    def advance(self) -> list[Response]:
        """Write a few tokens of each sample (on a CPU: one), and return what has ended."""

    def extend(self, sample_id: int, tokens: Sequence[int], max_new_tokens: int) -> None:
        """Continue a sample that was kept: these tokens follow its response, and then the next response is written.

        Its draws go on where they were; what it has in the cache stays.
        """

    def commit(self, version: int) -> None:
        """Note that the actor's weights are of this version now. Call it between two `advance`s, after any change.

        Weights of another version must lie in the memory that held the old ones.
        """

    def cancel(self, sample_ids: Collection[int]) -> None:
        """Forget these samples, waiting, half written or kept; unknown ones are ignored."""


def generate(
    engine: RolloutEngine,
    request: RolloutRequest,
    *,
    version: int = 0,
    between_tokens: Callable[[], int] | None = None,
) -> Experience:
    """Continue every prompt of a request by an engine that has nothing else to do.

    `between_tokens` is called after every `advance`, may change the weights, and returns their version."""
    ids = request.sample_ids.tolist()
    found: dict[int, Response] = {}
    try:
        engine.commit(version)
        engine.submit(request)
        while len(found) < len(ids):
            found |= {response.sample_id: response for response in engine.advance()}
            if between_tokens is not None and len(found) < len(ids):
                engine.commit(between_tokens())
    finally:
        engine.cancel(ids)
    pad_token = request.options.pad_token(unwrap(engine.model))
    responses = [found[one] for one in ids]
    return join_responses(request.input_ids, request.attention_mask, responses, request.options, pad_token=pad_token)

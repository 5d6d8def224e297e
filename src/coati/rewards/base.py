"""The interface of rewards: a request with tokens and texts in, a score per sample out; NaN means no score."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn

from coati.errors import ConfigError, RewardError
from coati.rewards.calling import Verdict

# Enough for a whole character and a token that is not special, and cheap to decode for every sample.
_CONTEXT_TOKENS = 8

Texts = list[str] | Callable[[], list[str]]


class RewardRequest:
    """A batch of finished samples, as texts for functions and as tokens for models.

    `prompts` and `completions` are texts, or functions that return them, called on first use. `columns` are the other
    columns of the dataset, B values each. `sequences`, [B, S], are left-padded prompts, then responses, or S = 0.
    """

    def __init__(
        self,
        *,
        prompts: Texts,
        completions: Texts,
        sequences: Tensor,
        attention_mask: Tensor,
        action_mask: Tensor,
        columns: Mapping[str, list[Any]] | None = None,
    ) -> None:
        self._prompts, self._completions = prompts, completions
        self.sequences, self.attention_mask, self.action_mask = sequences, attention_mask, action_mask
        self.columns = dict(columns or {})
        self.timeout_seconds = math.inf  # of this request, if it is shorter than the reward's own

    def __len__(self) -> int:
        return int(self.sequences.shape[0])

    def select(self, rows: list[int]) -> "RewardRequest":
        """Return a request for some of the samples."""
        part = RewardRequest(
            prompts=[self.prompts[row] for row in rows],
            completions=[self.completions[row] for row in rows],
            sequences=self.sequences[rows],
            attention_mask=self.attention_mask[rows],
            action_mask=self.action_mask[rows],
            columns={name: [values[row] for row in rows] for name, values in self.columns.items()},
        )
        part.completion_ids = self.completion_ids and [self.completion_ids[row] for row in rows]
        return part

    @cached_property
    def prompts(self) -> list[str]:
        """The prompts as text."""
        return self._prompts() if callable(self._prompts) else self._prompts

    @cached_property
    def completions(self) -> list[str]:
        """The responses as text."""
        return self._completions() if callable(self._completions) else self._completions

    @cached_property
    def completion_ids(self) -> list[list[int]] | None:
        """The token ids of the responses, including the end token; None if only the texts are known."""
        return _response_ids(self.sequences, self.action_mask) if self.sequences.shape[1] else None


class Reward:
    """Scores a batch. Subclass it for a reward that is neither a function nor a model."""

    name: str  # in metrics and errors
    is_host_work = False  # True if it uses no model, so that it can run on a thread while models score
    timeout_seconds = 1800.0  # deadline for one call, if `is_host_work`

    def score(self, request: RewardRequest) -> Tensor | Sequence[Verdict]:
        """Return one score per sample, [B], or one verdict per sample. A score that is not finite means no score.

        Raises:
            RewardFailed: if it failed on this batch. It is retried, then called for each sample alone.
            RewardError: if it cannot be used at all.
        """
        raise NotImplementedError


class ModelReward(Reward):
    """Scores sequences with a module, which it puts into evaluation mode and calls as `model(ids, attention_mask)`."""

    def __init__(self, model: Any, name: str = "") -> None:
        self.name = name or type(model).__name__
        self._model = model.eval() if isinstance(model, nn.Module) else model

    def score(self, request: RewardRequest) -> Tensor:
        """Return one score per sample, [B] float32, on the device of the sequences. Non-finite scores become NaN."""
        parameters = self._model.parameters() if isinstance(self._model, nn.Module) else iter(())
        device = next((parameter.device for parameter in parameters), request.sequences.device)
        with torch.no_grad():
            output = self._model(request.sequences.to(device), request.attention_mask.to(device))
        scores = output["logits"] if isinstance(output, Mapping) else output
        if not isinstance(scores, Tensor) or scores.numel() != len(request):
            found = f"shape {list(scores.shape)}" if isinstance(scores, Tensor) else type(scores).__name__
            raise RewardError(
                f"Reward model {self.name!r} must return one score for each of {len(request)} sequences, got {found}. "
                "Use coati.models.RewardModel, or a module that returns a tensor [B]."
            )
        scores = scores.reshape(-1).to(request.sequences.device, torch.float32)
        return torch.where(scores.isfinite(), scores, torch.full_like(scores, math.nan))


class WeightedSum(Reward):
    """The weighted sum of rewards with different names; NaN if one of them is. `RewardScorer` calls them one by one."""

    def __init__(self, terms: Sequence[tuple[Reward, float]], name: str = "sum") -> None:
        names = [reward.name for reward, _ in terms]
        if not terms or len(set(names)) != len(names):
            raise ConfigError(
                f"reward.terms must be one or more rewards with different names, got {names}. Set a name for each term."
            )
        self.name = name
        self.terms = tuple(terms)
        self.is_host_work = all(reward.is_host_work for reward, _ in terms)

    def total(self, scores: Mapping[str, Tensor]) -> Tensor:
        """Return the weighted sum, [B], of the scores of the terms, [B] each, by name."""
        total = torch.zeros_like(next(iter(scores.values())), dtype=torch.float32)
        for reward, weight in self.terms:
            # 0 × NaN is NaN: a weight of 0 does not hide that a term has no score.
            total = total + weight * scores[reward.name].float().to(total.device)
        return total


def decode_prompts(
    tokenizer: Any,
    sequences: Tensor,  # [B, S] left-padded prompt, then response, S = P + A
    attention_mask: Tensor,  # [B, S]
    action_mask: Tensor,  # [B, A] True on response tokens
) -> list[str]:
    """Return the prompts as text."""
    return [_decode(tokenizer, ids) for ids in _prompt_ids(sequences, attention_mask, action_mask)]


def decode_completions(
    tokenizer: Any,
    sequences: Tensor,  # [B, S]
    attention_mask: Tensor,  # [B, S]
    action_mask: Tensor,  # [B, A]
) -> list[str]:
    """Return the text that each response adds to its prompt.

    SentencePiece-style tokenizers drop the space of the first decoded token. So a response is decoded together with the
    last tokens of its prompt, whose text is then removed.
    """
    contexts = [ids[-_CONTEXT_TOKENS:] for ids in _prompt_ids(sequences, attention_mask, action_mask)]
    texts = []
    for context, response in zip(contexts, _response_ids(sequences, action_mask), strict=True):
        before, whole = _decode(tokenizer, context), _decode(tokenizer, context + response)
        # `whole` has another start if the prompt ends inside a character that the response completes.
        texts.append(whole.removeprefix(before) if whole.startswith(before) else _decode(tokenizer, response))
    return texts


def _prompt_ids(sequences: Tensor, attention_mask: Tensor, action_mask: Tensor) -> list[list[int]]:
    length = sequences.shape[1] - action_mask.shape[1]  # P
    return _kept(sequences[:, :length], attention_mask[:, :length])


def _response_ids(sequences: Tensor, action_mask: Tensor) -> list[list[int]]:
    return _kept(sequences[:, sequences.shape[1] - action_mask.shape[1] :], action_mask)


def _kept(ids: Tensor, mask: Tensor) -> list[list[int]]:
    """Return the ids of each row that the mask selects. Padding may be a real token, so only the mask identifies it."""
    return [list(compress(*row)) for row in zip(ids.tolist(), mask.tolist(), strict=True)]


def _decode(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True))

"""Log-probs and entropies of response tokens: the one code that maker, learner and evaluation share.

A model that we know is called with packed rows, and its output head is applied to a chunk of tokens at a time: neither
padding nor a `[tokens, vocabulary]` tensor is ever computed. Any other is asked for its logits, with padding.
"""

import dataclasses
from typing import Any

from torch import Tensor, nn

from coati.algos import head_logprobs_and_entropy, logprobs_and_entropy
from coati.models.calls import accepts, forward_causal
from coati.models.packing import PackedRows, PackedTargets, base_of, packed_hidden, packing_problem


@dataclasses.dataclass(frozen=True)
class Scoring:
    """What to ask of a model instead of its logits: log-probs of the last `num_actions` tokens of each row.

    A class and not a tuple, because sharding casts the tensors that it finds in a call's arguments.
    """

    num_actions: int
    temperatures: Tensor | None = None
    """[B]; None for 1."""
    with_entropy: bool = False


def scoring_problem(model: nn.Module) -> str | None:
    """Why this model has to be asked for its logits; None if its hidden states will do."""
    if problem := packing_problem(model):
        return problem
    head: Any = base_of(model).get_output_embeddings()
    if type(head) is not nn.Linear:
        return f"its output head is a {type(head).__name__}, and not a plain linear layer"
    if head._forward_hooks or head._forward_pre_hooks:
        return "its output head has forward hooks"
    return None


def score_actions(
    model: nn.Module, sequences: Tensor, attention_mask: Tensor | None, scoring: Scoring
) -> tuple[Tensor, Tensor | None]:
    """Log-probs and, if asked for, entropies, [B, A] each, by a transformers model without `scoring_problem`.

    Tokens that the attention mask leaves out, and such as have no token before them, get 0.
    """
    packed = PackedRows.of(sequences, attention_mask)
    if len(packed) == 0:
        return score_padded(model, sequences, attention_mask, scoring)
    targets = PackedTargets.of(packed, scoring.num_actions)  # before the model: it waits for the device
    hidden = packed.at(packed_hidden(model, packed), targets.predecessors)  # [n, d]
    head = base_of(model).get_output_embeddings()
    temperatures = scoring.temperatures
    logprobs, entropy = head_logprobs_and_entropy(
        hidden,
        head.weight,
        targets.tokens,
        bias=head.bias,
        temperature=1.0 if temperatures is None else temperatures[targets.rows],
        with_entropy=scoring.with_entropy,
    )
    shape = (packed.shape[0], scoring.num_actions)
    return targets.unpacked(logprobs, shape), None if entropy is None else targets.unpacked(entropy, shape)


def score_padded(
    model: nn.Module,
    sequences: Tensor,
    attention_mask: Tensor | None,
    scoring: Scoring,
    *,
    inner: nn.Module | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The same from the logits of any policy; padding gets 0 too. `inner` is the model whose arguments count, below
    wrappers."""
    kwargs: dict[str, Any] = {}
    if accepts(inner or model, "logits_to_keep"):  # those of response positions will do
        kwargs["logits_to_keep"] = scoring.num_actions + 1
    output = forward_causal(model, sequences, attention_mask, inner=inner, **kwargs)
    logits = output if isinstance(output, Tensor) else output["logits"]
    # The logits at position t score the token at t + 1.
    logits = logits[:, -scoring.num_actions - 1 : -1]
    logprobs, entropy = logprobs_and_entropy(
        logits,
        sequences[:, -scoring.num_actions :],
        temperature=1.0 if scoring.temperatures is None else scoring.temperatures,
        with_entropy=scoring.with_entropy,
    )
    if attention_mask is None:
        return logprobs, entropy
    is_padding = attention_mask[:, -scoring.num_actions :] == 0
    return logprobs.masked_fill(is_padding, 0.0), None if entropy is None else entropy.masked_fill(is_padding, 0.0)

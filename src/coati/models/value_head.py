"""Models with one output per token: the critic and the reward model."""

import contextlib
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel

from coati.config import LoRASettings
from coati.errors import CheckpointError, ConfigError, DataError
from coati.models.calls import forward_causal, last_real_position, load_or_copy_config
from coati.models.lora import add_lora
from coati.models.memory import copy_mapped_weights, wants_shapes_only
from coati.models.packing import (
    SCORED_TOKENS,
    PackedRows,
    log_padding_once,
    packed_hidden,
    packing_problem,
    row_parts,
    row_tokens,
)
from coati.models.tiles import batch_invariant

HEAD_FILE = "value_head.safetensors"
_HEAD_NAMES = ("score", "classifier", "v_head", "value_head")


class ValueHeadModel(nn.Module):
    """A decoder with a linear head of one output.

    Built from a sequence-classification model with one label, a causal LM or a bare decoder, whose new head is zero.
    """

    def __init__(self, model: PreTrainedModel, *, lora: LoRASettings | None = None) -> None:
        super().__init__()
        body, head = _split_body_and_head(model)
        self.body: nn.Module = add_lora(body, lora, task="FEATURE_EXTRACTION")
        self.value_head = head

    @classmethod
    def from_pretrained(cls, path: str | Path, *, lora: LoRASettings | None = None, **kwargs: Any) -> Self:
        """Load what `save_pretrained` wrote, a classification model, or any decoder."""
        head_file = Path(path) / HEAD_FILE
        kwargs.setdefault("trust_remote_code", False)  # by default transformers would prompt on the terminal
        config = AutoConfig.from_pretrained(str(path), trust_remote_code=kwargs["trust_remote_code"])
        architecture = next(iter(getattr(config, "architectures", None) or ()), "")
        has_own_head = not head_file.exists() and architecture.endswith("ForSequenceClassification")
        auto_class = AutoModelForSequenceClassification if has_own_head else AutoModel
        if wants_shapes_only(kwargs):
            with torch.device("meta"):
                return cls(auto_class.from_config(config, **kwargs), lora=lora)
        loaded = cls(copy_mapped_weights(auto_class.from_pretrained(str(path), **kwargs)), lora=lora)
        if head_file.exists():
            try:
                loaded.value_head.load_state_dict(load_file(head_file))
            except Exception as error:
                raise CheckpointError(f"{head_file} is not the value head of this model: {error}") from error
        return loaded

    @classmethod
    def from_config(
        cls, config: PreTrainedConfig | str | Path, *, lora: LoRASettings | None = None, **kwargs: Any
    ) -> Self:
        """Create a model with random weights from a transformers config, or from the path of one."""
        own = load_or_copy_config(config, trust_remote_code=kwargs.get("trust_remote_code", False))
        with torch.device("meta") if wants_shapes_only() else contextlib.nullcontext():
            return cls(AutoModel.from_config(own, **kwargs), lora=lora)

    @property
    def config(self) -> PreTrainedConfig:
        """The transformers config of the body."""
        return self.body.config

    def token_values(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return one number per position, [B, S], in float32 (or float64 for a float64 model).

        If the body can take packed rows, padding is not computed and gets 0.
        """
        if problem := packing_problem(self.body):
            log_padding_once(type(self.body).__name__, problem)
        else:
            with batch_invariant(self, input_ids):
                packed = PackedRows.of(input_ids, attention_mask)
                if len(packed) > 0:
                    return packed.unpacked(self._apply_head(packed_hidden(self.body, packed)))
        hidden = forward_causal(self.body, input_ids, attention_mask)[0]
        # A copy, not a view: sharding attaches its backward hook to what a module returns, and a view can lose it.
        return self._apply_head(hidden).clone()

    def _apply_head(self, hidden: Tensor) -> Tensor:
        """Apply the head to hidden states, [..., d] to [...]."""
        values: Tensor = self.value_head(hidden.to(self.value_head.weight.dtype)).squeeze(-1)
        return values if values.dtype == torch.float64 else values.float()

    def save_pretrained(self, path: str | Path, **kwargs: Any) -> None:
        """Write the body as a transformers (or peft) folder, and the head into the same folder."""
        state_dict = kwargs.pop("state_dict", None) or self.state_dict()
        body = {name.removeprefix("body."): t for name, t in state_dict.items() if name.startswith("body.")}
        heads = {n.removeprefix("value_head."): t for n, t in state_dict.items() if n.startswith("value_head.")}
        head = {name: tensor.detach().cpu().contiguous() for name, tensor in heads.items()}
        self.body.save_pretrained(str(path), state_dict=body, **kwargs)  # type: ignore[operator]
        save_file(head, Path(path) / HEAD_FILE)


class Critic(ValueHeadModel):
    """V(state) at each token: `forward` returns [B, S], where entry t values the text up to and including token t."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return the value at each position, [B, S]."""
        return self.token_values(input_ids, attention_mask)


def as_critic(model: nn.Module) -> nn.Module:
    """Wrap a plain transformers model in a `Critic`; return anything else unchanged."""
    return Critic(model) if isinstance(model, PreTrainedModel) else model


class RewardModel(ValueHeadModel):
    """One score per sequence, [B], read at its last real token."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return scores, [B]. Without gradients, a large batch is scored in parts."""
        costs = row_tokens(input_ids, attention_mask, is_packed=packs(self))
        parts = row_parts(costs, max_tokens=0 if torch.is_grad_enabled() else SCORED_TOKENS)
        if len(parts) <= 1:
            return self._scores(input_ids, attention_mask)
        masks = [None if attention_mask is None else attention_mask[rows] for rows in parts]
        return torch.cat([self._scores(input_ids[rows], mask) for rows, mask in zip(parts, masks, strict=True)])

    def _scores(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        values = self.token_values(input_ids, attention_mask)  # [B, S]
        if attention_mask is None:
            return values[:, -1]
        rows = torch.arange(values.shape[0], device=values.device)
        return values[rows, last_real_position(attention_mask)]


def action_values(critic: nn.Module, sequences: Tensor, attention_mask: Tensor | None, num_actions: int) -> Tensor:
    """Return V(state before each response token), [B, A]; a custom critic may return that itself."""
    values: Tensor = critic(sequences, attention_mask)
    batch, length = sequences.shape
    shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
    if shape == (batch, length) and num_actions < length:
        values = values[:, length - num_actions - 1 : length - 1]
    elif shape != (batch, num_actions):
        raise DataError(
            f"the critic {type(critic).__name__} must return [{batch}, {length}] (one value for each token) "
            f"or [{batch}, {num_actions}] (one for each response token), got {shape}."
        )
    return values


def packs(model: nn.Module) -> bool:
    """Return whether this critic or reward model, wrapped or not, computes real tokens only."""
    inner = getattr(model, "module", model)  # DistributedDataParallel
    return isinstance(inner, ValueHeadModel) and not packing_problem(inner.body)


def _split_body_and_head(model: PreTrainedModel) -> tuple[nn.Module, nn.Linear]:
    if not isinstance(model, PreTrainedModel):
        raise ConfigError(
            f"a critic or reward model needs a transformers model, got {type(model).__name__}. "
            "Any nn.Module that maps (sequences, attention_mask) to scores can be used in its place."
        )
    body = model.base_model
    for name in _HEAD_NAMES:
        head = getattr(model, name, None)
        if isinstance(head, nn.Linear):
            if head.out_features != 1:
                raise ConfigError(
                    f"a critic or reward model needs one label, but {type(model).__name__} has "
                    f"{head.out_features}. Load it with num_labels=1."
                )
            return body, head
    hidden_size = body.config.get_text_config().hidden_size
    parameter = next(body.parameters())
    head = nn.Linear(hidden_size, 1, bias=False, device=parameter.device, dtype=parameter.dtype)
    nn.init.zeros_(head.weight)
    return body, head

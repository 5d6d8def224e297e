"""The generate options: names of transformers' `generate`, checked before anything runs."""

import dataclasses
import difflib
import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

from coati.errors import GenerateOptionError

DEFAULT_MAX_NEW_TOKENS = 128

# Passed on to `generate`, so only the reference engine knows them. None of them changes what a token is drawn from.
_PASSED_ON = (
    "bos_token_id",
    "cache_config",
    "cache_implementation",
    "max_time",
    "prefill_chunk_size",
    "stopping_criteria",
    "use_cache",
)
_BEAMS = "Beam search does not sample from the policy. Leave it out."
_NOT_POLICY = (
    "Tokens would be drawn from another distribution than the policy's, and training treats them as the policy's "
    "samples. Leave it out and shape the reward instead."
)
_OTHER_CUT = "Use top_k, top_p or min_p."
_NOT_KEYED = "It would bypass the draws that are keyed by sample id. Leave it out."
_RESULTS = "coati decides what is returned. Leave it out."
_REASONS = {
    "constraints diversity_penalty early_stopping force_words_ids length_penalty num_beams num_beam_groups": _BEAMS,
    "bad_words_ids begin_suppress_tokens dola_layers encoder_no_repeat_ngram_size": _NOT_POLICY,
    "encoder_repetition_penalty exponential_decay_length_penalty forced_bos_token_id": _NOT_POLICY,
    "forced_eos_token_id guidance_scale": _NOT_POLICY,
    "logits_processor min_length min_new_tokens no_repeat_ngram_size penalty_alpha": _NOT_POLICY,
    "prefix_allowed_tokens_fn remove_invalid_values renormalize_logits repetition_penalty": _NOT_POLICY,
    "sequence_bias suppress_tokens token_healing watermarking_config": _NOT_POLICY,
    "epsilon_cutoff eta_cutoff top_h typical_p": _OTHER_CUT,
    "assistant_model num_assistant_tokens prompt_lookup_num_tokens use_mtp": _NOT_KEYED,
    "output_attentions output_hidden_states output_logits output_scores return_dict_in_generate": _RESULTS,
    "num_return_sequences": "Repeat the prompt in the batch instead, so that every sample has its own id.",
    "generation_config": "Pass its settings one by one, so that they can be checked and logged.",
}
_REFUSED = {name: reason for names, reason in _REASONS.items() for name in names.split()}
# The value at which a refused option does nothing, where that is not None, False or 0.
_NEUTRAL = {
    "encoder_repetition_penalty": 1,
    "length_penalty": 1,
    "num_beam_groups": 1,
    "num_beams": 1,
    "num_return_sequences": 1,
    "repetition_penalty": 1,
    "typical_p": 1,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """Checked options. `do_sample` is True unless told otherwise: training learns from samples.

    >>> GenerateOptions.parse(max_new_tokens=8, top_k=50).top_k
    50
    """

    do_sample: bool = True
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_length: int | None = None
    max_new_tokens: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None
    stop_strings: tuple[str, ...] = ()
    """A response ends with the token that completes one of these; that token is part of it."""
    tokenizer: Any = None
    """Tells what text tokens stand for, for `stop_strings`. A run uses its own."""
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Options that only the reference engine knows."""

    @classmethod
    def parse(cls, **options: Any) -> "GenerateOptions":
        """Check names and values; GenerateOptionError names the option, the rule, the value and the remedy."""
        own = {field.name for field in dataclasses.fields(cls)} - {"extra"}
        chosen: dict[str, Any] = {}
        extra: dict[str, Any] = {}
        for name, value in options.items():
            if name in _REFUSED:
                if value is not None and value != _NEUTRAL.get(name, 0):
                    raise GenerateOptionError(f"generate option {name}={value!r} is not supported. {_REFUSED[name]}")
            elif name not in KNOWN_OPTIONS:
                near = difflib.get_close_matches(name, KNOWN_OPTIONS, n=1)
                hint = f" Did you mean {near[0]}?" if near else ""
                raise GenerateOptionError(
                    f"unknown generate option {name}={value!r}.{hint} Known options: {', '.join(KNOWN_OPTIONS)}."
                )
            elif value is not None:
                (chosen if name in own else extra)[name] = value
        if isinstance(chosen.get("eos_token_id"), list):
            chosen["eos_token_id"] = tuple(chosen["eos_token_id"])
        if "stop_strings" in chosen:
            chosen["stop_strings"] = _strings(chosen["stop_strings"])
        parsed = cls(**chosen, extra=extra)
        parsed._check_values()
        return parsed

    def _check_values(self) -> None:
        for name in ("temperature", "top_k", "top_p", "min_p", "max_new_tokens", "max_length"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, Real)):
                raise GenerateOptionError(f"generate option {name} must be a number, got {value!r}.")
        rules = (
            (
                "temperature",
                not self.do_sample or 0 < self.temperature < math.inf,
                "above 0 and finite; use do_sample=False for greedy text",
            ),
            ("top_k", self.top_k >= 0, "0 (off) or more"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]; 1 turns it off"),
            ("min_p", 0 <= self.min_p <= 1, "in [0, 1]; 0 turns it off"),
            ("max_new_tokens", self.max_new_tokens is None or self.max_new_tokens >= 1, "1 or more"),
            (
                "max_length",
                self.max_length is None or self.max_length >= 2,
                "2 or more: it counts prompt and response",
            ),
            (
                "tokenizer",
                self.tokenizer is None or hasattr(self.tokenizer, "decode"),
                "a tokenizer object; leave it out in a config, the run's own is used",
            ),
        )
        for name, holds, rule in rules:
            if not holds:
                raise GenerateOptionError(f"generate option {name} must be {rule}, got {getattr(self, name)!r}.")

    @property
    def sampling_temperature(self) -> float:
        """Temperature of the distribution that log-probs refer to: 1 for greedy text."""
        return float(self.temperature) if self.do_sample else 1.0

    def with_tokenizer(self, tokenizer: Any) -> "GenerateOptions":
        """Fill in the tokenizer that stop strings need; one that was passed as an option wins."""
        if not self.stop_strings or self.tokenizer is not None:
            return self
        if tokenizer is None:
            raise GenerateOptionError(
                f"generate option stop_strings={list(self.stop_strings)!r} needs a tokenizer, and the reward has none. "
                "Pass the option tokenizer as well."
            )
        return dataclasses.replace(self, tokenizer=tokenizer)

    def new_token_limit(self, num_prompt_tokens: int) -> int:
        """How many tokens may follow a prompt of this length, by max_new_tokens and max_length."""
        limits = []
        if self.max_new_tokens is not None:
            limits.append(self.max_new_tokens)
        if self.max_length is not None:
            limits.append(self.max_length - num_prompt_tokens)
        return min(limits) if limits else DEFAULT_MAX_NEW_TOKENS

    def eos_token_ids(self, model: Any) -> tuple[int, ...]:
        """End-of-sequence tokens: the option, else the model's generation config, else its config."""
        for value in (self.eos_token_id, *_saved_values(model, "eos_token_id")):
            if value is not None:
                return (int(value),) if isinstance(value, int) else tuple(int(token) for token in value)
        return ()

    def pad_token(self, model: Any) -> int:
        """Padding token: the option, else the model's, else end-of-sequence, else 0. Always masked."""
        for value in (self.pad_token_id, *_saved_values(model, "pad_token_id")):
            if value is not None and int(value) >= 0:
                return int(value)
        return next(iter(self.eos_token_ids(model)), 0)


KNOWN_OPTIONS = tuple(sorted({*(field.name for field in dataclasses.fields(GenerateOptions)), *_PASSED_ON} - {"extra"}))
"""Every option that is understood."""


def _strings(value: Any) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list | tuple) else ()
    if not strings or not all(isinstance(string, str) and string for string in strings):
        raise GenerateOptionError(f"generate option stop_strings must be a list of texts, none empty, got {value!r}.")
    return strings


def _saved_values(model: Any, name: str) -> tuple[Any, Any]:
    """What the model's generation config and its config say."""
    return (
        getattr(getattr(model, "generation_config", None), name, None),
        getattr(getattr(model, "config", None), name, None),
    )


# What the native engine's decoder computes.
_NATIVE_ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM")
# Rotary embeddings that depend on nothing but the position. Others change with the length of the text.
_STATIC_ROPE = ("default", "linear", "llama3")


def native_engine_problem(model_config: Mapping[str, Any], options: GenerateOptions) -> str | None:
    """Why the native engine hands this model or these options to the reference engine; None if it does not.

    `model_config` is what `config.json` of the model holds, so that a plan can ask before anything is loaded.

    >>> native_engine_problem({"architectures": ["GPT2LMHeadModel"]}, GenerateOptions())
    'GPT2LMHeadModel is not one of LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, MistralForCausalLM'
    """
    if options.extra:
        return f"the native engine does not know the generate option {', '.join(sorted(options.extra))}"
    architecture = next(iter(model_config.get("architectures") or ()), "a model without an architecture")
    if architecture not in _NATIVE_ARCHITECTURES:
        return f"{architecture} is not one of {', '.join(_NATIVE_ARCHITECTURES)}"
    rope = model_config.get("rope_parameters") or model_config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in _STATIC_ROPE:
        return f"its rotary embedding is {kind!r}, and the native engine knows {', '.join(_STATIC_ROPE)}"
    if _has_sliding_window(architecture, model_config):
        return "it attends to a sliding window"
    if (model_config.get("pretraining_tp") or 1) != 1:
        return "its layers are split (pretraining_tp)"
    return None


def _has_sliding_window(architecture: str, model_config: Mapping[str, Any]) -> bool:
    if layer_types := model_config.get("layer_types"):
        return any(kind != "full_attention" for kind in layer_types)
    if architecture == "MistralForCausalLM":  # a file without the setting means the 4,096 of the first Mistral
        window = model_config.get("sliding_window", 4096)
        return window is not None and int(window) < int(model_config.get("max_position_embeddings", 131072))
    first = model_config.get("max_window_layers", 28)
    return bool(model_config.get("use_sliding_window")) and int(first) < int(model_config.get("num_hidden_layers", 32))

"""The generate options: names of transformers' `generate`, checked before anything runs."""

import difflib
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import Field

from coati.config.section import Section, setting
from coati.errors import ConfigError, GenerateOptionError

DEFAULT_MAX_NEW_TOKENS = 128

# Only the reference engine knows them. None of them changes what a token is drawn from.
_OF_THE_REFERENCE = ["max_time", "stopping_criteria", "use_cache"]
Text = Annotated[str, Field(min_length=1)]


class SamplingSettings(Section):
    """How a token is drawn: settings of `[rollout]` that are options of `generate` too."""

    do_sample: bool = setting(True, "Sample; false = always the likeliest token.")
    temperature: float = setting(1.0, "Divides the logits before sampling; 1.0 samples from the model as it is.", ge=0)
    top_k: int = setting(0, "Sample among the k likeliest tokens; 0 = off.", ge=0)
    top_p: float = setting(
        1.0,
        "Sample among the likeliest tokens that hold this much probability.",
        remedy="Use 1.0 to keep every token.",
        gt=0,
        le=1,
    )

    def _conflicts(self) -> Iterator[tuple[str, str, Any, str]]:
        if self.do_sample and self.temperature == 0:
            yield "temperature", "above 0 while do_sample is true", 0, "For greedy decoding set do_sample to false."


class GenerateOptions(SamplingSettings):
    """Checked options. `do_sample` is True unless told otherwise: training learns from samples.

    >>> GenerateOptions.parse(max_new_tokens=8, top_k=50).top_k
    50
    """

    min_p: float = setting(0.0, ge=0, le=1)
    max_length: int | None = setting(None, ge=2)
    max_new_tokens: int | None = setting(None, ge=1)
    eos_token_id: Any = None
    """One token or several."""
    pad_token_id: int | None = None
    stop_strings: tuple[Text, ...] = setting((), rule="a list of texts, none empty", strict=False)
    """A response ends with the token that completes one of these; that token is part of it."""
    tokenizer: Any = None
    """Tells what text tokens stand for, for `stop_strings`. A run uses its own."""
    extra: dict[str, Any] = setting({})
    """Options that only the reference engine knows."""

    @classmethod
    def parse(cls, **options: Any) -> "GenerateOptions":
        """Check names and values; GenerateOptionError names the option, the rule, the value and the remedy."""
        chosen: dict[str, Any] = {}
        for name, value in options.items():
            if name not in KNOWN_OPTIONS:
                near = difflib.get_close_matches(name, KNOWN_OPTIONS, n=1)
                hint = f" Did you mean {near[0]}?" if near else ""
                raise GenerateOptionError(
                    f"unknown generate option {name}={value!r}.{hint} Known options: {', '.join(KNOWN_OPTIONS)}. "
                    "Others of transformers are not supported: with beams, penalties or forced tokens, responses would "
                    "not be samples of the policy, as which training treats them."
                )
            if value is not None:
                chosen[name] = value
        if isinstance(chosen.get("stop_strings"), str):
            chosen["stop_strings"] = [chosen["stop_strings"]]
        extra = {name: chosen.pop(name) for name in _OF_THE_REFERENCE if name in chosen}
        try:
            return cls(**chosen, extra=extra)
        except ConfigError as error:
            raise GenerateOptionError(
                "\n".join(f"generate option {line}" for line in str(error).splitlines())
            ) from None

    def _conflicts(self) -> Iterator[tuple[str, str, Any, str]]:
        yield from super()._conflicts()
        if self.tokenizer is not None and not hasattr(self.tokenizer, "decode"):
            remedy = "Leave it out in a config: the run's own is used."
            yield "tokenizer", "a tokenizer object", self.tokenizer, remedy

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
        return self.model_copy(update={"tokenizer": tokenizer})

    def new_token_limit(self, num_prompt_tokens: int) -> int:
        """How many tokens may follow a prompt of this length, by max_new_tokens and max_length."""
        by_length = None if self.max_length is None else self.max_length - num_prompt_tokens
        limits = [limit for limit in (self.max_new_tokens, by_length) if limit is not None]
        return min(limits, default=DEFAULT_MAX_NEW_TOKENS)

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


KNOWN_OPTIONS = tuple(sorted({*GenerateOptions.model_fields, *_OF_THE_REFERENCE} - {"extra"}))
"""Every option that is understood."""


def _saved_values(model: Any, name: str) -> tuple[Any, Any]:
    """What the model's generation config and its config say."""
    return (
        getattr(getattr(model, "generation_config", None), name, None),
        getattr(getattr(model, "config", None), name, None),
    )


def options_problem(engine: str, options: GenerateOptions) -> str | None:
    """Why an engine of this name does not generate with these options; None if it does."""
    if options.extra and engine != "reference":
        return f"only the reference engine knows the generate option {', '.join(sorted(options.extra))}"
    return None


# What the native engine's decoder computes.
_NATIVE_ARCHITECTURES = (
    "LlamaForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "MistralForCausalLM",
    "GemmaForCausalLM",
    "Gemma3ForCausalLM",
    "PhiForCausalLM",
    "Phi3ForCausalLM",
    "GPT2LMHeadModel",
    "OPTForCausalLM",
)
# Rotary embeddings that depend on nothing but the position. Others change with the length of the text.
_STATIC_ROPE = ("default", "linear", "llama3")
# Settings that it computes with this value only.
_NATIVE_SETTINGS = {
    "pretraining_tp": 1,
    "add_cross_attention": False,
    "scale_attn_by_inverse_layer_idx": False,
    "do_layer_norm_before": True,
    "_remove_final_layer_norm": False,
    "qk_layernorm": False,
    "use_bidirectional_attention": False,
}


def native_engine_problem(model_config: Mapping[str, Any], options: GenerateOptions) -> str | None:
    """Why the native engine hands this model or these options to the reference engine; None if it does not.

    `model_config` is what `config.json` of the model holds, so that a plan can ask before anything is loaded.

    >>> native_engine_problem({"architectures": ["GPT2LMHeadModel"], "add_cross_attention": True}, GenerateOptions())
    'add_cross_attention is True, and the native engine knows False only'
    """
    if (problem := options_problem("native", options)) is not None:
        return problem
    architecture = next(iter(model_config.get("architectures") or ()), "a model without an architecture")
    if architecture not in _NATIVE_ARCHITECTURES:
        return f"{architecture} is not one of {', '.join(_NATIVE_ARCHITECTURES)}"
    rope = model_config.get("rope_parameters") or model_config.get("rope_scaling") or {}
    for one in [part for part in rope.values() if isinstance(part, Mapping)] or [rope]:  # kinds of layers may have own
        kind = one.get("rope_type", one.get("type", "default"))
        if kind not in _STATIC_ROPE:
            return f"its rotary embedding is {kind!r}, and the native engine knows {', '.join(_STATIC_ROPE)}"
    for name, known in _NATIVE_SETTINGS.items():
        if (value := model_config.get(name)) not in (None, known):
            return f"{name} is {value!r}, and the native engine knows {known!r} only"
    if (width := model_config.get("word_embed_proj_dim")) not in (None, model_config.get("hidden_size")):
        return f"its embeddings have {width} dimensions (word_embed_proj_dim), other than its layers"
    return None

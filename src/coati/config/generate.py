"""Options of transformers' `generate` that coati supports, validated before anything runs."""

import difflib
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import Field

from coati.config.section import Section, setting
from coati.errors import ConfigError, GenerateOptionError

DEFAULT_MAX_NEW_TOKENS = 128

# Supported by the reference engine only. None of them changes the distribution of a token.
_REFERENCE_ONLY = ["max_time", "stopping_criteria", "use_cache"]
Text = Annotated[str, Field(min_length=1)]


class SamplingSettings(Section):
    """How a token is sampled: settings of `[rollout]` that are also options of `generate`."""

    do_sample: bool = setting(True, "Sample; false = greedy decoding.")
    temperature: float = setting(1.0, "Divides the logits before sampling; 1.0 = sample the unmodified model.", ge=0)
    top_k: int = setting(0, "Sample from the k most likely tokens; 0 = off.", ge=0)
    top_p: float = setting(
        1.0,
        "Sample from the most likely tokens that add up to this probability.",
        remedy="Use 1.0 to keep every token.",
        gt=0,
        le=1,
    )

    def _conflicts(self) -> Iterator[tuple[str, str, Any, str]]:
        if self.do_sample and self.temperature == 0:
            yield "temperature", "above 0 while do_sample is true", 0, "For greedy decoding, set do_sample to false."


class GenerateOptions(SamplingSettings):
    """Validated options. Unlike in transformers, `do_sample` is True by default, because training needs samples.

    >>> GenerateOptions.parse(max_new_tokens=8, top_k=50).top_k
    50
    """

    min_p: float = setting(0.0, ge=0, le=1)
    max_length: int | None = setting(None, ge=2)
    max_new_tokens: int | None = setting(None, ge=1)
    eos_token_id: Any = None
    """One token id or several."""
    pad_token_id: int | None = None
    stop_strings: tuple[Text, ...] = setting((), rule="a list of non-empty strings", strict=False)
    """A response ends with the token that completes one of these strings, and includes that token."""
    tokenizer: Any = None
    """Decodes tokens to find `stop_strings`. A run uses its own tokenizer."""
    extra: dict[str, Any] = setting({})
    """Options that only the reference engine supports."""

    @classmethod
    def parse(cls, **options: Any) -> "GenerateOptions":
        """Validate names and values. GenerateOptionError has the option, the rule, the value and the remedy."""
        chosen: dict[str, Any] = {}
        for name, value in options.items():
            if name not in KNOWN_OPTIONS:
                near = difflib.get_close_matches(name, KNOWN_OPTIONS, n=1)
                hint = f" Did you mean {near[0]}?" if near else ""
                raise GenerateOptionError(
                    f"unknown generate option {name}={value!r}.{hint} Known options: {', '.join(KNOWN_OPTIONS)}. "
                    "Other transformers options are not supported: with beams, penalties or forced tokens, responses "
                    "would not be samples of the policy, as training assumes."
                )
            if value is not None:
                chosen[name] = value
        if isinstance(chosen.get("stop_strings"), str):
            chosen["stop_strings"] = [chosen["stop_strings"]]
        extra = {name: chosen.pop(name) for name in _REFERENCE_ONLY if name in chosen}
        try:
            return cls(**chosen, extra=extra)
        except ConfigError as error:
            raise GenerateOptionError(
                "\n".join(f"generate option {line}" for line in str(error).splitlines())
            ) from None

    def _conflicts(self) -> Iterator[tuple[str, str, Any, str]]:
        yield from super()._conflicts()
        if self.tokenizer is not None and not hasattr(self.tokenizer, "decode"):
            remedy = "Remove it from the config: a run uses its own tokenizer."
            yield "tokenizer", "a tokenizer object", self.tokenizer, remedy

    @property
    def sampling_temperature(self) -> float:
        """Temperature of the distribution that log-probs refer to; 1 for greedy decoding."""
        return float(self.temperature) if self.do_sample else 1.0

    def with_tokenizer(self, tokenizer: Any) -> "GenerateOptions":
        """Return these options with the tokenizer for stop strings, unless one was passed as an option."""
        if not self.stop_strings or self.tokenizer is not None:
            return self
        if tokenizer is None:
            raise GenerateOptionError(
                f"generate option stop_strings={list(self.stop_strings)!r} needs a tokenizer, but the reward has none. "
                "Pass the option tokenizer as well."
            )
        return self.model_copy(update={"tokenizer": tokenizer})

    def new_token_limit(self, num_prompt_tokens: int) -> int:
        """Return the maximum response length for a prompt length, from max_new_tokens and max_length."""
        by_length = None if self.max_length is None else self.max_length - num_prompt_tokens
        limits = [limit for limit in (self.max_new_tokens, by_length) if limit is not None]
        return min(limits, default=DEFAULT_MAX_NEW_TOKENS)

    def eos_token_ids(self, model: Any) -> tuple[int, ...]:
        """Return the end-of-sequence tokens: the option, else the model's generation config, else its config."""
        for value in (self.eos_token_id, *_saved_values(model, "eos_token_id")):
            if value is not None:
                return (int(value),) if isinstance(value, int) else tuple(int(token) for token in value)
        return ()

    def pad_token(self, model: Any) -> int:
        """Return the padding token: the option, else the model's, else end-of-sequence, else 0. Always masked."""
        for value in (self.pad_token_id, *_saved_values(model, "pad_token_id")):
            if value is not None and int(value) >= 0:
                return int(value)
        return next(iter(self.eos_token_ids(model)), 0)


KNOWN_OPTIONS = tuple(sorted({*GenerateOptions.model_fields, *_REFERENCE_ONLY} - {"extra"}))


def _saved_values(model: Any, name: str) -> tuple[Any, Any]:
    """Return the values in the model's generation config and in its config."""
    return (
        getattr(getattr(model, "generation_config", None), name, None),
        getattr(getattr(model, "config", None), name, None),
    )


def options_problem(engine: str, options: GenerateOptions) -> str | None:
    """Return why an engine does not support these options, or None if it does."""
    if options.extra and engine != "reference":
        return f"only the reference engine supports the generate option {', '.join(sorted(options.extra))}"
    return None


# Architectures that the native engine's decoder implements.
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
# Rotary embeddings that depend only on the position. Others change with the sequence length.
_STATIC_ROPE = ("default", "linear", "llama3")
# Model settings of which the decoder supports only this value.
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
    """Return why the native engine does not support these options or this model (`config.json`), or None if it does.

    >>> native_engine_problem({"architectures": ["GPT2LMHeadModel"], "add_cross_attention": True}, GenerateOptions())
    'add_cross_attention is True, but the native engine supports only False'
    """
    if (problem := options_problem("native", options)) is not None:
        return problem
    architecture = next(iter(model_config.get("architectures") or ()), "a model without an architecture")
    if architecture not in _NATIVE_ARCHITECTURES:
        return f"{architecture} is not one of {', '.join(_NATIVE_ARCHITECTURES)}"
    rope = model_config.get("rope_parameters") or model_config.get("rope_scaling") or {}
    own = [part for part in rope.values() if isinstance(part, Mapping)]  # layer types may have their own
    for one in own or [rope]:
        kind = one.get("rope_type", one.get("type", "default"))
        if kind not in _STATIC_ROPE:
            return f"its rotary embedding is {kind!r}, but the native engine supports only {', '.join(_STATIC_ROPE)}"
    for name, known in _NATIVE_SETTINGS.items():
        if (value := model_config.get(name)) not in (None, known):
            return f"{name} is {value!r}, but the native engine supports only {known!r}"
    if (width := model_config.get("word_embed_proj_dim")) not in (None, model_config.get("hidden_size")):
        return f"its embeddings have another width (word_embed_proj_dim = {width}) than its layers"
    return None

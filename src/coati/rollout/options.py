"""The generate options: the transformers vocabulary, checked by name before anything runs."""

import dataclasses
import difflib
import functools
import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from coati.errors import GenerateOptionError

DEFAULT_MAX_NEW_TOKENS = 128

# Options that coati handles itself, because draws are keyed by sample id (see ReferenceEngine).
_SAMPLING_OPTIONS = ("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
# Arguments of `generate` that are not fields of a GenerationConfig.
CALL_ARGUMENTS = (
    "logits_processor",
    "stopping_criteria",
    "prefix_allowed_tokens_fn",
    "tokenizer",
    "stop_strings",
)
_NOT_KEYED = "It would bypass the draws that are keyed by sample id. Leave it out."
# Options that would change what comes back, and what to do instead.
_REFUSED = {
    "num_beams": "Beam search does not sample from the policy. Leave it out.",
    "num_return_sequences": "Repeat the prompt in the batch instead, so that every sample has its own id.",
    "num_beam_groups": "Beam search does not sample from the policy. Leave it out.",
    "constraints": "It needs beam search, which does not sample from the policy. Leave it out.",
    "force_words_ids": "It needs beam search, which does not sample from the policy. Leave it out.",
    "penalty_alpha": "Contrastive search does not sample from the policy. Leave it out.",
    "dola_layers": "DoLa does not sample from the policy. Leave it out.",
    "prompt_lookup_num_tokens": _NOT_KEYED,
    "watermarking_config": _NOT_KEYED,
    "top_h": f"{_NOT_KEYED} Use top_p, min_p or typical_p.",
    "token_healing": "It rewrites the prompt. Leave it out.",
    "return_dict_in_generate": "coati decides what is returned. Leave it out.",
    "output_scores": "coati decides what is returned. Leave it out.",
    "output_logits": "coati decides what is returned. Leave it out.",
    "generation_config": "Give its settings one by one, so that they can be checked and logged.",
}
_HARMLESS_VALUES = {"num_beams": 1, "num_return_sequences": 1, "num_beam_groups": 1}


@functools.lru_cache(maxsize=1)
def known_options() -> tuple[str, ...]:
    """Every option name that is understood, sorted."""
    names = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    names -= {"transformers_version", *_REFUSED}
    return tuple(sorted(names | set(_SAMPLING_OPTIONS) | set(CALL_ARGUMENTS) | {"do_sample"}))


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """Checked options. `do_sample` is True unless told otherwise: PPO learns from samples.

    >>> GenerateOptions.parse(max_new_tokens=8, top_k=50).top_k
    50
    """

    do_sample: bool = True
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    epsilon_cutoff: float = 0.0
    eta_cutoff: float = 0.0
    max_length: int | None = None
    max_new_tokens: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def parse(cls, **options: Any) -> "GenerateOptions":
        """Check names and ranges; GenerateOptionError names option, rule, value and remedy."""
        own = {field.name for field in dataclasses.fields(cls)} - {"extra"}
        chosen: dict[str, Any] = {}
        extra: dict[str, Any] = {}
        for name, value in options.items():
            if name in _REFUSED:
                if value is None or value == _HARMLESS_VALUES.get(name, False):
                    continue
                raise GenerateOptionError(f"generate option {name}={value!r} cannot be used here. {_REFUSED[name]}")
            if name not in known_options():
                near = difflib.get_close_matches(name, known_options(), n=1)
                hint = f" Did you mean {near[0]}?" if near else ""
                raise GenerateOptionError(
                    f"unknown generate option {name}={value!r}.{hint} Known options: {', '.join(known_options())}."
                )
            if value is None:
                continue
            (chosen if name in own else extra)[name] = value
        if isinstance(chosen.get("eos_token_id"), list):
            chosen["eos_token_id"] = tuple(chosen["eos_token_id"])
        if "stop_strings" in extra and "tokenizer" not in extra:
            raise GenerateOptionError("generate option stop_strings needs the option tokenizer. Give both.")
        parsed = cls(**chosen, extra=extra)
        parsed._check_ranges()
        return parsed

    def _check_ranges(self) -> None:
        for name in (*_SAMPLING_OPTIONS, "max_new_tokens", "max_length"):
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
            ("typical_p", 0 < self.typical_p <= 1, "in (0, 1]; 1 turns it off"),
            ("epsilon_cutoff", 0 <= self.epsilon_cutoff < 1, "in [0, 1); 0 turns it off"),
            ("eta_cutoff", 0 <= self.eta_cutoff < 1, "in [0, 1); 0 turns it off"),
            ("max_new_tokens", self.max_new_tokens is None or self.max_new_tokens >= 1, "1 or more"),
            (
                "max_length",
                self.max_length is None or self.max_length >= 2,
                "2 or more: it counts prompt and response",
            ),
        )
        for name, holds, rule in rules:
            if not holds:
                raise GenerateOptionError(f"generate option {name} must be {rule}, got {getattr(self, name)!r}.")

    @property
    def sampling_temperature(self) -> float:
        """Temperature of the distribution that log-probs refer to: 1 for greedy text."""
        return float(self.temperature) if self.do_sample else 1.0

    def new_token_limit(self, num_prompt_tokens: int) -> int:
        """How many tokens may follow a prompt of this length, by max_new_tokens and max_length."""
        limits = []
        if self.max_new_tokens is not None:
            limits.append(self.max_new_tokens)
        if self.max_length is not None:
            limits.append(self.max_length - num_prompt_tokens)
        return min(limits) if limits else DEFAULT_MAX_NEW_TOKENS

    def eos_token_ids(self, model: PreTrainedModel) -> tuple[int, ...]:
        """End-of-sequence tokens: the option, else the model's generation config, else its config."""
        candidates = (
            self.eos_token_id,
            getattr(getattr(model, "generation_config", None), "eos_token_id", None),
            getattr(getattr(model, "config", None), "eos_token_id", None),
        )
        for value in candidates:
            if value is not None:
                return (int(value),) if isinstance(value, int) else tuple(int(token) for token in value)
        return ()

    def pad_token(self, model: PreTrainedModel) -> int:
        """Padding token: the option, else the model's, else end-of-sequence, else 0. Always masked."""
        candidates = (
            self.pad_token_id,
            getattr(getattr(model, "generation_config", None), "pad_token_id", None),
            getattr(getattr(model, "config", None), "pad_token_id", None),
        )
        for value in candidates:
            if value is not None and int(value) >= 0:
                return int(value)
        return next(iter(self.eos_token_ids(model)), 0)

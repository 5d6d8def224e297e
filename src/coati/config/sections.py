"""The sections that say what is trained on what: run, model, prompts, reward and rollout.

Rules between keys of one section live in that section; rules between sections live in `coati.config.run_settings`.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import JsonValue

from coati.config.generate import GenerateOptions
from coati.config.section import Section, setting
from coati.errors import GenerateOptionError

# Options of `generate` that have their own setting, and the setting that owns them.
OWNED_GENERATE_OPTIONS = {
    "max_new_tokens": "rollout.max_new_tokens",
    "max_length": "rollout.max_new_tokens",
    "temperature": "rollout.temperature",
    "top_k": "rollout.top_k",
    "top_p": "rollout.top_p",
    "do_sample": "rollout.do_sample",
    "num_return_sequences": "rollout.samples_per_prompt",
}

_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class GeneralSettings(Section):
    """`[run]`: what the run is called, its seed and where its files go."""

    name: str = setting(
        "run",
        "Name of the run; left out, the stem of the TOML file.",
        rule="a text of letters, digits, '.', '_' and '-' that starts with a letter or digit",
        remedy='Set run.name, for example run.name = "film-1".',
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
    )
    seed: int = setting(
        0,
        "Every random draw of the run is keyed on it.",
        rule="a whole number, 0 or more and below 2^63",
        ge=0,
        lt=2**63,
    )
    output: str = setting("", "Folder for everything the run writes; empty = runs/<name>.", rule="a path in quotes")


class ModelSettings(Section):
    """`[model]`: the policy, and the models that go with it."""

    path: str = setting(
        ...,
        "The policy to train: a folder that transformers can load, or a hub name.",
        rule="a path or hub name in quotes",
        remedy='Set model.path, for example model.path = "runs/demo/model".',
        min_length=1,
    )
    critic: str = setting(
        "actor",
        "Where the critic starts: from the actor's body, or from a model of its own.",
        rule='"actor", or a path or hub name',
        min_length=1,
    )
    reference: str = setting(
        "",
        "The frozen model that the KL penalty is measured against; empty = model.path.",
        rule="a path or hub name in quotes, or empty",
    )
    tokenizer: str = setting(
        "", "Where the tokenizer is loaded from; empty = model.path.", rule="a path or hub name, or empty"
    )
    dtype: Literal["float32", "bfloat16"] = setting("float32", "Number format of the weights.")
    device: Literal["auto", "cpu", "cuda"] = setting(
        "auto", "Where models live; auto = a GPU where an actor was given one."
    )


class LoRASettings(Section):
    """`[lora]`: train low-rank adapters, W = W₀ + (alpha / rank) · B·A with W₀ frozen, instead of all weights."""

    rank: int = setting(0, "Rank of the adapters; 0 = off.", ge=0)
    alpha: float = setting(16.0, "Adapters are scaled by alpha / rank.", gt=0)
    dropout: float = setting(0.0, "Dropout on the adapters' input.", ge=0, lt=1)
    target_modules: tuple[str, ...] = setting(
        (),
        "Names of the layers that get adapters; empty = all linear layers but the output head.",
        rule='a list of names in quotes, for example ["q_proj", "v_proj"], and empty while lora.rank is 0',
        strict=False,
    )

    def problems(self) -> list[str]:
        """Find layers that are named for adapters that are off."""
        if self.target_modules and not self.rank:
            names = ", ".join(self.target_modules)
            return [
                f"lora.target_modules ({names}) has no effect while lora.rank is 0. Set lora.rank, for example to 8."
            ]
        return []


class PromptSettings(Section):
    """`[prompts]`: where prompts come from."""

    path: str = setting(
        ...,
        "A .jsonl, .json, .csv or .parquet file, a `datasets` folder, or a `datasets` name.",
        rule="a path or dataset name in quotes",
        remedy='Set prompts.path, for example prompts.path = "prompts.jsonl".',
        min_length=1,
    )
    split: str = setting(
        "train", "Split of a `datasets` folder or name; a single file has one.", rule="a name", min_length=1
    )
    subset: str = setting("", "Subset (configuration) of a `datasets` name that has several.", rule="a name")
    column: str = setting(
        "prompt",
        "Column with the prompt: a text, or a list of chat messages. Other columns reach the reward.",
        rule="the name of a column",
        min_length=1,
    )
    shuffle: bool = setting(True, "Shuffle the prompts for every pass.")
    max_tokens: int = setting(
        0, "Skip (and count) prompts of more tokens than this; 0 = whatever fits the model's context.", ge=0
    )


class RewardTerm(Section):
    """One term of a weighted sum in `reward.terms`."""

    function: str = setting("", 'A function over text, as "module:function".', rule='"module:function", or empty')
    model: str = setting("", "A reward model.", rule="a path or hub name in quotes, or empty")
    weight: float = setting(1.0, "Factor of this term; a negative one is a penalty.")
    name: str = setting("", "What metrics call it; empty = the function's or the model folder's name.")

    @property
    def label(self) -> str:
        """What metrics and errors call this term."""
        return self.name or reward_label(self.function, self.model)


class RewardSettings(Section):
    """`[reward]`: what a response is worth. Exactly one of `function`, `model` and `terms`."""

    function: str = setting(
        "",
        'A function over text and the dataset\'s columns, as "module:function".',
        rule='"module:function", or empty',
        remedy='For example reward.function = "rewards:praise", for praise() in rewards.py.',
    )
    model: str = setting("", "A reward model.", rule="a path or hub name in quotes, or empty")
    terms: tuple[RewardTerm, ...] = setting(
        (),
        "A weighted sum of rewards.",
        rule="a list of tables, each with function or model, and weight",
        remedy='For example reward.terms = [{ function = "rewards:praise", weight = 0.5 }].',
        strict=False,
    )
    timeout_seconds: float = setting(120.0, "Longest that a reward function may take for one batch.", gt=0)
    search_paths: tuple[str, ...] = setting(
        (),
        "Folders where modules of reward functions are looked for, before the working directory; "
        "left out, the folder of the TOML file.",
        rule="a list of folders in quotes",
        strict=False,
    )

    def problems(self) -> list[str]:
        """None or several ways to reward, malformed names, and terms that share one."""
        ways = [f"reward.{key}" for key in ("function", "model", "terms") if getattr(self, key)]
        found = []
        if len(ways) != 1:
            found.append(
                "reward must have exactly one of reward.function, reward.model and reward.terms, got "
                f"{' and '.join(ways) or 'none'}. Keep one; to add rewards up, list them in reward.terms."
            )
        found += _function_problems("reward.function", self.function)
        for index, term in enumerate(self.terms):
            found += _function_problems(f"reward.terms[{index}].function", term.function)
            if bool(term.function) == bool(term.model):
                came = "both" if term.function else "neither"
                found.append(
                    f"reward.terms[{index}] must have exactly one of function and model, got {came}. "
                    "Give every reward a term of its own."
                )
        labels = [term.label for term in self.terms]
        found += [
            f"reward.terms must have different names, got {label!r} {labels.count(label)} times. "
            "Give each of them a name of its own."
            for label in dict.fromkeys(labels)
            if labels.count(label) > 1
        ]
        return found


def reward_label(function: str, model: str) -> str:
    """Return the name of a reward that was given none: its function, or the last part of the model's path."""
    return function.partition(":")[2] if function else model.rstrip("/").rpartition("/")[2]


def _function_problems(key: str, function: str) -> list[str]:
    if not function or _FUNCTION.fullmatch(function):
        return []
    return [f'{key} must be "module:function", got "{function}". For praise() in rewards.py write "rewards:praise".']


class RolloutSettings(Section):
    """`[rollout]`: how makers generate."""

    prompts_per_batch: int = setting(16, "Prompts that a maker takes at a time.", ge=1)
    samples_per_prompt: int = setting(1, "Responses sampled for each prompt.", ge=1)
    max_new_tokens: int = setting(128, "Longest response, in tokens.", ge=1)
    temperature: float = setting(1.0, "Divides the logits before sampling; 1.0 samples from the model as it is.", ge=0)
    top_k: int = setting(0, "Sample among the k likeliest tokens; 0 = off.", ge=0)
    top_p: float = setting(
        1.0,
        "Sample among the likeliest tokens that hold this much probability.",
        remedy="Use 1.0 to keep every token.",
        gt=0,
        le=1,
    )
    do_sample: bool = setting(True, "Sample; false = always the likeliest token.")
    engine: Literal["native", "reference"] = setting(
        "native",
        "What writes the text: our own engine (models of another shape than Llama, Qwen or Mistral or "
        "in pieces, and options that need it, go to the other by themselves), or transformers' generate.",
    )
    in_flight: bool = setting(
        False,
        "Take new weights between two tokens of a generation, and not only between two batches; every token says which "
        "version wrote it.",
    )
    generate: dict[str, JsonValue] = setting(
        {},
        "Further options of transformers' generate, as a table.",
        rule="a table of options that have no setting of their own",
        remedy='For example rollout.generate = { stop_strings = ["."] }.',
    )

    @property
    def generate_options(self) -> dict[str, Any]:
        """All options of `generate`: those with a setting of their own, and the table."""
        return {
            "max_new_tokens": self.max_new_tokens,
            "do_sample": self.do_sample,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            **self.generate,
        }

    def problems(self) -> list[str]:
        """Find sampling at temperature 0, and generate options that repeat a setting or are not supported."""
        found = []
        if self.do_sample and self.temperature == 0:
            found.append(
                "rollout.temperature must be above 0 while rollout.do_sample is true, got 0. "
                "For greedy decoding set rollout.do_sample = false instead."
            )
        for option, value in self.generate.items():
            key = f"rollout.generate.{option}"
            if option in OWNED_GENERATE_OPTIONS:
                owner = OWNED_GENERATE_OPTIONS[option]
                found.append(
                    f"{key} must not be set, because {owner} decides it, got {value!r}. "
                    f"Set {owner} and take {option} out of rollout.generate."
                )
            elif value is None:
                found.append(f"{key} must have a value, got nothing. Leave {option} out to keep its default.")
            else:
                try:
                    GenerateOptions.parse(**{option: value})
                except GenerateOptionError as error:
                    found.append(f"{key}: {error}")
        return found

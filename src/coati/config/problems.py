"""What is wrong with settings, in words: key, rule, value and remedy, one line per problem.

pydantic finds the problems, all at once; here they are put into words.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import tomli_w
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from coati.config.run_settings import RunSettings
from coati.config.section import rule_of

# What TRL, verl, OpenRLHF and others call what has another name here.
_FOREIGN_NAMES = {
    "train.actor_lr": "lr learning_rate actor_learning_rate",
    "train.critic_lr": "critic_learning_rate",
    "train.batch_size": "per_device_train_batch_size train_batch_size ppo_mini_batch_size",
    "train.micro_batch_size": "gradient_accumulation_steps micro_train_batch_size ppo_micro_batch_size_per_gpu",
    "train.micro_batch_tokens": "ppo_max_token_len_per_gpu",
    "train.total_steps": "max_steps num_train_epochs total_training_steps total_epochs num_episodes",
    "train.epochs": "num_iterations ppo_epochs num_ppo_epochs",
    "train.warmup_steps": "warmup_ratio lr_warmup_steps",
    "train.lr_schedule": "lr_scheduler_type",
    "train.activation_checkpointing": "gradient_checkpointing enable_gradient_checkpointing",
    "train.save_every": "save_steps save_freq",
    "algorithm.name": "adv_estimator advantage_estimator",
    "algorithm.kl_coef": "beta init_kl_coef kl_loss_coef",
    "algorithm.eps_clip": "epsilon cliprange clip_ratio",
    "algorithm.eps_clip_high": "epsilon_high clip_ratio_high",
    "algorithm.value_clip": "cliprange_value",
    "algorithm.normalization": "loss_type loss_agg_mode",
    "rollout.samples_per_prompt": "num_generations n_samples_per_prompt rollout_n",
    "rollout.max_new_tokens": "max_completion_length max_response_length response_length generate_max_len",
    "rollout.engine": "use_vllm",
    "prompts.max_tokens": "max_prompt_length prompt_max_len",
    "prompts.path": "dataset dataset_name train_files prompt_data",
    "prompts.column": "prompt_key input_key dataset_text_field",
    "model.path": "model_name_or_path model_name pretrain",
    "model.reference": "ref_model ref_model_path",
    "model.dtype": "torch_dtype bf16 fp16",
    "reward.function": "reward_funcs reward_func custom_reward_function",
    "reward.model": "reward_model reward_pretrain",
    "run.output": "output_dir default_local_dir save_path",
    "run.name": "run_name experiment_name",
    "lora.rank": "lora_r lora_rank use_peft",
    "topology.max_staleness": "async_level staleness_threshold max_head_offpolicyness",
}
_OURS = {foreign: ours for ours, names in _FOREIGN_NAMES.items() for foreign in names.split()}
_ABSENT = {
    **dict.fromkeys(
        ("wandb", "report_to", "logger", "project_name", "use_wandb"),
        "A run writes metrics.jsonl, and TensorBoard files with logging.tensorboard. For another service pass trackers "
        "to coati.train.",
    ),
    **dict.fromkeys(("resume", "resume_from_checkpoint", "resume_mode"), "A run cannot be resumed yet."),
}


def describe(model: type[BaseModel], error: ValidationError) -> list[str]:
    """Put everything that pydantic found wrong with settings into words, one full message per problem."""
    section = next((name for name, field in RunSettings.model_fields.items() if field.annotation is model), "")
    return [line for detail in error.errors(include_url=False) for line in _lines(model, section, detail)]


def spell(value: Any) -> str:
    """Write one value as a TOML file does; Python's spelling where TOML has none.

    Example:
        >>> spell(True), spell({"a": [1, "x"]}), spell(None)
        ('true', '{ a = [1, "x"] }', 'None')
    """
    if isinstance(value, Mapping):
        pairs = ", ".join(f"{key} = {spell(item)}" for key, item in value.items())
        return f"{{ {pairs} }}" if pairs else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(spell, value))}]"
    try:
        return tomli_w.dumps({"_": value}).removeprefix("_ = ").rstrip("\n")
    except TypeError:
        return str(value)


def _lines(model: type[BaseModel], section: str, detail: Any) -> list[str]:
    """Say one pydantic error; a rule between keys may take several lines."""
    kind, value = detail["type"], detail["input"]
    if kind == "value_error":
        return str(detail["ctx"]["error"]).splitlines()
    owner: type[BaseModel] = model
    field: FieldInfo | None = None
    location: list[int | str] = [section] if section else []
    for part in detail["loc"]:  # down to the innermost setting; deeper parts are pydantic's own
        inner = None if field is None else _inner_model(field)
        if isinstance(part, str) and (field is None or inner is not None):
            owner = inner or owner
            field = owner.model_fields.get(part)
        elif field is not None and inner is None and len(location) > 2:
            break
        location.append(part)
    key = _dotted(location)
    if kind == "extra_forbidden" or field is None:
        return [_unknown(location, value, owner)]
    if _inner_model(field) is not None and kind in ("model_type", "model_attributes_type"):
        return [f"{key} must be a table of settings, got {_short(value)}. Write its keys under [{key}]."]
    rule = rule_of(field)
    if kind == "missing":
        return [f"{key} is required: {rule}. {_remedy(field)}"]
    return [f"{key} must be {rule}, got {_short(value)}. {_remedy(field)}"]


def _unknown(location: Sequence[int | str], value: Any, owner: type[BaseModel]) -> str:
    key, name = _dotted(location), str(location[-1])
    if name == "algorithm" and len(location) == 2:
        return f"Unknown setting {key}. Write name = {_short(value)} under [algorithm]."
    known = list(owner.model_fields)
    elsewhere = [
        f"{section}.{name}"
        for section, field in RunSettings.model_fields.items()
        if name in getattr(field.annotation, "model_fields", {})
    ]
    if name in _ABSENT:
        remedy = _ABSENT[name]
    elif name in _OURS:
        remedy = f"Use {_OURS[name]}: {_about(_OURS[name])}"
    elif close := difflib.get_close_matches(name, known, n=1):
        remedy = f"Did you mean {_dotted((*location[:-1], close[0]))}?"
    elif elsewhere:
        remedy = f"Did you mean {' or '.join(elsewhere)}?"
    else:
        remedy = f"{'The sections are' if len(location) == 1 else f'[{location[0]}] has'} {', '.join(known)}."
    return f"Unknown {'section' if len(location) == 1 else 'setting'} {key}. {remedy}"


def _about(key: str) -> str:
    section, _, name = key.partition(".")
    fields = getattr(RunSettings.model_fields[section].annotation, "model_fields", {})
    about = str(fields[name].description)
    return about[:1].lower() + about[1:]


def _inner_model(field: FieldInfo) -> type[BaseModel] | None:
    """Return the model of a section, or of the tables in a list of tables such as `reward.terms`."""
    for kind in (field.annotation, *get_args(field.annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def _dotted(location: Sequence[int | str]) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _short(value: Any) -> str:
    text = spell(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _remedy(field: FieldInfo) -> str:
    extra = field.json_schema_extra
    remedy = str(extra["remedy"]) if isinstance(extra, dict) else ""
    if remedy or field.is_required():
        return remedy
    return f"Leave it out for the default, {_short(field.get_default(call_default_factory=True))}."

"""The plan of a run: prompts → samples → batches → optimizer steps, and where its files go."""

import json
from pathlib import Path
from typing import Any

from coati.config.generate import GenerateOptions, native_engine_problem
from coati.config.reward import RewardSettings
from coati.config.run_settings import EvalSettings, RunSettings
from coati.config.sections import PromptSettings, TrainSettings
from coati.errors import counted

_ROUNDED_RATE = 1e-4  # a step is about the learning rate, and weights are about 0.01
_TIMES = "\N{MULTIPLICATION SIGN}"


def plan_lines(config: RunSettings) -> list[str]:
    """Return the plan, one statement per line: what follows from the settings, rather than the settings themselves."""
    return [*_size_lines(config), *_place_lines(config), *(_evaluation(one) for one in config.eval)]


def _size_lines(config: RunSettings) -> list[str]:
    rollout, topology, algorithm, train = config.rollout, config.topology, config.algorithm, config.train
    per_batch = rollout.prompts_per_batch * rollout.samples_per_prompt
    per_step = topology.trainers * train.batch_size
    groups = f", groups of {counted(rollout.samples_per_prompt, 'sample')}" if algorithm.uses_groups else ""
    loss = "" if algorithm.loss == "clip" else f" with loss {algorithm.loss}"
    penalty = f"KL penalty {algorithm.kl_coef:g} in the {algorithm.kl_in}" if algorithm.kl_coef else "no KL penalty"
    staleness = f"samples may be up to {counted(topology.max_staleness, 'weight version')} old"
    if topology.max_staleness < 1:
        staleness = "samples may be any number of weight versions old"
    if topology.max_staleness == 0:
        staleness = "every sample comes from the newest weights (on-policy)"
    per_version = train.update_steps * per_step
    return [
        f"Rollout: {counted(rollout.prompts_per_batch, 'prompt')} {_TIMES} "
        f"{counted(rollout.samples_per_prompt, 'sample')} = {counted(per_batch, 'sample')} per rollout batch, "
        f"at most {counted(rollout.max_new_tokens, 'new token')} each, by the {_engine(config)}.",
        f"Makers: {counted(topology.makers, 'maker')}; {staleness}.",
        f"Algorithm: {algorithm.name}{loss}{groups}; {penalty}.",
        f"Optimizer step: {counted(topology.trainers, 'trainer')} {_TIMES} {counted(train.batch_size, 'sample')} = "
        f"{counted(per_step, 'sample')}, {_pass_size(train)}.",
        f"Per weight version: {counted(train.update_steps, 'fresh batch', 'fresh batches')} {_TIMES} "
        f"{counted(train.epochs, 'epoch')} = {counted(train.update_steps * train.epochs, 'optimizer step')} on "
        f"{counted(per_version, 'fresh sample')}.",
        f"Total: {counted(train.optimizer_steps, 'optimizer step')}, "
        f"{counted(train.total_steps * per_step, 'sample')}, "
        f"{counted(-(-train.total_steps // train.update_steps), 'weight version')}.",
    ]


def _pass_size(train: TrainSettings) -> str:
    limits = [counted(train.micro_batch_size, "sample")] * bool(train.micro_batch_size)
    if train.micro_batch_tokens == "auto":
        limits.append("16,384 tokens (on one GPU up to 32,768, with activation checkpointing if needed)")
    elif train.micro_batch_tokens:
        limits.append(counted(train.micro_batch_tokens, "token"))
    return f"in passes of at most {' and '.join(limits)}" if limits else "in one pass per trainer"


def _engine(config: RunSettings) -> str:
    """Return the engine that will run, as far as the model's files show."""
    model = read_json(Path(config.model.path) / "config.json")
    if config.rollout.engine == "native" and model:
        problem = native_engine_problem(model, GenerateOptions.parse(**config.rollout.generate_options))
        if problem is not None:
            return f"reference engine, because {problem}"
    return f"{config.rollout.engine} engine"


def _place_lines(config: RunSettings) -> list[str]:
    model, train = config.model, config.train
    source = "the actor's body" if model.critic == "actor" else model.critic
    critic = f"critic from {source}" if config.algorithm.uses_critic else "no critic"
    written = ["config.toml", "metrics.jsonl", "samples.jsonl"] + ["spans.jsonl"] * bool(config.logging.spans_kept)
    written += config.logging.tracker_names
    checkpoints = ""
    if train.save_every:
        checkpoints = f"; a checkpoint every {counted(train.save_every, 'version')} in checkpoints/"
        if train.save_every >= train.total_steps // train.update_steps:
            checkpoints += ", so none before the end"
    lines = [
        f"Model: {model.path}{' with LoRA adapters' if config.lora.rank else ''}; "
        f"{f'reference {config.reference_path}' if config.reference_path else 'no reference'}, {critic}.",
        f"Prompts: {config.prompts.path}{_prompts_used(config)}.",
        f"Reward: {_reward(config.reward)}.",
        f"Output: {config.output_folder}/ ({', '.join(written)}; final model in model/{checkpoints}).",
    ]
    keeps_bits = train.mixed_precision or config.lora.rank  # peft keeps adapters in float32
    if model.dtype == "bfloat16" and not keeps_bits and train.actor_lr < _ROUNDED_RATE:
        lines.append(
            f"Rounding: a bfloat16 weight changes by about 1/256 of its value or not at all, and most updates at "
            f"train.actor_lr = {train.actor_lr:g} are smaller. Set train.mixed_precision = true for float32 weights."
        )
    return lines


def _prompts_used(config: RunSettings) -> str:
    """Describe the number of prompts and how often each is used; empty if they would have to be loaded."""
    if (available := _count_prompts(config.prompts)) is None:
        return ""
    train, rollout = config.train, config.rollout
    used = train.total_steps * train.batch_size * config.topology.trainers / rollout.samples_per_prompt
    return f", {counted(available, 'prompt')}, each used {used / available:.3g} times on average"


def _count_prompts(prompts: PromptSettings) -> int | None:
    """Return the number of rows of a JSONL file, or None for another format or an empty or missing file."""
    if not prompts.path.endswith(".jsonl") or not (file := Path(prompts.path)).is_file():
        return None
    with file.open("rb") as lines:
        return sum(1 for line in lines if line.strip()) or None


def _reward(reward: RewardSettings) -> str:
    terms = [f"{term.weight:g} {_TIMES} {term.label}" for term in reward.terms]
    return " + ".join(terms) or reward.function or reward.model


def _evaluation(one: EvalSettings) -> str:
    rollout, available = one.rollout, _count_prompts(one.prompts)
    most = min(filter(None, (one.max_prompts, available)), default=0)
    size = counted(most, "prompt") if available else f"at most {counted(most, 'prompt')}" if most else "all prompts"
    draw = f"temperature {rollout.temperature:g}" if rollout.do_sample else "greedy decoding"
    every = f"every {counted(one.every, 'version')}" if one.every else ""
    times = ["before training"] * one.before + [every] * bool(every) + ["at the end"] * one.at_end
    best = f"; keeps the best model by {one.best_by}" if one.best_by else ""
    patience = f", and stops the run after {counted(one.patience, 'evaluation')} in a row without a better one"
    return (
        f"Evaluation {one.name}: {one.prompts.path}, {size} {_TIMES} {counted(rollout.samples_per_prompt, 'sample')}, "
        f"{draw}, at most {counted(rollout.max_new_tokens, 'new token')}, scored by {_reward(one.reward)}; "
        f"{', '.join(times) or 'never'}{best}{patience * bool(one.patience)}."
    )


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the object in a JSON file, or None if there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None

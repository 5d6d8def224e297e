"""What a run will do, in plain words: prompts → samples → batches → optimizer steps, and where its files go.

The numbers follow from how `fit(total_steps, update_steps, train_epochs)` counts. A step is one fresh batch on every
trainer. An episode is `update_steps` fresh batches, each trained on `epochs` times, then one weight update to makers.
What is left when `update_steps` does not divide `total_steps` is trained as one shorter episode.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from coati.config.generate import GenerateOptions, native_engine_problem
from coati.config.run_settings import RunSettings
from coati.counting import counted

_ROUNDED_RATE = 1e-4  # an optimizer's step is about its rate, and weights are about a hundredth
_TIMES = "\N{MULTIPLICATION SIGN}"


def plan_lines(config: RunSettings) -> list[str]:
    """Return the plan, one sentence a line: what follows from the settings, not what they say themselves.

    Example:
        >>> from coati.config import load_config
        >>> config = load_config(None, ["model.path=m", "prompts.path=p.jsonl", "reward.model=r"])
        >>> print(plan_lines(config)[1])
        Makers: 1 maker; a sample may be 1 weight version behind.
    """
    return [*_size_lines(config), *_place_lines(config)]


def _size_lines(config: RunSettings) -> list[str]:
    rollout, topology, algorithm, train = config.rollout, config.topology, config.algorithm, config.train
    per_batch = rollout.prompts_per_batch * rollout.samples_per_prompt
    per_step = topology.trainers * train.batch_size
    groups = f", in groups of {counted(rollout.samples_per_prompt, 'sample')}" if algorithm.uses_groups else ""
    loss = "" if algorithm.loss == "clip" else f" with the loss {algorithm.loss}"
    penalty = f"KL penalty {algorithm.kl_coef:g} in the {algorithm.kl_in}" if algorithm.kl_coef else "no KL penalty"
    staleness = f"a sample may be {counted(topology.max_staleness, 'weight version')} behind"
    if topology.max_staleness < 1:
        staleness = "samples may be any number of weight versions behind"
    if topology.max_staleness == 0:
        staleness = "every sample comes from the newest weights (on-policy)"
    per_version = train.update_steps * per_step
    return [
        f"Rollout: {counted(rollout.prompts_per_batch, 'prompt')} {_TIMES} "
        f"{counted(rollout.samples_per_prompt, 'sample')} = {counted(per_batch, 'sample')} in a rollout batch, "
        f"at most {counted(rollout.max_new_tokens, 'new token')} each, by the {_engine(config)}.",
        f"Makers: {counted(topology.makers, 'maker')}; {staleness}.",
        f"Algorithm: {algorithm.name}{loss}{groups}; {penalty}.",
        f"Optimizer step: {counted(topology.trainers, 'trainer')} {_TIMES} {counted(train.batch_size, 'sample')} = "
        f"{counted(per_step, 'sample')}, {_pass_size(train.micro_batch_tokens)}.",
        f"Per weight version: {counted(train.update_steps, 'fresh batch', 'fresh batches')} {_TIMES} "
        f"{counted(train.epochs, 'epoch')} = {counted(train.update_steps * train.epochs, 'optimizer step')} on "
        f"{counted(per_version, 'fresh sample')}.",
        f"Total: {counted(train.optimizer_steps, 'optimizer step')}, "
        f"{counted(train.total_steps * per_step, 'sample')}, "
        f"{counted(-(-train.total_steps // train.update_steps), 'weight version')}.",
    ]


def _pass_size(tokens: int | str) -> str:
    if tokens == "auto":
        return "in passes of at most 16,384 tokens, on a GPU up to 32,768 if they fit"
    return f"in passes of at most {counted(int(tokens), 'token')}" if tokens else "each trainer's in one pass"


def _engine(config: RunSettings) -> str:
    """Name the engine that will run, as far as the files of the model tell."""
    model = read_json(Path(config.model.path) / "config.json")
    if config.rollout.engine == "native" and model:
        problem = native_engine_problem(model, GenerateOptions.parse(**config.rollout.generate_options))
        if problem is not None:
            return f"reference engine, because {problem}"
    return f"{config.rollout.engine} engine"


def _place_lines(config: RunSettings) -> list[str]:
    model, train, reward = config.model, config.train, config.reward
    source = "the actor's body" if model.critic == "actor" else model.critic
    critic = f"critic from {source}" if config.algorithm.uses_critic else "no critic"
    terms = [f"{term.weight:g} {_TIMES} {term.label}" for term in reward.terms]
    written = ["config.toml", "metrics.jsonl", "samples.jsonl"] + ["spans.jsonl"] * bool(config.logging.spans_kept)
    written += config.logging.tracker_names
    checkpoints = f"; every {counted(train.save_every, 'version')} in checkpoints/" if train.save_every else ""
    lines = [
        f"Model: {model.path}{' with LoRA adapters' if config.lora.rank else ''}; "
        f"{f'reference {config.reference_path}' if config.reference_path else 'no reference'}, {critic}.",
        f"Reward: {' + '.join(terms) or reward.function or reward.model}.",
        *(f"Evaluation: {one.name}, {counted(one.rollout.samples_per_prompt, 'sample')} each." for one in config.eval),
        f"Output: {config.output_folder}/ ({', '.join(written)}; final model in model/{checkpoints}).",
    ]
    keeps_bits = train.mixed_precision or config.lora.rank  # peft keeps adapters in float32
    if model.dtype == "bfloat16" and not keeps_bits and train.actor_lr < _ROUNDED_RATE:
        lines.append(
            f"Rounding: a bfloat16 weight moves by a 256th of itself or not at all, and most steps of train.actor_lr = "
            f"{train.actor_lr:g} are less. Set train.mixed_precision = true to train with float32 weights."
        )
    return lines


def read_json(path: Path) -> dict[str, Any] | None:
    """Read an object from a JSON file; None where there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None

"""What a run will do, in plain words: prompts → samples → batches → optimizer steps, and where its files go.

The numbers follow from how `fit(total_steps, update_steps, train_epochs)` counts. A step is one fresh batch
on every trainer. An episode is `update_steps` fresh batches, gone over `epochs` times, then one weight update
to the makers. What is left when `update_steps` does not divide `total_steps` is trained as one shorter
episode.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from coati.config.run_settings import RunSettings
from coati.config.training import TopologySettings, TrainSettings
from coati.counting import counted

_ROUNDED_RATE = 1e-4  # an optimizer's step is about its rate, and weights are about a hundredth
_TIMES = "\N{MULTIPLICATION SIGN}"


@dataclass(frozen=True, kw_only=True)
class OutputFiles:
    """Where a run writes what."""

    config: Path
    """The resolved settings."""
    metrics: Path
    samples: Path
    spans: Path | None
    """What every actor did when; None when it is off."""
    tensorboard: Path | None
    """A folder; None when it is off, or the tensorboard package is not installed."""
    model: Path
    """The final policy: a folder that transformers loads."""


def output_files(config: RunSettings) -> OutputFiles:
    """Name every file that the run will write, all under `config.output_folder`."""
    folder = config.output_folder
    has_tensorboard = config.logging.tensorboard and importlib.util.find_spec("tensorboard") is not None
    return OutputFiles(
        config=folder / "config.toml",
        metrics=folder / "metrics.jsonl",
        samples=folder / "samples.jsonl",
        spans=folder / "spans.jsonl" if config.logging.spans_kept else None,
        tensorboard=folder / "tensorboard" if has_tensorboard else None,
        model=folder / "model",
    )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The sizes of a run, worked out. `lines()` says them in words."""

    config: RunSettings
    samples_per_rollout_batch: int
    samples_per_optimizer_step: int
    """Over all trainers."""
    micro_batches_per_step: int
    """Forward and backward passes per optimizer step, on each trainer."""
    samples_per_version: int
    """Fresh samples that a full episode consumes, over all trainers."""
    optimizer_steps_per_version: int
    full_episodes: int
    remainder_steps: int
    """Fresh batches of the shorter last episode; 0 = none."""
    num_versions: int
    """Weight versions that the trainers publish after the initial one."""
    total_optimizer_steps: int
    total_samples: int
    """Fresh samples of the whole run; further epochs go over the same ones."""
    rollout_batches: int
    """Rollout batches, over all makers, that cover `total_samples`."""
    surplus_samples: int
    """Samples of the last rollout batch that nobody needs."""

    def lines(self) -> list[str]:
        """Return the plan, one sentence a line."""
        return [
            *self._rollout_lines(),
            self._algorithm_line(),
            *self._train_lines(),
            *self._total_lines(),
            *self._place_lines(),
            *self._rounding_lines(),
        ]

    def render(self) -> str:
        """Return the plan as one text."""
        return "\n".join([f"Plan of run {self.config.run.name!r}", *(f"  {line}" for line in self.lines())])

    def _rollout_lines(self) -> list[str]:
        rollout, topology = self.config.rollout, self.config.topology
        return [
            f"Rollout: {counted(rollout.prompts_per_batch, 'prompt')} {_TIMES} "
            f"{counted(rollout.samples_per_prompt, 'sample')} = "
            f"{counted(self.samples_per_rollout_batch, 'sample')} in a rollout batch, "
            f"at most {counted(rollout.max_new_tokens, 'new token')} each, by the {rollout.engine} engine.",
            f"Makers: {counted(topology.makers, 'maker')} {'works' if topology.makers == 1 else 'work'} on "
            f"rollout batches{_parts(topology)}; {_staleness(topology)}"
            f"{', and weights change between two tokens' if rollout.in_flight else ''}.",
        ]

    def _algorithm_line(self) -> str:
        algorithm = self.config.algorithm
        groups = ""
        if algorithm.uses_groups:
            groups = f", in groups of {counted(self.config.rollout.samples_per_prompt, 'sample')}"
        penalty = f"KL penalty {algorithm.kl_coef:g} in the {algorithm.kl_in}" if algorithm.kl_coef else "no KL penalty"
        sampling = ", dynamic sampling" if algorithm.dynamic_sampling else ""
        return f"Algorithm: {algorithm.name}{groups}; {penalty}{sampling}."

    def _train_lines(self) -> list[str]:
        train, topology = self.config.train, self.config.topology
        return [
            f"Optimizer step: {counted(topology.trainers, 'trainer')} {_TIMES} "
            f"{counted(train.batch_size, 'sample')} = "
            f"{counted(self.samples_per_optimizer_step, 'sample')}, on each trainer in "
            f"{self._passes()}{_strategy(train)}{_sharing(topology)}{_blocks(train)}.",
            f"Per weight version: {counted(train.update_steps, 'fresh batch', 'fresh batches')} {_TIMES} "
            f"{counted(train.epochs, 'epoch')} = "
            f"{counted(self.optimizer_steps_per_version, 'optimizer step')} on "
            f"{counted(self.samples_per_version, 'fresh sample')}.",
        ]

    def _passes(self) -> str:
        """How a trainer's samples are cut; by tokens it is the samples' lengths that say into how many."""
        train = self.config.train
        samples = counted(train.micro_batch_size or train.batch_size, "sample")
        if not train.micro_batch_tokens:
            return f"{counted(self.micro_batches_per_step, 'pass', 'passes')} of at most {samples}"
        tokens = counted(train.micro_batch_tokens, "token")
        return f"passes of at most {tokens}" + (f" and {samples}" if train.micro_batch_size else "")

    def _total_lines(self) -> list[str]:
        lines = [
            f"Total: {counted(self.total_optimizer_steps, 'optimizer step')}, "
            f"{counted(self.total_samples, 'sample')}, {counted(self.num_versions, 'weight version')}, "
            f"{counted(self.rollout_batches, 'rollout batch', 'rollout batches')}.",
        ]
        if self.remainder_steps:
            train = self.config.train
            lines.append(
                f"Remainder: {train.update_steps} does not divide {train.total_steps}, so the last episode "
                "has "
                f"{counted(self.remainder_steps, 'fresh batch', 'fresh batches')} "
                f"({counted(self.remainder_steps * train.epochs, 'optimizer step')})."
            )
        if self.surplus_samples:
            lines.append(
                f"Surplus: the last rollout batch holds {counted(self.surplus_samples, 'sample')} more than "
                "the "
                "run trains on."
            )
        return lines

    def _place_lines(self) -> list[str]:
        config, files = self.config, output_files(self.config)
        names = [
            files.config,
            files.metrics,
            files.samples,
            *([files.spans] if files.spans else []),
            *([files.tensorboard] if files.tensorboard else []),
        ]
        adapters = f" with LoRA adapters of rank {config.lora.rank}" if config.lora.rank else ""
        source = "the actor's body" if config.model.critic == "actor" else config.model.critic
        critic = f"critic from {source}" if config.algorithm.uses_critic else "no critic"
        return [
            f"Model: {config.model.path}{adapters}, in {config.model.dtype}"
            f"{', trained with float32 weights,' if config.train.mixed_precision else ''} on {config.model.device}; "
            f"reference {config.reference_path}, {critic}.",
            f"Prompts: column {config.prompts.column!r} of {config.prompts.path}.",
            f"Reward: {_reward(config)}.",
            f"Output: {config.output_folder}/ ({', '.join(path.name for path in names)}; final model in "
            f"{files.model.name}/{_checkpoints(config.train)}).",
        ]

    def _rounding_lines(self) -> list[str]:
        """A warning where most of what is learnt would be rounded away."""
        config = self.config
        keeps_bits = config.train.mixed_precision or config.lora.rank  # peft keeps adapters in float32
        if config.model.dtype != "bfloat16" or keeps_bits or config.train.actor_lr >= _ROUNDED_RATE:
            return []
        return [
            f"Rounding: a bfloat16 weight moves by a 256th of itself or not at all, and most steps of train.actor_lr = "
            f"{config.train.actor_lr:g} are less. Set train.mixed_precision = true to train with float32 weights."
        ]


def _parts(topology: TopologySettings) -> str:
    place = {"auto": "", "pack": ", on as few nodes as possible", "spread": ", spread over the nodes"}
    return place[topology.placement]


def _sharing(topology: TopologySettings) -> str:
    if topology.gpu_sharing == "slices":
        return ""
    return f", on {topology.gpus_per_trainer:.0%} of a card's processors (MPS)"


def _blocks(train: TrainSettings) -> str:
    made_anew = ", activations made anew" if train.activation_checkpointing else ""
    return f"{', compiled' if train.compile else ''}{made_anew}"


def _checkpoints(train: TrainSettings) -> str:
    if not train.save_every:
        return ""
    every = "every version" if train.save_every == 1 else f"every {train.save_every} versions"
    return f", {every} in checkpoints/version-N/"


def _strategy(train: TrainSettings) -> str:
    if train.strategy == "ddp":
        return ""
    place = {"static": "", "auto": ", in host memory if need be", "cpu": ", in host memory"}[train.placement_policy]
    if train.cpu_offload:
        place = ", in host memory" if train.strategy == "zero2" else ", optimizer state in host memory"
    return f", sharded as {train.strategy}{place}"


def make_plan(config: RunSettings) -> Plan:
    """Work out the sizes of a run.

    Example:
        >>> from coati.config import load_config
        >>> config = load_config(None, ["model.path=m", "prompts.path=p.jsonl", "reward.model=r"])
        >>> print(make_plan(config).lines()[1])
        Makers: 1 maker works on rollout batches; a sample may be 1 weight version behind.
    """
    rollout, train, topology = config.rollout, config.train, config.topology
    samples_per_rollout_batch = rollout.prompts_per_batch * rollout.samples_per_prompt
    samples_per_optimizer_step = topology.trainers * train.batch_size
    full_episodes, remainder_steps = divmod(train.total_steps, train.update_steps)
    total_samples = train.total_steps * samples_per_optimizer_step
    rollout_batches = -(-total_samples // samples_per_rollout_batch)
    return Plan(
        config=config,
        samples_per_rollout_batch=samples_per_rollout_batch,
        samples_per_optimizer_step=samples_per_optimizer_step,
        micro_batches_per_step=-(-train.batch_size // (train.micro_batch_size or train.batch_size)),
        samples_per_version=train.update_steps * samples_per_optimizer_step,
        optimizer_steps_per_version=train.update_steps * train.epochs,
        full_episodes=full_episodes,
        remainder_steps=remainder_steps,
        num_versions=full_episodes + (1 if remainder_steps else 0),
        total_optimizer_steps=train.total_steps * train.epochs,
        total_samples=total_samples,
        rollout_batches=rollout_batches,
        surplus_samples=rollout_batches * samples_per_rollout_batch - total_samples,
    )


def _staleness(topology: TopologySettings) -> str:
    versions = topology.max_staleness
    if versions < 0:
        return "samples may be any number of weight versions behind"
    if versions == 0:
        return "every sample comes from the newest weights (on-policy)"
    return f"a sample may be {counted(versions, 'weight version')} behind"


def _reward(config: RunSettings) -> str:
    reward = config.reward
    if reward.terms:
        parts = (f"{term.weight:g} {_TIMES} {term.label} ({term.function or term.model})" for term in reward.terms)
        return "the sum of " + ", ".join(parts)
    if reward.function:
        return f"function {reward.function}"
    return f"model {reward.model}"

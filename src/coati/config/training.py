"""The sections that say how it is trained: steps, topology, LoRA, deadlines and logging.

Rules between keys of one section live in that section; rules between sections live in `coati.config.run_settings`.
"""

from __future__ import annotations

from typing import Literal

from coati.config.section import Section, setting


class TrainSettings(Section):
    """`[train]`: how trainers learn. A step is one batch of fresh samples on every trainer."""

    total_steps: int = setting(100, "Fresh batches that each trainer learns from in the run.", ge=1)
    update_steps: int = setting(1, "Fresh batches between two weight updates to the makers.", ge=1)
    epochs: int = setting(1, "Passes over the fresh batches of an update.", ge=1)
    batch_size: int = setting(16, "Samples per optimizer step and trainer.", ge=1)
    micro_batch_size: int = setting(
        0, "Samples per forward and backward pass; 0 = the whole batch. Smaller needs less memory, same result.", ge=0
    )
    micro_batch_tokens: int = setting(
        16384,
        "Tokens per forward and backward pass, padding not counted where the model takes rows without it; 0 = no "
        "limit. Smaller needs less memory, same result.",
        ge=0,
    )
    actor_lr: float = setting(1e-6, "Learning rate of the policy.", gt=0)
    critic_lr: float = setting(1e-5, "Learning rate of the critic.", gt=0)
    lr_schedule: Literal["constant", "linear", "cosine"] = setting("constant", "Learning rate after the warm-up.")
    warmup_steps: int = setting(0, "Optimizer steps over which the learning rate rises from 0.", ge=0)
    max_grad_norm: float = setting(1.0, "Gradients are scaled down to this norm; 0 = measured only.", ge=0)
    strategy: Literal["ddp", "zero1", "zero2", "gemini"] = setting(
        "ddp",
        "What each trainer holds. ddp: everything. zero1: its share of everything at rest, weights and gradients whole "
        "during a step. zero2: weights whole from forward to backward, gradients never. gemini: a block whole only "
        "while it computes. The weights after a step are the same.",
    )
    placement_policy: Literal["static", "auto", "cpu"] = setting(
        "static", "gemini: shares rest on the device, in host memory (cpu), or on the device if they fit (auto)."
    )
    cpu_offload: bool = setting(
        False, "zero1, zero2: shares and optimizer state rest in host memory, and optimizer steps are made there."
    )
    mixed_precision: bool = setting(
        False, "Trainers keep weights, gradients and optimizer state in float32 and compute in bfloat16."
    )
    activation_checkpointing: bool = setting(
        False,
        "Keep the inputs of each block only and compute the rest again in the backward pass: less memory, a third more "
        "work.",
    )
    compile: bool = setting(
        False,
        "Compile the blocks of models that train, and in makers of those that score, with torch.compile: quicker steps "
        "on a GPU, after a minute of compiling.",
    )
    save_every: int = setting(
        0,
        "Save the model every so many weight versions, in checkpoints/version-N of the output folder; 0 = only at the "
        "end.",
        ge=0,
    )

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of the run."""
        return self.total_steps * self.epochs

    def problems(self) -> list[str]:
        """Find counts that are larger than what they are part of."""
        found = []
        if self.update_steps > self.total_steps:
            found.append(
                f"train.update_steps must be at most train.total_steps ({self.total_steps}), "
                f"got {self.update_steps}. Lower it, or raise train.total_steps."
            )
        if self.warmup_steps > self.optimizer_steps:
            found.append(
                f"train.warmup_steps must be at most the optimizer steps of the run (train.total_steps times "
                f"train.epochs = {self.optimizer_steps}), got {self.warmup_steps}. Lower it."
            )
        return found + self._strategy_problems()

    def _strategy_problems(self) -> list[str]:
        """Placements that the strategy does not know."""
        found = []
        if self.placement_policy != "static" and self.strategy != "gemini":
            found.append(
                f'train.placement_policy must be "static" while train.strategy is "{self.strategy}", got '
                f'"{self.placement_policy}". Leave it out, or set train.strategy to "gemini".'
            )
        if self.cpu_offload and self.strategy not in ("zero1", "zero2"):
            remedy = (
                'set train.placement_policy to "cpu"' if self.strategy == "gemini" else 'set train.strategy to "zero2"'
            )
            found.append(
                f'train.cpu_offload must be false while train.strategy is "{self.strategy}", got true. '
                f"Leave it out, or {remedy}."
            )
        return found


class TopologySettings(Section):
    """`[topology]`: how many makers and trainers, and how far apart they may run."""

    makers: int = setting(
        1, "Experience makers, when the run begins; `coati scale` changes it while it trains.", ge=1, le=64
    )
    trainers: int = setting(1, "Trainers; they share every optimizer step.", ge=1, le=64)
    placement: Literal["auto", "pack", "spread"] = setting(
        "auto",
        "Where on a cluster they run: auto = Ray places each for itself, pack = on as few nodes as possible, a maker's "
        "and a trainer's shares of a GPU on one card, spread = over the nodes. Both reserve all places first.",
    )
    buffer_limit: int = setting(0, "Batches that may wait at a trainer; 0 = no limit.", ge=0)
    max_staleness: int = setting(
        1, "Weight versions that a sample may be behind when it is trained on; 0 = on-policy, -1 = unbounded.", ge=-1
    )
    threads_per_actor: int = setting(
        0, "torch threads in each actor; 0 = the machine's cores divided among the actors.", ge=0
    )
    gpus_per_maker: float = setting(
        0.0, "GPUs (or a share of one) for each maker.", rule="0, a share below 1, or a whole number", ge=0
    )
    gpus_per_trainer: float = setting(
        0.0, "GPUs (or a share of one) for each trainer.", rule="0, a share below 1, or a whole number", ge=0
    )
    gpu_sharing: Literal["slices", "mps"] = setting(
        "slices",
        "How a maker and a trainer share a card: slices = each has all of it for moments, which the driver does by "
        "itself; mps = side by side through NVIDIA's MPS, training on as much of the card as gpus_per_trainer says.",
    )
    update_lora_weights: bool = setting(False, "Send only the LoRA adapters to the makers.")
    verify_updates: Literal["checksum", "canary", "off"] = setting(
        "checksum",
        "How makers check new weights beyond names, shapes, dtypes and counts: checksum = every byte, before they "
        "serve; canary = that, and afterwards the log-probs of a fixed prompt against the trainer's; off = not at all.",
    )
    chunk_mib: float = setting(
        64.0,
        "Weights travel in chunks of at most so many MiB; a single tensor that is larger is its own chunk. Between "
        "actors on one GPU, where they do not travel, chunks have a GiB or more.",
        gt=0,
    )

    def problems(self) -> list[str]:
        """Find shares of GPUs that Ray cannot lend, like one and a half."""
        return self._sharing_problems() + [
            f"topology.{key} must be 0, a share below 1, or a whole number, got {share}. "
            f"Use {int(share)} or {int(share) + 1}."
            for key, share in (("gpus_per_maker", self.gpus_per_maker), ("gpus_per_trainer", self.gpus_per_trainer))
            if share > 1 and not share.is_integer()
        ]

    def _sharing_problems(self) -> list[str]:
        if self.gpu_sharing == "slices":
            return []
        found = []
        if not (self.gpus_per_maker > 0 < self.gpus_per_trainer and self.gpus_per_maker + self.gpus_per_trainer <= 1):
            found.append(
                "topology.gpus_per_maker and topology.gpus_per_trainer must be above 0, and at most 1 together, while "
                f'topology.gpu_sharing is "mps", got {self.gpus_per_maker:g} and {self.gpus_per_trainer:g}. Set both '
                'to 0.5, or gpu_sharing to "slices".'
            )
        if self.placement == "spread":
            found.append(
                'topology.placement must not be "spread" while topology.gpu_sharing is "mps", got "spread". Use '
                '"pack", which puts a maker and a trainer on one card, or set gpu_sharing to "slices".'
            )
        return found


class Deadlines(Section):
    """`[deadlines]`: the longest waits. A wait that runs past its deadline is an error that says what it waited for."""

    start_seconds: float = setting(300.0, "For all actors to start, and for a maker's first full weight update.", gt=0)
    batch_seconds: float = setting(
        1800.0, "For a batch, for room in a buffer, or for new weights, counted from the last sign of progress.", gt=0
    )
    update_seconds: float = setting(600.0, "For one weight update.", gt=0)
    grace_seconds: float = setting(
        5.0, "How long all makers must have finished before the last, partial batch is trained on.", gt=0
    )
    message_seconds: float = setting(30.0, "Log what is waited for every so many seconds.", gt=0)


class LoggingSettings(Section):
    """`[logging]`: what is written besides metrics.jsonl."""

    tensorboard: bool = setting(True, "Write TensorBoard files too.")
    samples_every_versions: int = setting(1, "Write samples every so many weight versions; 0 = never.", ge=0)
    samples_kept: int = setting(4, "Samples written each time.", ge=0)
    spans_kept: int = setting(
        200_000,
        "Spans of the actors' time (generate, train, wait for data, …) written to spans.jsonl for coati report, about "
        "110 bytes each; 0 = none.",
        ge=0,
    )

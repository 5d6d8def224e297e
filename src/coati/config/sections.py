"""The sections of a run's settings, but for `[algorithm]`, with the rules between keys of one section."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import PlainValidator, Strict

from coati.config.generate import GenerateOptions, SamplingSettings
from coati.config.section import SECRET_NAME, Section, secrets_in, setting
from coati.errors import GenerateOptionError

# Options of `generate` that a setting of another name decides.
_OWNERS = {"max_length": "max_new_tokens", "num_return_sequences": "samples_per_prompt"}

Texts = Annotated[tuple[str, ...], Strict(False)]  # a list in TOML


class GeneralSettings(Section, section="run"):
    """`[run]`: what the run is called, its seed and where its files go."""

    name: str = setting(
        "run",
        "Name of the run; left out, the stem of the TOML file.",
        rule="a text of letters, digits, '.', '_' and '-' that starts with a letter or digit",
        remedy='Set run.name, for example run.name = "film-1".',
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
    )
    seed: int = setting(0, "Every random draw of the run is keyed on it.", ge=0, lt=2**63)
    output: str = setting("", "Folder for everything the run writes; empty = runs/<name>.")


class ModelSettings(Section, section="model"):
    """`[model]`: the policy, and the models that go with it."""

    path: str = setting(
        ...,
        "The policy to train: a folder that transformers can load, or a hub name.",
        remedy='Set model.path, for example model.path = "runs/demo/model".',
        min_length=1,
    )
    critic: str = setting(
        "actor", 'Where the critic starts: "actor" for the actor\'s body, or a path or hub name.', min_length=1
    )
    reference: str = setting(
        "",
        "The frozen model that the KL is measured against, a path or hub name; empty = model.path if there is a KL "
        "penalty.",
    )
    tokenizer: str = setting("", "Path or hub name that the tokenizer is loaded from; empty = model.path.")
    dtype: Literal["float32", "bfloat16"] = setting("float32", "Number format of the weights.")
    device: Literal["auto", "cpu", "cuda"] = setting(
        "auto", "Where models live; auto = a GPU where an actor was given one."
    )
    trust_remote_code: bool = setting(
        False, "Run Python code that comes with models and tokenizers. It can do anything that you can: read it first."
    )


class LoRASettings(Section, section="lora"):
    """`[lora]`: train low-rank adapters, W = W₀ + (alpha / rank) · B·A with W₀ frozen, instead of all weights."""

    rank: int = setting(0, "Rank of the adapters; 0 = off.", ge=0)
    alpha: float = setting(16.0, "Adapters are scaled by alpha / rank.", gt=0)
    target_modules: Texts = setting(
        (), "Names of the layers that get adapters; empty = all linear layers but the output head."
    )

    def _conflicts(self) -> Iterator[tuple[str, str, Any, str]]:
        if self.target_modules and not self.rank:
            remedy = "Set lora.rank, for example to 8."
            yield "target_modules", "empty while lora.rank is 0", self.target_modules, remedy


class PromptSettings(Section, section="prompts"):
    """`[prompts]`: where prompts come from."""

    path: str = setting(
        ...,
        "A .jsonl, .json, .csv or .parquet file, a `datasets` folder, or a `datasets` name.",
        remedy='Set prompts.path, for example prompts.path = "prompts.jsonl".',
        min_length=1,
    )
    split: str = setting("train", "Split of a `datasets` folder or name; a single file has one.", min_length=1)
    subset: str = setting("", "Subset (configuration) of a `datasets` name that has several.")
    column: str = setting(
        "prompt",
        "Column with the prompt: a text, or a list of chat messages. Other columns reach the reward.",
        min_length=1,
    )
    shuffle: bool = setting(True, "Shuffle the prompts for every pass.")
    curriculum: str = setting(
        "", 'A column of numbers that every pass is ordered by, from small to large, or back ("-column"); empty = off.'
    )
    max_tokens: int = setting(
        0, "Skip (and count) prompts of more tokens than this; 0 = whatever fits the model's context.", ge=0
    )


class RolloutSettings(SamplingSettings, section="rollout"):
    """`[rollout]`: how makers generate."""

    prompts_per_batch: int = setting(16, "Prompts that a maker takes at a time.", ge=1)
    samples_per_prompt: int = setting(1, "Responses sampled for each prompt.", ge=1)
    max_new_tokens: int = setting(128, "Longest response, in tokens.", ge=1)
    engine: Literal["native", "reference", "vllm"] = setting(
        "native", "native = our own, where it knows model and options; reference = transformers' models; vllm = vLLM."
    )
    vllm: dict[str, Any] = setting({}, "Arguments of vLLM's EngineArgs.", rule="a table of arguments")
    in_flight: bool = setting(
        True,
        "Take new weights between two tokens; every token records its version. false = each response is written by one "
        "version: new weights wait until all that is being written has ended, and nothing is begun meanwhile.",
    )
    batch_invariant: bool = setting(
        False,
        "On a GPU, give each sample the same bits regardless of what is generated and scored beside it; slower "
        "(performance.md). CPUs always do.",
    )
    generate: dict[str, Any] = setting(
        {},
        "Further options of transformers' generate, as a table.",
        rule="a table of options that have no setting of their own",
        remedy='For example rollout.generate = { stop_strings = ["."] }.',
    )

    @property
    def generate_options(self) -> dict[str, Any]:
        """All options of `generate`: those with a setting of their own, and the table."""
        own = {*SamplingSettings.model_fields, "max_new_tokens"}
        return {**self.model_dump(include=own), **self.generate}

    def _conflicts(self) -> Iterator[tuple[str, str, Any, str]]:
        yield from super()._conflicts()
        if self.batch_invariant and self.engine != "native":
            remedy = 'Leave it out, or set rollout.engine = "native".'
            yield "batch_invariant", f'false while rollout.engine is "{self.engine}"', True, remedy
        for option, value in self.generate.items():
            owner = _OWNERS.get(option, option)
            if owner in type(self).model_fields or value is None:
                decided = f", because rollout.{owner} decides it" if value is not None else ""
                yield f"generate.{option}", f"left out{decided}", value, "Take it out of rollout.generate."
                continue
            try:
                GenerateOptions.parse(**{option: value})
            except GenerateOptionError as error:
                yield f"generate.{option}", "a supported option of generate", value, str(error)


def _check_tokens(tokens: Any) -> Any:
    if tokens != "auto" and (type(tokens) is not int or tokens < 0):
        raise ValueError
    return tokens


PassTokens = Annotated[int | Literal["auto"], PlainValidator(_check_tokens)]


class TrainSettings(Section, section="train"):
    """`[train]`: how trainers learn. A step is one batch of fresh samples on every trainer."""

    total_steps: int = setting(100, "Fresh batches that each trainer learns from in the run.", ge=1)
    update_steps: int = setting(1, "Fresh batches between two weight updates to the makers.", ge=1)
    epochs: int = setting(1, "Passes over the fresh batches of an update.", ge=1)
    batch_size: int = setting(16, "Samples per optimizer step and trainer.", ge=1)
    micro_batch_size: int = setting(
        0, "Samples per forward and backward pass; 0 = the whole batch. Smaller needs less memory, same result.", ge=0
    )
    micro_batch_tokens: PassTokens = setting(
        "auto",
        "Tokens per forward and backward pass, padding not counted where the model takes rows without it; 0 = no "
        "limit. Smaller needs less memory, same result. auto: on one GPU as many as fit, up to 32768, with "
        "activation_checkpointing if a single sample does not; else 16384.",
        rule='"auto" or a whole number, 0 or more',
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
    cpu_offload: bool = setting(
        False, "zero1, zero2, gemini: shares and optimizer state rest in host memory; optimizer steps are made there."
    )
    mixed_precision: bool = setting(
        False, "Trainers keep weights, gradients and optimizer state in float32 and compute in bfloat16."
    )
    activation_checkpointing: bool = setting(
        False, "Compute the inside of each block again in the backward pass: less memory, a third more work."
    )
    compile: bool = setting(
        False,
        "Compile the blocks of models that train, and in makers of those that score, with torch.compile: quicker steps "
        "on a GPU, after a minute of compiling.",
    )
    save_every: int = setting(
        100,
        "Save a checkpoint every so many weight versions, in checkpoints/version-N of the output folder; 0 = only when "
        "the run is stopped. `coati train --resume`, and trainers that are started again, continue from it.",
        ge=0,
    )
    checkpoints_kept: int = setting(2, "Checkpoints that are kept; older ones are deleted.", ge=1)

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of the run."""
        return self.total_steps * self.epochs

    def _conflicts(self) -> Iterator[tuple[str, str, Any, str]]:
        if self.update_steps > self.total_steps:
            rule = f"at most train.total_steps ({self.total_steps})"
            yield "update_steps", rule, self.update_steps, "Lower it, or raise train.total_steps."
        if self.warmup_steps > self.optimizer_steps:
            rule = f"at most the optimizer steps of the run (total_steps × epochs = {self.optimizer_steps})"
            yield "warmup_steps", rule, self.warmup_steps, "Lower it."
        if self.cpu_offload and self.strategy == "ddp":
            remedy = 'Leave it out, or set train.strategy to "zero2".'
            yield "cpu_offload", 'false while train.strategy is "ddp"', True, remedy


class TopologySettings(Section, section="topology"):
    """`[topology]`: how many makers and trainers, and how far apart they may run."""

    makers: int = setting(
        1, "Experience makers, when the run begins; `coati scale` changes it while it trains.", ge=1, le=64
    )
    trainers: int = setting(1, "Trainers; they share every optimizer step.", ge=1, le=64)
    placement: Literal["auto", "spread"] = setting(
        "auto", "Where on a cluster they run: auto = as Ray does by default, on few nodes; spread = over the nodes."
    )
    lead: int = setting(
        1,
        "Versions' worth of samples that makers may be ahead: how fresh data usually is. max_staleness limits it too.",
        ge=0,
    )
    max_staleness: int = setting(
        1,
        "Weight versions that any sample may be behind when it is trained on: what is safe; 0 = on-policy, "
        "-1 = unbounded.",
        ge=-1,
    )
    max_restarts: int = setting(
        10, "Restarts of makers and trainers that died, within an hour, before the run ends with an error.", ge=0
    )
    threads_per_actor: int = setting(
        0, "torch threads in each actor; 0 = the machine's cores divided among the actors.", ge=0
    )
    gpus_per_maker: float = setting(0.0, "GPUs (or a share of one, below 1) for each maker.", ge=0)
    gpus_per_trainer: float = setting(0.0, "GPUs (or a share of one, below 1) for each trainer.", ge=0)
    environment: Texts = setting(
        (),
        "Names of further environment variables that actors get from your shell, such as the key of a service that a "
        "reward asks. Only without --address; on a cluster they come from `ray start`.",
    )
    allow_open_cluster: bool = setting(
        False, "Join a Ray cluster (--address) that has no token authentication: anyone who reaches it can run code."
    )
    update_lora_weights: bool = setting(False, "Send only the LoRA adapters to the makers.")
    chunk_mib: float = setting(
        64.0,
        "Weights travel in chunks of at most so many MiB; a single tensor that is larger is its own chunk. Between "
        "actors on one GPU, where they do not travel, chunks have a GiB or more.",
        gt=0,
    )

    def _conflicts(self) -> Iterator[tuple[str, str, Any, str]]:
        for key in ("gpus_per_maker", "gpus_per_trainer"):
            if (share := getattr(self, key)) > 1 and not share.is_integer():
                yield key, "0, a share below 1, or a whole number", share, "Leave it out for the default, 0.0."


class Deadlines(Section, section="deadlines"):
    """`[deadlines]`: the longest waits. A wait that runs past its deadline is an error that says what it waited for."""

    start_seconds: float = setting(300.0, "For all actors to start, and for a maker's first full weight update.", gt=0)
    batch_seconds: float = setting(
        1800.0, "For a batch, for room in a buffer, or for new weights, counted from the last sign of progress.", gt=0
    )
    update_seconds: float = setting(600.0, "For one weight update.", gt=0)
    stall_seconds: float = setting(
        30.0, "A maker that does not answer for so long loses its work; what it delivers later is refused.", gt=0
    )
    grace_seconds: float = setting(
        5.0, "How long all makers must have finished before the last, partial batch is trained on.", gt=0
    )


class LoggingSettings(Section, section="logging"):
    """`[logging]`: what is written besides metrics.jsonl, and where it is sent."""

    tensorboard: bool = setting(True, "Write TensorBoard files too, if the tensorboard package is installed.")
    trackers: dict[Literal["wandb", "mlflow", "trackio", "swanlab"], dict[str, Any]] = setting(
        {},
        "Where metrics and samples are sent: wandb, mlflow, trackio, swanlab, each with its options (metrics.md).",
        rule="a table for each tracker, such as [logging.trackers.wandb]",
        remedy="TensorBoard is no such table: logging.tensorboard = true writes its files.",
    )
    samples_kept: int = setting(4, "Samples of each weight version written to samples.jsonl; 0 = none.", ge=0)
    spans_kept: int = setting(
        200_000, "Spans of the actors' time written to spans.jsonl for coati report, 110 bytes each; 0 = none.", ge=0
    )

    @property
    def writes_tensorboard(self) -> bool:
        """Whether TensorBoard files are asked for and can be written."""
        return self.tensorboard and importlib.util.find_spec("tensorboard") is not None

    @property
    def tracker_names(self) -> list[str]:
        """The trackers that a run is sent to."""
        return [*["tensorboard"] * self.writes_tensorboard, *self.trackers]

    def _conflicts(self) -> Iterator[tuple[str, str, Any, str]]:
        for key in secrets_in(self.trackers, "trackers", f"{SECRET_NAME}|(^|_)(key|token)$"):
            remedy = "Set the environment variable that the package reads, such as WANDB_API_KEY."
            yield key, "left out, because it holds a secret", "one", remedy

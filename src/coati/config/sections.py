"""The sections of a run's settings except `[algorithm]` and `[reward]`, with the rules between keys of a section."""

import importlib.util
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import PlainValidator, Strict

from coati.config.generate import GenerateOptions, SamplingSettings
from coati.config.section import SECRET_NAME, Section, secrets_in, setting
from coati.errors import GenerateOptionError

# Options of `generate` that correspond to a setting of another name.
_OWNERS = {"max_length": "max_new_tokens", "num_return_sequences": "samples_per_prompt"}

Texts = Annotated[tuple[str, ...], Strict(False)]  # a list in TOML


class GeneralSettings(Section, section="run"):
    """`[run]`: name, seed and output folder of the run."""

    name: str = setting(
        "run",
        "Name of the run; if unset, the name of the TOML file without its extension.",
        rule="a string of letters, digits, '.', '_' and '-' that starts with a letter or digit",
        remedy='Set run.name, for example run.name = "film-1".',
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
    )
    seed: int = setting(0, "Seed of all random draws of the run.", ge=0, lt=2**63)
    output: str = setting("", "Folder for everything the run writes; empty = runs/<name>.")


class ModelSettings(Section, section="model"):
    """`[model]`: the policy, and the critic, reference and tokenizer that go with it."""

    path: str = setting(
        ...,
        "The policy to train: a folder that transformers can load, or a hub name.",
        remedy='Set model.path, for example model.path = "runs/demo/model".',
        min_length=1,
    )
    critic: str = setting("actor", 'Initial critic: "actor" = body of the policy, or a path or hub name.', min_length=1)
    reference: str = setting(
        "", "Frozen model that the KL is measured against, a path or hub name; empty = model.path with a KL penalty."
    )
    tokenizer: str = setting("", "Path or hub name of the tokenizer; empty = model.path.")
    dtype: Literal["float32", "bfloat16"] = setting("float32", "Data type of the weights.")
    device: Literal["auto", "cpu", "cuda"] = setting(
        "auto", "Device of the models; auto = a GPU for every actor that has one, else the CPU."
    )
    trust_remote_code: bool = setting(
        False, "Run Python code shipped with models and tokenizers. It runs with your permissions: read it first."
    )


class LoRASettings(Section, section="lora"):
    """`[lora]`: train low-rank adapters, W = W₀ + (alpha / rank) · B·A with W₀ frozen, instead of all weights."""

    rank: int = setting(0, "Rank of the adapters; 0 = off.", ge=0)
    alpha: float = setting(16.0, "Adapters are scaled by alpha / rank.", gt=0)
    target_modules: Texts = setting((), "Names of adapted layers; empty = all linear layers except the output head.")

    def _conflicts(self) -> Iterator[tuple[str, str, Any, str]]:
        if self.target_modules and not self.rank:
            remedy = "Set lora.rank, for example to 8."
            yield "target_modules", "empty while lora.rank is 0", self.target_modules, remedy


class PromptSettings(Section, section="prompts"):
    """`[prompts]`: the dataset of prompts."""

    path: str = setting(
        ...,
        "A .jsonl, .json, .csv or .parquet file, a `datasets` folder, or the hub name of a dataset.",
        remedy='Set prompts.path, for example prompts.path = "prompts.jsonl", or pass prompts= in Python.',
        min_length=1,
    )
    split: str = setting("train", "Split of a `datasets` folder or hub dataset; a file has only one.", min_length=1)
    subset: str = setting("", "Subset (configuration) of a hub dataset that has several.")
    column: str = setting(
        "prompt",
        "Column with the prompt: a string or a list of chat messages. Other columns are passed to the reward.",
        min_length=1,
    )
    shuffle: bool = setting(True, "Shuffle the prompts in every pass over them.")
    curriculum: str = setting(
        "", 'Numeric column to sort every pass by, ascending, or descending with a minus ("-column"); empty = off.'
    )
    max_tokens: int = setting(0, "Skip (and count) prompts with more tokens; 0 = the model's context length.", ge=0)


class RolloutSettings(SamplingSettings, section="rollout"):
    """`[rollout]`: how makers generate responses."""

    prompts_per_batch: int = setting(16, "Number of prompts in a rollout batch of a maker.", ge=1)
    samples_per_prompt: int = setting(1, "Number of responses sampled per prompt.", ge=1)
    max_new_tokens: int = setting(128, "Maximum length of a response, in tokens.", ge=1)
    engine: Literal["native", "reference", "vllm"] = setting(
        "native",
        "native = coati's own (reference if it does not support the model); reference = transformers; vllm = vLLM.",
    )
    vllm: dict[str, Any] = setting({}, "Arguments of vLLM's EngineArgs.", rule="a table of arguments")
    in_flight: bool = setting(
        True,
        "Load new weights between two tokens; every token records its version. false = one version generates each "
        "response: new weights wait until all responses in flight are complete, and none are started meanwhile.",
    )
    batch_invariant: bool = setting(
        False,
        "On a GPU, give each sample the same bits regardless of what is generated and scored beside it; slower "
        "(performance.md). CPUs always do.",
    )
    generate: dict[str, Any] = setting(
        {},
        "Further options of transformers' generate.",
        rule="a table of options that have no setting of their own",
        remedy='For example rollout.generate = { stop_strings = ["."] }.',
    )

    @property
    def generate_options(self) -> dict[str, Any]:
        """All options of `generate`: those that are settings themselves, and those in the table."""
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
                reason = f", because rollout.{owner} sets it" if value is not None else ""
                yield f"generate.{option}", f"unset{reason}", value, "Remove it from rollout.generate."
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
    """`[train]`: length, batches, optimizer and sharding. A step is one batch of fresh samples on every trainer."""

    total_steps: int = setting(100, "Number of fresh batches that each trainer trains on in the run.", ge=1)
    update_steps: int = setting(1, "Number of fresh batches between two weight updates to the makers.", ge=1)
    epochs: int = setting(1, "Number of passes over the fresh batches of each weight update.", ge=1)
    batch_size: int = setting(16, "Samples per optimizer step and trainer.", ge=1)
    micro_batch_size: int = setting(
        0, "Maximum samples per forward and backward pass; 0 = the whole batch. Less memory, same result.", ge=0
    )
    micro_batch_tokens: PassTokens = setting(
        "auto",
        "Maximum tokens per forward and backward pass, without padding if the model supports packed rows; 0 = no "
        "limit. Less memory, same result. auto = on one GPU as many as fit, up to 32768, with "
        "activation_checkpointing if a single sample does not fit; otherwise 16384.",
        rule='"auto" or a whole number, 0 or more',
    )
    actor_lr: float = setting(1e-6, "Learning rate of the policy.", gt=0)
    critic_lr: float = setting(1e-5, "Learning rate of the critic.", gt=0)
    lr_schedule: Literal["constant", "linear", "cosine"] = setting("constant", "Learning rate after the warm-up.")
    warmup_steps: int = setting(0, "Number of optimizer steps over which the learning rate rises from 0.", ge=0)
    max_grad_norm: float = setting(1.0, "Maximum gradient norm, for clipping; 0 = measure the norm only.", ge=0)
    strategy: Literal["ddp", "zero1", "zero2", "gemini"] = setting(
        "ddp",
        "How trainers shard weights, gradients and optimizer state. ddp: not at all. zero1: weights and gradients are "
        "whole during a step. zero2: weights are whole from forward to backward, gradients never. gemini: a block is "
        "whole only while it computes. The resulting weights are the same.",
    )
    cpu_offload: bool = setting(
        False,
        "zero1, zero2, gemini: keep shards and optimizer state in host memory, and take optimizer steps on the CPU.",
    )
    mixed_precision: bool = setting(
        False, "Keep weights, gradients and optimizer state in float32; compute in bfloat16."
    )
    activation_checkpointing: bool = setting(
        False, "Recompute the activations of each block in the backward pass: less memory, a third more compute."
    )
    compile: bool = setting(
        False,
        "Compile the blocks of trained models, and of makers' models that only score, with torch.compile: faster steps "
        "on a GPU, after about a minute of compilation.",
    )
    save_every: int = setting(
        100,
        "Number of weight versions between checkpoints, saved to checkpoints/version-N in the output folder; 0 = save "
        "only when the run is stopped. `coati train --resume` and restarted trainers continue from the latest one.",
        ge=0,
    )
    checkpoints_kept: int = setting(2, "Number of checkpoints to keep; older ones are deleted.", ge=1)

    @property
    def optimizer_steps(self) -> int:
        """Number of optimizer steps of the run."""
        return self.total_steps * self.epochs

    def _conflicts(self) -> Iterator[tuple[str, str, Any, str]]:
        if self.update_steps > self.total_steps:
            rule = f"at most train.total_steps ({self.total_steps})"
            yield "update_steps", rule, self.update_steps, "Lower it, or raise train.total_steps."
        if self.warmup_steps > self.optimizer_steps:
            rule = f"at most the optimizer steps of the run (total_steps × epochs = {self.optimizer_steps})"
            yield "warmup_steps", rule, self.warmup_steps, "Lower it."
        if self.cpu_offload and self.strategy == "ddp":
            remedy = 'Remove it, or set train.strategy to "zero2".'
            yield "cpu_offload", 'false while train.strategy is "ddp"', True, remedy


class TopologySettings(Section, section="topology"):
    """`[topology]`: number of makers and trainers, their resources, and how far makers may run ahead."""

    makers: int = setting(1, "Initial number of makers. `coati scale` changes it while the run trains.", ge=1, le=64)
    trainers: int = setting(1, "Number of trainers. They share every optimizer step.", ge=1, le=64)
    placement: Literal["auto", "spread"] = setting(
        "auto", "Placement of actors on a cluster: auto = Ray's default, on few nodes; spread = across the nodes."
    )
    lead: int = setting(
        1,
        "How far makers may run ahead, in versions' worth of samples: the usual data age. max_staleness limits it too.",
        ge=0,
    )
    max_staleness: int = setting(
        1, "Maximum age of any sample when it is trained on, in weight versions; 0 = on-policy, -1 = unbounded.", ge=-1
    )
    max_restarts: int = setting(
        10, "Maximum restarts of makers and trainers within an hour; one more death ends the run with an error.", ge=0
    )
    threads_per_actor: int = setting(0, "Torch threads per actor; 0 = the cores divided among the actors.", ge=0)
    gpus_per_maker: float = setting(0.0, "GPUs per maker; below 1, a share of one GPU.", ge=0)
    gpus_per_trainer: float = setting(0.0, "GPUs per trainer; below 1, a share of one GPU.", ge=0)
    environment: Texts = setting(
        (),
        "Names of further environment variables to pass from your shell to the actors, such as the API key of a "
        "reward's service. Only without --address; on a cluster, set them for `ray start`.",
    )
    allow_open_cluster: bool = setting(
        False,
        "Join a Ray cluster (--address) without token authentication, on which anyone who can reach it can run code.",
    )
    chunk_mib: float = setting(
        64.0,
        "Maximum size of the chunks in which weights are sent, in MiB; a larger tensor is one chunk. Between actors on "
        "one GPU, where nothing is sent, chunks are 1 GiB or more.",
        gt=0,
    )

    def _conflicts(self) -> Iterator[tuple[str, str, Any, str]]:
        for key in ("gpus_per_maker", "gpus_per_trainer"):
            if (share := getattr(self, key)) > 1 and not share.is_integer():
                yield key, "0, a share below 1, or a whole number", share, "Remove it to use the default, 0.0."


class Deadlines(Section, section="deadlines"):
    """`[deadlines]`: timeouts. A wait that exceeds its timeout raises an error that says what it waited for."""

    start_seconds: float = setting(300.0, "Timeout for all actors to start, and for a maker's first weights.", gt=0)
    batch_seconds: float = setting(
        1800.0, "Timeout for a batch, for room in a buffer or for new weights, counted from the last progress.", gt=0
    )
    update_seconds: float = setting(600.0, "Timeout for one weight update.", gt=0)
    stall_seconds: float = setting(
        30.0, "A maker that does not respond for this long loses its work; its later deliveries are refused.", gt=0
    )
    grace_seconds: float = setting(
        5.0, "How long all makers must have been finished before the last, partial batch is trained on.", gt=0
    )


class LoggingSettings(Section, section="logging"):
    """`[logging]`: what is written in addition to metrics.jsonl, and where metrics are sent."""

    tensorboard: bool = setting(True, "Also write TensorBoard files, if the tensorboard package is installed.")
    trackers: dict[Literal["wandb", "mlflow", "trackio", "swanlab"], dict[str, Any]] = setting(
        {},
        "Trackers of metrics and samples: wandb, mlflow, trackio, swanlab, each with its options (metrics.md).",
        rule="a table for each tracker, such as [logging.trackers.wandb]",
        remedy="For TensorBoard, set logging.tensorboard = true instead.",
    )
    samples_kept: int = setting(4, "Number of samples per weight version written to samples.jsonl; 0 = none.", ge=0)
    spans_kept: int = setting(
        200_000,
        "Maximum number of time spans of actors written to spans.jsonl for coati report, 110 bytes each; 0 = none.",
        ge=0,
    )

    @property
    def writes_tensorboard(self) -> bool:
        """Whether TensorBoard files are enabled and can be written."""
        return self.tensorboard and importlib.util.find_spec("tensorboard") is not None

    @property
    def tracker_names(self) -> list[str]:
        """Names of the trackers that receive the run's metrics."""
        return [*["tensorboard"] * self.writes_tensorboard, *self.trackers]

    def _conflicts(self) -> Iterator[tuple[str, str, Any, str]]:
        for key in secrets_in(self.trackers, "trackers", f"{SECRET_NAME}|(^|_)(key|token)$"):
            remedy = "Set the environment variable that the package reads, such as WANDB_API_KEY."
            yield key, "unset, because it holds a secret", "***", remedy

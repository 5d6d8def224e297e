"""Build the objects that settings describe (models, prompts, reward, strategy), for the Ray actors and `--sync`."""

import contextlib
import dataclasses
import importlib.util
import logging
import os
import pickle
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoTokenizer
from transformers.utils import logging as transformers_logging

from coati.config import RunSettings
from coati.devices import device_errors_explained
from coati.errors import CoatiError, ConfigError
from coati.experience_maker import NaiveExperienceMaker
from coati.ledger import LedgerRules
from coati.models import Actor, Critic, RewardModel
from coati.models.calls import context_length_of
from coati.models.tiles import set_batch_invariant
from coati.prompts.stream import PromptStream
from coati.prompts.table import PromptTable, load_prompts, looks_local
from coati.rewards import RewardScorer, build_reward
from coati.rewards.calling import OFFERED, keyword_parameters, load_reward_function
from coati.rewards.function import GivenReward
from coati.trainer.objective import load_loss
from coati.trainer.ppo import PPOLearner, compile_blocks
from coati.trainer.strategies import DDPStrategy, GeminiStrategy, LowLevelZeroStrategy, Strategy
from coati.trainer.strategies.ranks import choose_device

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
    """Components that a program supplies in place of those that settings describe."""

    reward: GivenReward | None = None  # reward functions; None = the rewards in `[reward]`
    learner: Callable[..., PPOLearner] = PPOLearner  # builds the learner; a subclass with another loss, for example
    maker: Callable[..., Any] = NaiveExperienceMaker  # builds the experience maker; a subclass, for example


def make_strategy(config: RunSettings, role: Literal["trainer", "maker"]) -> Strategy:
    """Return a trainer's strategy, as set in `[train]`, or a maker's, which only chooses a device."""
    train = config.train
    common: dict[str, Any] = {
        "seed": config.run.seed,
        "device": None if config.model.device == "auto" else config.model.device,
        # In a collective, a rank may have to wait until another rank has updated its makers.
        "timeout_seconds": max(config.deadlines.batch_seconds, config.deadlines.update_seconds),
    }
    if role == "maker":
        return DDPStrategy(**common)
    common["compute_dtype"] = torch.bfloat16 if train.mixed_precision else None
    if train.strategy == "ddp":
        return DDPStrategy(**common)
    common["cpu_offload"] = train.cpu_offload
    if train.strategy == "gemini":
        return GeminiStrategy(**common)
    return LowLevelZeroStrategy(stage=1 if train.strategy == "zero1" else 2, **common)


def trainer_models(config: RunSettings, *, for_maker: bool = False) -> tuple[Actor, Critic | None]:
    """Load a trainer's actor and critic, seeded, or a maker's copies. The critic is None if not needed."""
    dtype = torch.float32 if config.train.mixed_precision and not for_maker else _dtype(config)
    if ":" in config.algorithm.loss:  # the learner looks it up by name
        load_loss(config.algorithm.loss, tuple(config.reward_search_paths))
    torch.manual_seed(config.run.seed)
    actor = _load_pretrained(config, "model.path", config.model.path, Actor, lora=config.lora, dtype=dtype)
    if not config.algorithm.uses_critic:
        return actor, None
    critic_path = config.model.path if config.model.critic == "actor" else config.model.critic
    critic = _load_pretrained(config, "model.critic", critic_path, Critic, lora=config.lora, dtype=dtype)
    return actor, critic


def maker_models(
    config: RunSettings, reward: GivenReward | None = None
) -> tuple[Actor, Critic | None, RewardScorer, Actor | None]:
    """Load a maker's actor, critic, reward and reference model. The reference is None if no KL is measured.

    With `train.compile`, compile the blocks of the models that only score; the actor is left to the rollout engine.
    """
    actor, critic = trainer_models(config, for_maker=True)
    path, reference = config.reference_path, None
    if path is not None:
        reference = _load_pretrained(config, "model.reference", path, Actor, dtype=_dtype(config))
    for model in (actor, critic, reference):
        if model is not None and config.rollout.batch_invariant:
            set_batch_invariant(model)
        elif model is not None and config.train.compile and model is not actor:
            compile_blocks(model)
    scorer = make_scorer(config, reward, compiled=config.train.compile)
    return actor, critic, scorer, reference


def load_actor(config: RunSettings, path: str) -> Actor:
    """Load a policy from a folder or the hub in the dtype and on the device of a maker."""
    actor: Actor = _load_pretrained(config, "the model", path, Actor, dtype=_dtype(config), device=_device(config))
    set_batch_invariant(actor, config.rollout.batch_invariant)
    return actor.eval()


def make_scorer(config: RunSettings, given: GivenReward | None = None, *, compiled: bool = False) -> RewardScorer:
    """Return the scorer for `[reward]`, of `given` functions if any. `compiled` compiles reward models' blocks."""

    def load_reward_model(path: str) -> RewardModel:
        model: RewardModel = _load_pretrained(config, "reward.model", path, RewardModel, device=_device(config))
        if not bool(model.value_head.weight.any()):
            logger.warning(
                "reward.model %r has an all-zero value head, so every score is 0. Use a sequence-classification model "
                "with one label, or a trained model saved by coati.models.RewardModel.",
                path,
            )
        if config.rollout.batch_invariant:
            set_batch_invariant(model)
        elif compiled:
            compile_blocks(model)
        return model.eval()

    settings, paths = config.reward, config.reward_search_paths
    reward = build_reward(settings, load_model=load_reward_model, search_paths=paths, given=given)
    limits = {"retries": settings.retries, "max_quarantined": settings.max_quarantined}
    return RewardScorer(reward, load_tokenizer(config), **limits)


def load_tokenizer(config: RunSettings) -> Any:
    """Load the tokenizer, with padding on the left."""
    return _load_pretrained(config, "model.tokenizer", config.tokenizer_path, AutoTokenizer, padding_side="left")


def check_inputs(config: RunSettings, given: GivenReward | None = None) -> None:
    """Load prompts, reward functions, tokenizer and model configs, and report all problems in one error.

    `given` are the reward functions of a program, which `[reward]` only names.
    """
    errors: list[CoatiError] = []

    def attempt(check: Callable[..., Any], *args: Any, label: str = "") -> Any:
        try:
            return check(*args)
        except CoatiError as error:
            if str(error) not in map(str, errors):
                errors.append(type(error)(f"{label}{error}"))

    attempt(_check_models, config)
    has_models = not errors  # otherwise the same load would fail again, after another network timeout
    table = attempt(_prompt_table, config, has_models)
    num_errors = len(errors)
    attempt(_check_reward, config, table, given)
    is_reported = len(errors) > num_errors
    for one in config.eval:
        label, own = f"eval {one.name!r}: ", config.for_evaluation(one)
        table = attempt(_prompt_table, own, has_models, label=label)
        has_own = one.reward != config.reward
        if has_own or not is_reported:
            attempt(_check_reward, own, table, None if has_own else given, label=label)
    if config.rollout.engine == "vllm" and importlib.util.find_spec("vllm") is None:
        problem = 'rollout.engine = "vllm" needs vLLM, which is not installed.'
        errors.append(ConfigError(f"{problem} Run pip install '.[vllm]' in your clone of coati."))
    for name in config.logging.tracker_names:
        if importlib.util.find_spec(name) is None:
            problem = f"logging.trackers.{name} needs the package {name}, which is not installed."
            errors.append(ConfigError(f"{problem} Run pip install {name}."))
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise ConfigError("\n".join(map(str, errors)))


def _check_models(config: RunSettings) -> None:
    if ":" in config.algorithm.loss:
        load_loss(config.algorithm.loss, tuple(config.reward_search_paths))
    critic = config.model.path if config.model.critic == "actor" else config.model.critic
    reference = config.reference_path or config.model.path
    paths = {"model.path": config.model.path, "model.reference": reference, "model.critic": critic}
    sizes = {
        key: _load_pretrained(config, key, path, AutoConfig).get_text_config().vocab_size for key, path in paths.items()
    }
    sizes["model.tokenizer"] = load_tokenizer(config).vocab_size
    own, reference_size, critic_size, tokens = sizes.values()
    if reference_size != own or critic_size < own or tokens > own:
        found = ", ".join(f"{size} in {key}" for key, size in sizes.items())
        raise ConfigError(
            f"Models and tokenizer must share a vocabulary, got vocabulary sizes {found}. Use models and a tokenizer "
            "of one family: a KL between different vocabularies is meaningless."
        )


def _prompt_table(config: RunSettings, has_models: bool) -> PromptTable:
    return make_prompts(config).table if has_models else _load_prompt_table(config)


def _check_reward(config: RunSettings, table: PromptTable | None, given: GivenReward | None) -> None:
    """Load the reward, and check that the dataset has its columns; None means that it could not be loaded."""
    parts = config.reward.parts
    functions: Sequence[Any] = [given] if callable(given) else given or [None] * len(parts)
    for index, (part, function) in enumerate(zip(parts, functions, strict=True)):
        key = f"reward.terms[{index}]" if config.reward.terms else "reward"
        if part.model and function is None:
            _load_pretrained(config, f"{key}.model", part.model, AutoConfig)
            continue
        try:
            if function is None:
                function = load_reward_function(part.function, config.reward_search_paths, part.options)
        except ConfigError as error:
            raise ConfigError(f"{key}.function: {error}") from error
        named, _ = keyword_parameters(function)
        own = {part.columns.get(parameter, parameter) for parameter, is_required in named.items() if is_required}
        if table is None:
            continue
        columns = table.other_columns
        if missing := sorted({*own, *part.columns.values()}.difference(OFFERED, columns)):
            raise ConfigError(
                f"{key}.function {part.function!r} needs {missing[0]!r}, but a reward gets {', '.join(OFFERED)} and "
                f"the dataset's columns ({', '.join(sorted(columns)) or 'none'}). Rename the parameter, give it a "
                f"default, map it to a column in {key}.columns, or add the column."
            )
        for name in sorted(own.difference(OFFERED)):
            if without := [index for index, row in enumerate(table.rows) if row.get(name) is None]:
                raise ConfigError(
                    f"{key}.function {part.function!r} needs {name!r}, but {len(without):,} of {len(table):,} prompts "
                    f"have none, first {table.where(without[0])}. Add it, or give the parameter a default."
                )


def make_prompts(config: RunSettings, name: str = "[prompts]") -> PromptStream:
    """Return the endless stream of prompts, identical in all makers. `name` identifies the set in warnings."""
    table = _load_prompt_table(config)
    context = context_length_of(_load_pretrained(config, "model.path", config.model.path, AutoConfig))
    own: dict[str, Any] = {"seed": config.run.seed, "context_length": context, "name": name}
    return PromptStream(table, load_tokenizer(config), config.prompts, config.rollout, **own)


def _load_prompt_table(config: RunSettings) -> PromptTable:
    prompts = config.prompts
    return load_prompts(prompts.path, split=prompts.split, subset=prompts.subset, column=prompts.column)


def ledger_rules(config: RunSettings, stream: int = 0) -> LedgerRules:
    """Return how many samples a trainer consumes, and how far makers may run ahead of it."""
    train, topology = config.train, config.topology
    return LedgerRules(
        samples_per_version=train.update_steps * train.batch_size,
        total_samples=train.total_steps * train.batch_size,
        lead=topology.lead,
        max_staleness=None if topology.max_staleness < 0 else topology.max_staleness,
        group_size=config.rollout.samples_per_prompt if config.algorithm.uses_groups else 1,
        stream=stream,
        num_streams=topology.trainers,
    )


def save_after_failure(error: Exception, save: Callable[[str], None], path: str, step: int) -> None:
    """Save the model of a failed run, elsewhere if `path` cannot be written; add a note with its path to `error`."""
    elsewhere = Path(tempfile.gettempdir()) / f"coati-{uuid.uuid4().hex[:8]}" / "model-at-failure"
    for place in (path, str(elsewhere)):
        try:
            save(place)
        except Exception as failure:  # report the run's own error, not this one
            problem = failure
        else:
            error.add_note(f"The model after step {step} was saved to {place}")
            return
    error.add_note(f"The model after step {step} could not be saved to {path}: {problem}")


def threads_per_actor(config: RunSettings) -> int:
    """Return the CPU threads of each actor: the setting, or the machine's cores divided among the actors."""
    if config.topology.threads_per_actor:
        return config.topology.threads_per_actor
    return max(1, (os.cpu_count() or 1) // num_actors(config))


def num_actors(config: RunSettings) -> int:
    """Return the number of actors that reserve a CPU: trainers and makers."""
    return config.topology.makers + config.topology.trainers


def _device(config: RunSettings) -> torch.device:
    return choose_device(None if config.model.device == "auto" else config.model.device, local_rank=0)


def _dtype(config: RunSettings) -> torch.dtype:
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.model.dtype]


def _load_pretrained(
    config: RunSettings, setting: str, path: str, model_class: Any, *, device: Any = None, **kwargs: Any
) -> Any:
    base = f"relative paths are resolved against the folder of the TOML file, then against {Path.cwd()}"
    if looks_local(path) and not Path(path).is_dir():
        hint = f" Run `coati demo` to create {path}." if path in ("runs/demo/base", "runs/demo/model") else ""
        raise ConfigError(f"{setting} {path!r} is not a folder. Check the path: {base}.{hint}")
    try:
        with (
            quiet_transformers(),
            device_errors_explained(f"loading {setting} {path!r}", 'Use a smaller model, or model.dtype "bfloat16".'),
        ):
            model = model_class.from_pretrained(path, trust_remote_code=config.model.trust_remote_code, **kwargs)
            return model if device is None else model.to(device)
    except CoatiError:
        raise
    except (OSError, ValueError, RuntimeError, EOFError, SafetensorError, pickle.UnpicklingError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        problem, remedy = "could not be loaded by transformers", "If a file is missing or damaged, use another copy."
        if not looks_local(path):
            problem = f"is not a folder ({base}), and could not be loaded from the hub under that name"
            remedy = "Check the name and the network."
        raise ConfigError(f"{setting} {path!r} {problem}: {reason} {remedy}") from error


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' progress bars and warnings, such as that a critic's head is newly initialized."""
    verbosity, has_bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if has_bars:
            transformers_logging.enable_progress_bar()

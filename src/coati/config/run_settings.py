"""All settings of a run in one frozen object: loaded from a TOML file or a dict, with overrides, and dumped as TOML.

`[[eval]]` is defined here because, like the run, an evaluation set has prompts, rollout and reward.
"""

import copy
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self

import tomli_w
from pydantic import Field, Strict, ValidationError

from coati.config.algorithm import AlgorithmSettings
from coati.config.generate import GenerateOptions, options_problem
from coati.config.reward import RewardSettings
from coati.config.section import Section, describe, setting
from coati.config.sections import (
    Deadlines,
    GeneralSettings,
    LoggingSettings,
    LoRASettings,
    ModelSettings,
    PromptSettings,
    RolloutSettings,
    TopologySettings,
    TrainSettings,
)
from coati.errors import ConfigError

# Settings that are paths or hub names.
_SOURCE = re.compile(
    r"(^|\.)(model\.(path|reference|tokenizer|critic)|prompts\.path|reward(\.terms\[\d+\])?\.model|search_paths\[\d+\])$"
)
Overrides = Sequence[str] | Mapping[str, Any]  # strings section.key=value, or a dict
Counts = Annotated[tuple[Annotated[int, Field(ge=1)], ...], Strict(False)]  # a list in TOML


def change_paths(table: Any, change: Callable[[str, str], str], *, inside: str = "") -> None:
    """Replace every path or hub name in a table of sections, valid or not, by `change(setting, path)`."""
    for key, value in list(table.items() if isinstance(table, dict) else enumerate(table)):
        where = f"{inside}[{key}]" if isinstance(table, list) else f"{inside}.{key}".removeprefix(".")
        if isinstance(value, tuple):
            table[key] = value = list(value)
        if isinstance(value, dict | list):
            change_paths(value, change, inside=where)
        elif isinstance(value, str) and value and _SOURCE.search(where) and (key, value) != ("critic", "actor"):
            table[key] = change(where, value)


class EvalSettings(Section, section="eval"):
    """`[[eval]]`: prompts for evaluation, how they are sampled and scored, and when."""

    name: str = setting(
        ...,
        "Name of the set in metrics and files.",
        rule="a string of lower-case letters, digits, '_' and '-'",
        remedy='For example name = "held-out".',
        pattern=r"^[a-z0-9][a-z0-9_-]*$",
    )
    prompts: PromptSettings = setting(
        ...,
        "Same keys as [prompts]; shuffle has no effect.",
        rule="a table",
        remedy='For example prompts = { path = "held_out.jsonl" }.',
    )
    rollout: RolloutSettings = setting(RolloutSettings(), "Same keys as [rollout]; unset = as there.", rule="a table")
    reward: RewardSettings = setting(..., "Same keys as [reward]; if unset, the reward of the run.", rule="a table")
    max_prompts: int = setting(0, "Maximum number of prompts, from the start of the dataset; 0 = all.", ge=0)
    pass_at: Counts = setting(
        (),
        "Values of k for pass@k; empty = 1 and rollout.samples_per_prompt.",
        rule="a list of whole numbers of at least 1",
    )
    pass_score: float = setting(1.0, "A sample passes if its score is at least this.")
    before: bool = setting(True, "Evaluate the initial model, before training.")
    every: int = setting(0, "Number of weight versions between evaluations during training; 0 = none.", ge=0)
    at_end: bool = setting(True, "Evaluate the final model.")
    best_by: str = setting("", "Keep the best model by this metric, such as avg@1 or pass@8, in best/; empty = off.")
    patience: int = setting(0, "Stop after this many evaluations in a row without a better best_by; 0 = never.", ge=0)
    seed: int = setting(0, "Seed of the samples. Random draws are the same for all versions and runs.", ge=0, lt=2**63)

    @property
    def ks(self) -> list[int]:
        """Values of k for pass@k, ascending."""
        return sorted(set(self.pass_at or (1, self.rollout.samples_per_prompt)))

    @property
    def metrics(self) -> list[str]:
        """Names of the estimated metrics."""
        return [f"avg@{self.rollout.samples_per_prompt}", *(f"pass@{k}" for k in self.ks)]

    def _conflicts(self) -> Iterator[tuple[str, str, Any, str]]:
        most = self.rollout.samples_per_prompt
        if self.pass_at and max(self.pass_at) > most:
            rule = f"at most rollout.samples_per_prompt ({most})"
            yield "pass_at", rule, self.pass_at, "Raise rollout.samples_per_prompt of the set, or remove the larger k."
        if self.best_by and self.best_by not in self.metrics:
            yield (
                "best_by",
                f"one of {', '.join(self.metrics)}",
                self.best_by,
                "Add this k to pass_at, or set rollout.samples_per_prompt of the set.",
            )
        if self.patience and not (self.best_by and self.every):
            yield "patience", "0 unless best_by and every are set", self.patience, "Set both, or remove it."


class RunSettings(Section):
    """All settings of a run, from `load_config` or `build_config`."""

    run: GeneralSettings = GeneralSettings()
    model: ModelSettings
    prompts: PromptSettings
    reward: RewardSettings
    rollout: RolloutSettings = RolloutSettings()
    algorithm: AlgorithmSettings = AlgorithmSettings()
    train: TrainSettings = TrainSettings()
    topology: TopologySettings = TopologySettings()
    lora: LoRASettings = LoRASettings()
    deadlines: Deadlines = Deadlines()
    logging: LoggingSettings = LoggingSettings()
    eval: tuple[EvalSettings, ...] = setting((), rule="a list of tables, [[eval]]", strict=False)

    @property
    def output_folder(self) -> Path:
        """Folder for everything that the run writes."""
        return Path(self.run.output or f"runs/{self.run.name}")

    @property
    def reference_path(self) -> str | None:
        """The reference model for the KL; None if no KL is needed and `model.reference` is empty."""
        return self.model.reference or (self.model.path if self.algorithm.kl_coef else None)

    @property
    def tokenizer_path(self) -> str:
        """Path or hub name of the tokenizer."""
        return self.model.tokenizer or self.model.path

    @property
    def reward_search_paths(self) -> list[Path]:
        """Folders to search for modules of reward functions, in order."""
        return [*map(Path, self.reward.search_paths), Path.cwd()]

    @property
    def input_paths(self) -> dict[str, str]:
        """Paths and hub names of the models, prompts and search folders that the run reads, by setting."""
        found: dict[str, str] = {}
        change_paths(self.model_dump(), lambda key, path: found.setdefault(key, path))
        return found

    def for_evaluation(self, one: EvalSettings) -> Self:
        """Return these settings with the prompts, rollout and reward of an evaluation set."""
        own = {"prompts": one.prompts.model_copy(update={"shuffle": False}), "rollout": one.rollout}
        return self.model_copy(update={**own, "reward": one.reward})

    def with_absolute_paths(self) -> Self:
        """Return these settings with absolute local paths, so that they are valid in any working directory."""

        def absolute(_key: str, path: str) -> str:
            place = Path(path).expanduser()
            return str(place.resolve()) if place.exists() else path

        sections = self.model_dump()
        change_paths(sections, absolute)
        for table in (sections["reward"], *(one["reward"] for one in sections["eval"])):
            table["search_paths"] = list(dict.fromkeys([*table["search_paths"], str(Path.cwd())]))  # without duplicates
        return type(self).model_validate(sections)

    def _conflicts(self) -> Iterator[tuple[str, str, Any, str]]:
        dtype = self.model.dtype
        if self.train.mixed_precision and dtype != "bfloat16":
            remedy = 'Set model.dtype to "bfloat16", the compute format.'
            yield "train.mixed_precision", f'false while model.dtype is "{dtype}"', True, remedy
        for key in ("gpus_per_maker", "gpus_per_trainer"):
            if self.model.device == "cpu" and (share := getattr(self.topology, key)):
                remedy = 'Set it to 0, or set model.device to "auto".'
                yield f"topology.{key}", '0 while model.device is "cpu"', share, remedy
        num_shards = self.rollout.vllm.get("tensor_parallel_size", 1) if self.rollout.engine == "vllm" else 1
        if num_shards != 1 and (share := self.topology.gpus_per_maker) not in (0, num_shards):
            rule = f"rollout.vllm.tensor_parallel_size ({num_shards}), so that each of vLLM's workers has a GPU"
            yield "topology.gpus_per_maker", rule, share, f"Set it to {num_shards}."
        if (warmup := self.algorithm.critic_warmup_steps) >= (steps := self.train.optimizer_steps):
            rule = f"less than the optimizer steps of the run (train.total_steps × train.epochs = {steps})"
            yield "algorithm.critic_warmup_steps", rule, warmup, "Lower it, or the policy is never trained."
        yield from self._sampling_conflicts()
        yield from self._group_conflicts()
        yield from self._eval_conflicts()

    def _eval_conflicts(self) -> Iterator[tuple[str, str, Any, str]]:
        """Check that sets use the makers' engine, have different names, and keep at most one best model."""
        names, best = [one.name for one in self.eval], [one.name for one in self.eval if one.best_by]
        if len(set(names)) < len(names):
            yield "eval", "sets with different names", names, "Give each its own name."
        for index, one in enumerate(self.eval):
            for key in ("engine", "batch_invariant"):
                if (value := getattr(one.rollout, key)) != getattr(self.rollout, key):
                    remedy = "Makers have only one engine. Remove the setting."
                    yield f"eval[{index}].rollout.{key}", "the same as in [rollout]", value, remedy
            options, of_run = (GenerateOptions.parse(**some.generate_options) for some in (one.rollout, self.rollout))
            # The native engine falls back to the reference engine if it does not support an option of the run.
            engine = "reference" if self.rollout.engine == "native" and of_run.extra else self.rollout.engine
            if (problem := options_problem(engine, options)) is not None:
                remedy = 'Remove the option, or set rollout.engine to "reference", which is slower.'
                yield f"eval[{index}].rollout", f"options that the engine supports ({problem})", one.name, remedy
        if len(best) > 1:
            remedy = "There is only one best/ folder: choose one set."
            yield "eval", "sets of which at most one has best_by", best, remedy

    def _sampling_conflicts(self) -> Iterator[tuple[str, str, Any, str]]:
        """Reject truncated sampling with off-policy correction: importance weights need the whole distribution."""
        options, algorithm, staleness = self.rollout.generate_options, self.algorithm, self.topology.max_staleness
        is_weighted = algorithm.correction != "none" and (staleness or algorithm.resolved(0).correction == "decoupled")
        for key, off in {"top_k": 0, "top_p": 1.0, "min_p": 0.0}.items():
            if is_weighted and self.rollout.do_sample and (value := options.get(key, off)) != off:
                rule = f"{off} while stale data is corrected: no weight makes up for tokens that could not be sampled"
                remedy = 'Lower rollout.temperature instead, or set algorithm.correction to "none" to accept the bias.'
                yield f"rollout.{'generate.' * (key == 'min_p')}{key}", rule, value, remedy

    def _group_conflicts(self) -> Iterator[tuple[str, str, Any, str]]:
        """Check that groups have at least two samples, and that every version takes whole groups."""
        key, size, train = "rollout.samples_per_prompt", self.rollout.samples_per_prompt, self.train
        named = f'with algorithm.name = "{self.algorithm.name}"'
        if not self.algorithm.uses_groups:
            return
        if size < 2:
            yield key, f"2 or more {named}, which compares the samples of a prompt", size, "Use 4 to 16."
            return
        for name, steps in (("update_steps", train.update_steps), ("total_steps", train.total_steps)):
            if (samples := steps * train.batch_size) % size:
                rule = (
                    f"a divisor of train.{name} × train.batch_size ({steps} × {train.batch_size} = {samples}) {named}, "
                    "so that every trainer takes whole groups for each weight version"
                )
                yield key, rule, size, f"Make train.batch_size a multiple of {size}."
                return


def load_config(path: Path | None, overrides: Overrides = ()) -> RunSettings:
    """Read settings from a TOML file (or none), apply overrides and validate everything.

    Relative paths in the file are relative to its folder if they exist there, else to the working directory. Two
    defaults depend on the file: `run.name` (its stem) and `reward.search_paths` (its folder). Overrides are strings
    `section.key=value`, with a TOML value or an unquoted string, or a dict, nested or with dotted keys; `eval`
    is replaced as a whole. Raises ConfigError with one line per problem.

    >>> load_config(None, ["model.path=m", "prompts.path=p.jsonl", "reward.model=r", "train.epochs=2"]).train.epochs
    2
    """
    if path is None:
        return build_config({}, overrides)
    path = Path(path)
    data = _read_toml(path)
    for section, key, value in (("run", "name", path.stem), ("reward", "search_paths", ["."])):
        if isinstance(table := data.setdefault(section, {}), dict):
            table.setdefault(key, value)
    folder = path.parent
    change_paths(data, lambda _, path: str(folder / path) if (folder / path).exists() else path)
    return build_config(data, overrides, source=str(path))


def build_config(data: Mapping[str, Any], overrides: Overrides = (), *, source: str = "") -> RunSettings:
    """Validate a table of sections, with overrides as in `load_config`. Errors name `source`."""
    sections = copy.deepcopy(dict(data))
    for table in _eval_tables(sections):
        if "reward" in table and table["reward"] == sections.get("reward"):
            del table["reward"]  # as in saved settings: it inherits the run's, which may be overridden
    for key, value in parse_overrides(overrides).items():
        _apply_override(sections, key, value)
    for name, field in RunSettings.model_fields.items():
        if field.is_required():
            sections.setdefault(name, {})  # so that the error names the missing settings
    for table in _eval_tables(sections):
        _inherit(table, sections)
    try:
        return RunSettings.model_validate(sections)
    except ValidationError as error:
        problems = describe(RunSettings, error)
    of_run = [problem for problem in problems if "eval[" not in problem]  # sets inherit some of them
    problems = of_run + [one for one in problems if "eval[" in one and re.sub(r"eval\[\d+\]\.", "", one) not in of_run]
    option = " with overrides" if isinstance(overrides, Mapping) else " with --set"
    where = f" in {source}{option * bool(overrides)}" if source else ""
    noun = "setting is" if len(problems) == 1 else "settings are"
    lines = "\n".join(f"  {problem}" for problem in problems)
    raise ConfigError(f"{len(problems)} {noun} wrong{where}:\n{lines}")


def _eval_tables(sections: Mapping[str, Any]) -> list[dict[str, Any]]:
    sets = sections.get("eval")
    return [table for table in sets if isinstance(table, dict)] if isinstance(sets, list | tuple) else []


def _inherit(table: dict[str, Any], sections: Mapping[str, Any]) -> None:
    """Fill in what an evaluation set inherits: rollout settings, and the reward or its search paths."""
    rollout, reward = sections.get("rollout", {}), sections["reward"]
    if isinstance(rollout, dict) and isinstance(own := table.setdefault("rollout", {}), dict):
        table["rollout"] = {**rollout, **own}
    table.setdefault("reward", copy.deepcopy(reward))
    if isinstance(reward, dict) and isinstance(own := table["reward"], dict) and "search_paths" in reward:
        own.setdefault("search_paths", reward["search_paths"])


def dump_config(config: RunSettings) -> str:
    """Return all settings as TOML, which `load_config` reads back to equal settings."""
    return tomli_w.dumps(config.model_dump())


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        is_gone = isinstance(error, FileNotFoundError)
        problem = "does not exist" if is_gone else f"must be a TOML file in UTF-8: {error}"
        raise ConfigError(
            f"{path} {problem} (working directory: {Path.cwd()}). Check the path. For an example, see "
            "examples/film/run.toml."
        ) from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"{path} is not valid TOML: {error}. Check that line, and lists before it for a missing ]. Strings need "
            "quotes, tables look like [train], and no key may be set twice (such as algorithm = and [algorithm])."
        ) from None


def parse_overrides(overrides: Overrides) -> dict[str, Any]:
    """Return overrides as a dict from dotted keys to values."""
    values: dict[str, Any] = {}
    if isinstance(overrides, Mapping):
        for key, value in overrides.items():
            inner = value.items() if isinstance(value, Mapping) else ()
            values |= parse_overrides({f"{key}.{name}": one for name, one in inner}) or {key: value}
        return values
    for override in overrides:
        key, equals, text = override.partition("=")
        try:
            values[key.strip()] = tomllib.loads(f"value = {text}")["value"] if equals else None
        except tomllib.TOMLDecodeError:
            values[key.strip()] = text.strip()
    return values


def _apply_override(data: dict[str, Any], key: str, value: Any) -> None:
    override, parts = key if value is None else f"{key}={value}", key.split(".")
    if parts == ["algorithm"]:
        parts.append("name")  # the short form, as in a file
    if value is None or not all(parts) or (len(parts) < 2 and parts != ["eval"]):
        raise ConfigError(
            f"An override must be section.key=value, got {override!r}. For example train.total_steps=200."
        )
    if isinstance(data.get("algorithm"), str):
        data["algorithm"] = {"name": data["algorithm"]}
    if parts[0] == "eval" and len(parts) > 1:
        raise ConfigError(
            f"{override!r} sets a key of eval, which is a list of evaluation sets. Replace it as a whole, for example "
            '--set \'eval=[{ name = "held-out", prompts = { path = "held_out.jsonl" } }]\', or --set eval=[] for none '
            '(overrides={"eval": [...]} in Python).'
        )
    table = data
    for depth, part in enumerate(parts[:-1]):
        inner = table.setdefault(part, {})
        if not isinstance(inner, dict):
            outer = ".".join(parts[: depth + 1])
            raise ConfigError(f"{override!r} sets a key of {outer}, which is not a table. Set {outer} as a whole.")
        table = inner
    table[parts[-1]] = copy.deepcopy(value)

"""All settings of a run in one frozen object, and the rules that hold between its sections."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from coati.config.algorithm import AlgorithmSettings
from coati.config.section import Section
from coati.config.sections import (
    GeneralSettings,
    LoRASettings,
    ModelSettings,
    PromptSettings,
    RewardSettings,
    RolloutSettings,
)
from coati.config.training import (
    Deadlines,
    LoggingSettings,
    TopologySettings,
    TrainSettings,
)


def change_paths(sections: dict[str, Any], change: Callable[[str, str], str]) -> None:
    """Replace every path or hub name in a table of sections, sound or not, by `change(setting, path)`."""
    keys = {"model": ("path", "reference", "tokenizer", "critic"), "prompts": ("path",), "reward": ("model",)}
    tables: list[tuple[str, Any, tuple[str, ...]]] = [(name, sections.get(name), keys[name]) for name in keys]
    reward = sections.get("reward")
    terms = reward.get("terms") if isinstance(reward, dict) else None
    if isinstance(terms, list | tuple):
        tables += [(f"reward.terms[{index}]", term, ("model",)) for index, term in enumerate(terms)]
    for name, table, names in tables:
        for key in names if isinstance(table, dict) else ():
            path = table.get(key)
            if isinstance(path, str) and path and (key, path) != ("critic", "actor"):
                table[key] = change(f"{name}.{key}", path)


class RunSettings(Section):
    """Every setting of a run, made by `load_config` or `build_config`.

    Example:
        >>> from coati.config import build_config
        >>> config = build_config(
        ...     {
        ...         "model": {"path": "runs/demo/model"},
        ...         "prompts": {"path": "prompts.jsonl"},
        ...         "reward": {"function": "rewards:praise"},
        ...     }
        ... )
        >>> config.train.batch_size, str(config.output_folder)
        (16, 'runs/run')
    """

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

    @property
    def output_folder(self) -> Path:
        """Where everything the run writes goes."""
        return Path(self.run.output or f"runs/{self.run.name}")

    @property
    def reference_path(self) -> str:
        """The model that the KL penalty is measured against."""
        return self.model.reference or self.model.path

    @property
    def tokenizer_path(self) -> str:
        """Where the tokenizer is loaded from."""
        return self.model.tokenizer or self.model.path

    @property
    def reward_search_paths(self) -> list[Path]:
        """Folders where modules of reward functions are looked for, first to last."""
        return [*map(Path, self.reward.search_paths), Path.cwd()]

    @property
    def input_paths(self) -> dict[str, str]:
        """The models and prompts that the run reads, by setting: paths and hub names."""
        found: dict[str, str] = {}
        change_paths(self.model_dump(), lambda key, path: found.setdefault(key, path))
        return found

    def with_absolute_paths(self) -> Self:
        """Return the same settings with local paths made absolute, so that they mean the same in any process."""

        def absolute(_key: str, path: str) -> str:
            place = Path(path).expanduser()
            return str(place.resolve()) if place.exists() else path

        sections = self.model_dump()
        change_paths(sections, absolute)
        sections["reward"]["search_paths"] = [str(path.resolve()) for path in self.reward_search_paths]
        return type(self).model_validate(sections)

    def problems(self) -> list[str]:
        """Find what is wrong between sections."""
        found = []
        if self.topology.update_lora_weights and not self.lora.rank:
            found.append(
                "topology.update_lora_weights must be false while lora.rank is 0, got true. "
                "Set lora.rank, for example to 8, or send all weights."
            )
        if self.train.mixed_precision and self.model.dtype != "bfloat16":
            found.append(
                f'train.mixed_precision must be false while model.dtype is "{self.model.dtype}", got true. '
                'Set model.dtype to "bfloat16", the format that is computed in.'
            )
        for key in ("gpus_per_maker", "gpus_per_trainer"):
            share = getattr(self.topology, key)
            if self.model.device == "cpu" and share:
                found.append(
                    f'topology.{key} must be 0 while model.device is "cpu", got {share}. '
                    f'Set it to 0, or model.device to "auto".'
                )
        return found + self._group_problems()

    def _group_problems(self) -> list[str]:
        """Samples that are compared with each other are made together, and every version takes whole groups."""
        if not self.algorithm.uses_groups:
            return []
        size, train, trainers = self.rollout.samples_per_prompt, self.train, self.topology.trainers
        if size < 2:
            return [
                f'rollout.samples_per_prompt must be 2 or more with algorithm.name = "{self.algorithm.name}", which '
                f"compares the samples of a prompt, got {size}. Use 4 to 16."
            ]
        per_step = train.batch_size * trainers
        for key, steps in (("update_steps", train.update_steps), ("total_steps", train.total_steps)):
            if steps * per_step % size:
                return [
                    f"rollout.samples_per_prompt must divide train.{key} × train.batch_size × topology.trainers "
                    f"({steps} × {train.batch_size} × {trainers} = {steps * per_step}) with algorithm.name = "
                    f'"{self.algorithm.name}", so that every weight version takes whole groups, got {size}. '
                    f"Make train.batch_size a multiple of {size}."
                ]
        return []

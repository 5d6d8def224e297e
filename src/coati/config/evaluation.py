"""`[[eval]]`: sets of prompts on which versions of the policy are measured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field, Strict

from coati.config.reward import RewardSettings
from coati.config.section import Section, setting
from coati.config.sections import PromptSettings, RolloutSettings

Counts = Annotated[tuple[Annotated[int, Field(ge=1)], ...], Strict(False)]  # a list in TOML


class EvalSettings(Section, section="eval"):
    """`[[eval]]`: prompts that are not trained on, how they are sampled and scored, and when."""

    name: str = setting(
        ...,
        "What metrics and files call the set.",
        rule="a text of lower-case letters, digits, '_' and '-'",
        remedy='For example name = "held-out".',
        pattern=r"^[a-z0-9][a-z0-9_-]*$",
    )
    prompts: PromptSettings = setting(
        ...,
        "Keys of [prompts]; shuffle has no effect.",
        rule="a table",
        remedy='For example prompts = { path = "held_out.jsonl" }.',
    )
    rollout: RolloutSettings = setting(
        RolloutSettings(), "Keys of [rollout]; what is left out is as in [rollout].", rule="a table"
    )
    reward: RewardSettings = setting(..., "Keys of [reward]; left out, that is the reward.", rule="a table")
    max_prompts: int = setting(0, "Use only so many prompts, the first ones; 0 = all.", ge=0)
    pass_at: Counts = setting(
        (), "The k of pass@k; empty = 1 and rollout.samples_per_prompt.", rule="a list of whole numbers, 1 or more"
    )
    pass_score: float = setting(1.0, "A sample passes if its score is this or more.")
    before: bool = setting(True, "Evaluate the initial model, before training.")
    every: int = setting(0, "Evaluate every so many weight versions; 0 = not while training.", ge=0)
    at_end: bool = setting(True, "Evaluate the final model.")
    best_by: str = setting(
        "", "Keep the model with the greatest value of this metric, such as avg@1 or pass@8, in best/; empty = no."
    )
    patience: int = setting(
        0, "Stop the run after so many evaluations in a row that were not better by best_by; 0 = never.", ge=0
    )
    seed: int = setting(0, "Keys the draws, which are the same for all versions and runs.", ge=0, lt=2**63)

    @property
    def ks(self) -> list[int]:
        """The k of every pass@k."""
        return sorted(set(self.pass_at or (1, self.rollout.samples_per_prompt)))

    @property
    def metrics(self) -> list[str]:
        """Names of what is estimated."""
        return [f"avg@{self.rollout.samples_per_prompt}", *(f"pass@{k}" for k in self.ks)]

    def _conflicts(self) -> Iterator[tuple[str, str, Any, str]]:
        most = self.rollout.samples_per_prompt
        if self.pass_at and max(self.pass_at) > most:
            rule = f"at most rollout.samples_per_prompt ({most})"
            yield "pass_at", rule, self.pass_at, "Sample more of each prompt, or leave the greater k out."
        if self.best_by and self.best_by not in self.metrics:
            yield (
                "best_by",
                f"one of {', '.join(self.metrics)}",
                self.best_by,
                "Add the k to pass_at, or set rollout.samples_per_prompt of the set.",
            )
        if self.patience and not (self.best_by and self.every):
            yield "patience", "0 unless best_by and every are set", self.patience, "Set both, or leave it out."

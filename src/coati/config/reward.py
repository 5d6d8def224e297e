"""The section `[reward]`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from coati.config.section import Section, secrets_in, setting
from coati.config.sections import Texts


class RewardSource(Section):
    """A reward: a function or a model."""

    function: str = setting(
        "",
        'A function over text: one of the library (docs/rewards.md), or your own as "module:function".',
        rule='a name of the library, "module:function", or empty',
        remedy='For praise() in rewards.py write "rewards:praise".',
        pattern=r"^([a-z]+(-[a-z]+)*|[A-Za-z_][\w.]*:[A-Za-z_]\w*)?$",
    )
    options: dict[str, Any] = setting({}, "Options of the function.", rule="a table of options")
    columns: dict[str, str] = setting(
        {},
        "Columns of the dataset that a parameter of the function takes, where their names differ.",
        rule='a table such as { answer = "solution" }',
    )
    messages: bool = setting(
        False, "Your function gets lists of chat messages, as TRL passes for chat prompts, in place of texts."
    )
    model: str = setting("", "A reward model: a path or hub name.")

    def _conflicts(self) -> Iterator[tuple[str, str, Any, str]]:
        if self.messages and (self.model or (self.function and ":" not in self.function)):
            yield "messages", "false", True, "Only functions of your own take messages."
        for key in secrets_in(self.options, "options"):
            remedy = "Keep it in an environment variable, and have the option name that: settings are written down."
            yield key, "left out", "***", remedy


class RewardTerm(RewardSource):
    """One term of a weighted sum in `reward.terms`."""

    weight: float = setting(1.0, "Factor of this term; a negative one is a penalty.")
    name: str = setting("", "What metrics call it; empty = the function's or the model folder's name.")

    @property
    def label(self) -> str:
        """What metrics and errors call it: its name, its function, or the last part of the model's path."""
        return self.name or self.function.rpartition(":")[2] or self.model.rstrip("/").rpartition("/")[2]

    def _conflicts(self) -> Iterator[tuple[str, str, Any, str]]:
        yield from super()._conflicts()
        if bool(self.function) == bool(self.model):
            both = ["function", "model"] if self.function else []
            yield "", "given as exactly one of function and model", both, "Write one term for each reward."


class RewardSettings(RewardSource, section="reward"):
    """`[reward]`: what a response is worth. Exactly one of `function`, `model` and `terms`."""

    terms: tuple[RewardTerm, ...] = setting(
        (),
        "A weighted sum of rewards.",
        rule="a list of tables, each with function or model, and weight",
        remedy='For example reward.terms = [{ function = "rewards:praise", weight = 0.5 }].',
        strict=False,
    )
    timeout_seconds: float = setting(120.0, "Longest that a reward function may take for one batch.", gt=0)
    retries: int = setting(1, "How often a function that raises or hangs is called again with what it failed on.", ge=0)
    max_quarantined: int = setting(
        64,
        "Groups that a maker may leave out because the function fails on a sample of theirs; one more ends the run.",
        ge=0,
    )
    isolation: Literal["thread", "process"] = setting(
        "thread",
        "Where your functions run: on a thread of the maker, or in a child process that can be killed. Those of the "
        "library run where they should.",
    )
    memory_mib: int = setting(8192, "Address space of a child process, in MiB; 0 = unlimited.", ge=0)
    network: bool = setting(False, "Whether a child process may use the network.")
    environment: Texts = setting((), "Further environment variables that reach a child process, by name.")
    search_paths: Texts = setting(
        (),
        "Folders where modules of reward functions are looked for, before the working directory; left out, the folder "
        "of the TOML file.",
    )

    @property
    def parts(self) -> tuple[RewardTerm, ...]:
        """The terms, or the one function or model."""
        return self.terms or (RewardTerm(**{key: getattr(self, key) for key in RewardSource.model_fields}),)

    @property
    def secrets(self) -> tuple[str, ...]:
        """The environment variables that hold the keys of services which the rewards ask."""
        return tuple(name for part in self.parts if (name := str(part.options.get("api_key_env", ""))))

    def _conflicts(self) -> Iterator[tuple[str, str, Any, str]]:
        yield from super()._conflicts()
        ways = [key for key in ("function", "model", "terms") if getattr(self, key)]
        if len(ways) != 1:
            remedy = (
                "Give one (--set reward.terms=[] removes a file's terms); to add rewards up, list them in reward.terms."
            )
            yield "", "given as exactly one of function, model and terms", ways, remedy
        labels = [term.label for term in self.terms]
        if len(set(labels)) < len(labels):
            yield "terms", "rewards with different names", labels, "Give each its own name."

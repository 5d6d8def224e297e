"""The section `[reward]`."""

import re
from collections.abc import Iterator
from typing import Any, Literal

from coati.config.section import Section, secrets_in, setting
from coati.config.sections import Texts


class RewardSource(Section):
    """A source of scores: a function or a model."""

    function: str = setting(
        "",
        'A reward function: a built-in one (docs/rewards.md), or your own as "module:function".',
        rule='the name of a built-in reward, "module:function", or empty',
        remedy='For praise() in rewards.py write "rewards:praise".',
        pattern=r"^([a-z]+(-[a-z]+)*|[A-Za-z_][\w.]*:[A-Za-z_]\w*)?$",
    )
    options: dict[str, Any] = setting({}, "Options of the function.", rule="a table of options")
    columns: dict[str, str] = setting(
        {},
        "Maps parameters of the function to dataset columns with other names.",
        rule='a table such as { answer = "solution" }',
    )
    messages: bool = setting(False, "Pass your function chat messages, not strings, as TRL does for chat prompts.")
    model: str = setting("", "A reward model, as a path or hub name.")

    def _conflicts(self) -> Iterator[tuple[str, str, Any, str]]:
        if self.messages and (self.model or (self.function and ":" not in self.function)):
            yield "messages", "false unless function is your own", True, "Remove it."
        for key in secrets_in(self.options, "options"):
            remedy = "Keep the secret in an environment variable, and pass the name of the variable as the option."
            yield key, "unset, because settings are saved to files", "***", remedy


class RewardTerm(RewardSource):
    """One term of a weighted sum in `reward.terms`."""

    weight: float = setting(1.0, "Weight of this term; negative for a penalty.")
    name: str = setting("", "Name of the term in metrics; empty = the name of the function or of the model's folder.")

    @property
    def label(self) -> str:
        """Name in metrics and errors: `name`, else the function, else the last part of the model's path."""
        return self.name or self.function.rpartition(":")[2] or self.model.rstrip("/").rpartition("/")[2]

    def _conflicts(self) -> Iterator[tuple[str, str, Any, str]]:
        yield from super()._conflicts()
        if bool(self.function) == bool(self.model):
            both = ["function", "model"] if self.function else []
            yield "", "given as exactly one of function and model", both, "Use one term per reward."


class RewardSettings(RewardSource, section="reward"):
    """`[reward]`: how responses are scored. Set exactly one of `function`, `model` and `terms`."""

    terms: tuple[RewardTerm, ...] = setting(
        (),
        "A weighted sum of rewards.",
        rule="a list of tables, each with function or model, and weight",
        remedy='For example reward.terms = [{ function = "rewards:praise", weight = 0.5 }].',
        strict=False,
    )
    timeout_seconds: float = setting(120.0, "Timeout for one call of a reward function on a batch.", gt=0)
    retries: int = setting(1, "Retries of a function that raises or hangs, on the samples that it failed on.", ge=0)
    max_quarantined: int = setting(
        64,
        "Maximum groups that a maker drops because the function fails on one of their samples; one more ends the run.",
        ge=0,
    )
    isolation: Literal["thread", "process"] = setting(
        "thread",
        "Where your functions run: in a thread of the maker, or in a child process that can be killed. Built-in "
        "verifiers always use a process, and built-in clients of services a thread.",
    )
    memory_mib: int = setting(8192, "Maximum address space of a child process, in MiB; 0 = unlimited.", ge=0)
    network: bool = setting(False, "Allow child processes to use the network.")
    environment: Texts = setting((), "Names of further environment variables to pass to child processes.")
    search_paths: Texts = setting(
        (),
        "Folders to search for modules of reward functions, before the working directory; if unset, the TOML file's.",
    )

    @property
    def parts(self) -> tuple[RewardTerm, ...]:
        """The terms, or the one function or model. Your functions inherit `columns` and `messages` of the section."""
        if not self.terms:
            return (RewardTerm(**{key: getattr(self, key) for key in RewardSource.model_fields}),)
        shared = {"columns": self.columns, "messages": self.messages}
        own = ({key: getattr(one, key) or shared[key] for key in shared if ":" in one.function} for one in self.terms)
        return tuple(one.model_copy(update=update) for one, update in zip(self.terms, own, strict=True))

    @property
    def secrets(self) -> tuple[str, ...]:
        """Names of the environment variables with the API keys of the rewards."""
        return tuple(name for part in self.parts if (name := str(part.options.get("api_key_env", ""))))

    def _conflicts(self) -> Iterator[tuple[str, str, Any, str]]:
        yield from super()._conflicts()
        ways = [key for key in ("function", "model", "terms") if getattr(self, key)]
        if len(ways) != 1:
            remedy = (
                "Set one (--set reward.terms=[] removes a file's terms), or pass reward= in Python. To add rewards up, "
                "list them in reward.terms."
            )
            yield "", "given as exactly one of function, model and terms", ways, remedy
        labels = [term.label for term in self.terms]
        if len({re.sub("[^a-z0-9]", "_", label.lower()) for label in labels}) < len(labels):  # as metrics spell them
            remedy = "Set their names. In Python, define functions with def instead of lambda."
            yield "terms", "rewards with different names", labels, remedy

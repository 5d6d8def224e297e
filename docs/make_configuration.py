"""Generate the tables and the example plan in docs/configuration.md from the code.

    python docs/make_configuration.py            write the page
    python docs/make_configuration.py --check    only check whether it is up to date (exit code 1 if not)

Generated blocks are between `<!-- made: NAME -->` and `<!-- end: NAME -->`; everything else is written by hand. The
output depends only on the code, so that tests/unit/config/test_docs.py can compare it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from coati.config import RewardSettings, RewardTerm, RolloutSettings, RunSettings, load_config, plan_lines
from coati.config.section import Section, spell

DOCS = Path(__file__).resolve().parent

# The example in docs/configuration.md; model, prompts and reward do not affect the sizes.
EXAMPLE = (
    "run.name=example",
    "model.path=model",
    "prompts.path=prompts.jsonl",
    "reward.function=rewards:score",
    "rollout.prompts_per_batch=16",
    "rollout.samples_per_prompt=4",
    "rollout.max_new_tokens=256",
    "train.total_steps=100",
    "train.batch_size=32",
    "train.micro_batch_size=8",
    "train.update_steps=2",
    "train.epochs=2",
    "topology.makers=3",
    "topology.trainers=2",
    "topology.max_staleness=1",
)


def settings_tables() -> str:
    """Return a heading and a table for each section of the settings."""
    blocks = []
    for name, field in RunSettings.model_fields.items():
        section, title = field.annotation, f"[{name}]"
        if get_origin(section) is tuple:
            section, title = get_args(section)[0], f"[[{name}]]"
        assert isinstance(section, type)
        assert issubclass(section, Section)
        blocks.append(_section_block(title, section))
        if section.model_fields.get("terms") is not None:
            blocks.append(_section_block("reward.terms[…]", RewardTerm))
    return "\n\n".join(blocks)


def example_plan() -> str:
    """Return the example's settings as TOML, and the plan for them."""
    sizes = [f"{key} = {value}" for key, value in (item.split("=", 1) for item in EXAMPLE[4:])]
    plan = plan_lines(load_config(None, EXAMPLE))
    shown = [line for line in plan if not line.startswith(("Model:", "Reward:", "Output:"))]
    return "\n".join(["```toml", *sizes, "```", "", "```text", *shown, "```"])


PAGES: dict[str, dict[str, Callable[[], str]]] = {
    "configuration.md": {"settings": settings_tables, "plan": example_plan},
}


def render(page: str, text: str) -> str:
    """Return the page with its generated blocks filled in."""
    for name, make in PAGES[page].items():
        block = re.compile(rf"(<!-- made: {name} -->\n).*?(<!-- end: {name} -->)", re.DOTALL)
        if len(block.findall(text)) != 1:
            raise SystemExit(f"docs/{page} must have exactly one block 'made: {name}' … 'end: {name}'.")
        content = make()
        text = block.sub(lambda match, new=content: f"{match[1]}\n{new}\n\n{match[2]}", text)
    return text


def outdated() -> Iterator[tuple[Path, str]]:
    """Yield each outdated page with its new text."""
    for page in PAGES:
        path = DOCS / page
        text = path.read_text(encoding="utf-8")
        fresh = render(page, text)
        if fresh != text:
            yield path, fresh


def _section_block(title: str, section: type[Section]) -> str:
    about = " ".join((section.__doc__ or "").partition("Example:")[0].split())
    about = about.removeprefix(f"`{title}`: ")
    rows = [
        f"| `{name}` | {_default(field)} | {_cell(rule_of(field))} | {_cell(field.description or '')} |"
        for name, field in section.model_fields.items()
    ]
    head = ["| key | default | must be | meaning |", "|---|---|---|---|"]
    return "\n".join([f"### `{title}`", "", f"{about[0].upper()}{about[1:]}", "", *head, *rows])


def rule_of(field: FieldInfo) -> str:
    """Describe the valid values of a setting: its own rule, or one derived from type and bounds."""
    if isinstance(field.json_schema_extra, dict) and (rule := field.json_schema_extra.get("rule")):
        return str(rule)
    kind = field.annotation
    names = ("ge", "gt", "le", "lt", "min_length")
    bounds = {name: getattr(bound, name) for bound in field.metadata for name in names if hasattr(bound, name)}
    if get_origin(kind) is Literal:
        *first, last = (f'"{name}"' for name in get_args(kind))
        return f"{', '.join(first)} or {last}"
    plain: dict[Any, str] = {
        bool: "true or false",
        str: "a non-empty string" if "min_length" in bounds else "a string",
        tuple: "a list of strings",
    }
    if (kind := get_origin(kind) or kind) in plain:
        return plain[kind]
    low, high = bounds.get("ge", bounds.get("gt")), bounds.get("le", bounds.get("lt"))
    words = {"ge": f", {low} or more", "gt": f" above {low}", "le": f" and at most {high}", "lt": f" and below {high}"}
    if "ge" in bounds and high is not None:
        words = {"ge": f" from {low}", "le": f" to {high}", "lt": f" to below {high}"}
    noun = "a whole number" if field.annotation in (int, int | None) else "a number"
    return noun + "".join(word for key, word in words.items() if key in bounds)


def _default(field: FieldInfo) -> str:
    if field.annotation in (RolloutSettings, RewardSettings):  # keys of an evaluation set
        return "the run's"
    if field.is_required():
        return "required"
    value: Any = field.default
    if value is PydanticUndefined:
        assert field.default_factory is not None
        value = field.default_factory()  # type: ignore[call-arg]
    return f"`{spell(value)}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<name>", "`<name>`")


def main() -> int:
    """Write the pages or check them."""
    stale = list(outdated())
    is_check = "--check" in sys.argv[1:]
    for path, fresh in stale:
        if not is_check:
            path.write_text(fresh, encoding="utf-8")
        sys.stdout.write(f"{'out of date' if is_check else 'written'}: docs/{path.name}\n")
    if is_check and stale:
        sys.stdout.write("Run python docs/make_configuration.py\n")
    return 1 if is_check and stale else 0


if __name__ == "__main__":
    sys.exit(main())

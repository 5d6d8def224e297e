"""`coati reward check REWARD --rows FILE`."""

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from coati.config import RunSettings, build_config, load_config
from coati.errors import ConfigError, DataError, counted, format_seconds
from coati.prompts.table import Row, load_prompts
from coati.rewards.calling import excerpt

if TYPE_CHECKING:
    from coati.rewards import RewardRequest


def check(
    source: Annotated[
        str,
        typer.Argument(metavar="REWARD", help="A run's TOML file, the name of a built-in reward or module:function."),
    ],
    rows: Annotated[
        Path,
        typer.Option(metavar="FILE", help="Rows with prompt, completion and other columns, such as samples.jsonl."),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a setting, such as reward.options.pattern."),
    ] = None,
    show: Annotated[int, typer.Option(help="Number of rows to show. Failed rows come first.")] = 20,
) -> None:
    """Score rows with a reward function, without a model. Exits with status 1 if it fails on a row."""
    import torch

    from coati.rewards import PendingScores, RewardScorer, build_reward

    if source.endswith(".toml"):
        config = load_config(Path(source), overrides or [])
    else:
        unused = {"model": {"path": "none"}, "prompts": {"path": str(rows)}}
        config = build_config({**unused, "reward": {"function": source}}, overrides or [])
    table = load_prompts(rows, column=config.prompts.column)
    reward = build_reward(config.reward, load_model=_refuse_model, search_paths=config.reward_search_paths)
    scorer = RewardScorer(reward, None, retries=config.reward.retries, max_quarantined=1)
    scorer.working.update(part.label for part in config.reward.parts)  # report a failure per row, even if all rows fail
    request = _request(table.rows, config)  # loads the tokenizer, which must not count as the reward's time
    start = time.monotonic()
    pending = PendingScores(scorer, request, torch.device("cpu"))
    columns = {"score": pending(), **pending.terms}
    remarks = pending.remarks()
    seconds = format_seconds(time.monotonic() - start)
    failed = {name: {row for row, one in enumerate(said) if one.error} for name, said in pending.verdicts.items()}
    failed["score"] = set(pending.failures)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    for row in sorted(range(len(table)), key=lambda row: row not in pending.failures)[:show]:
        texts = {name: f"{values[row]:.4g}" if values[row].isfinite() else "none" for name, values in columns.items()}
        cells = (f"{name} {'failed' if row in failed[name] else text}" for name, text in texts.items())
        console.print(f"{table.where(row)}: {', '.join(cells)}")
        console.print(f"    {excerpt(repr(pending.request.completions[row]))}")
        if details := remarks[row].get("details"):
            console.print(f"    {json.dumps(details, ensure_ascii=False)}")
        if row in pending.failures:
            console.print(f"    {pending.failures[row]}")
    console.print()
    for name, values in columns.items():
        found = values[values.isfinite()]
        spread = f"; mean {found.mean():.4g}, lowest {found.min():.4g}, highest {found.max():.4g}" if len(found) else ""
        console.print(f"{name}: {len(found)} of {counted(len(values), 'row')}{spread}")
    for kind, count in Counter(error.split(": ")[0] for error in pending.failures.values()).most_common():
        console.print(f"failed on {counted(count, 'row')}: {kind}")
    if unscored := len(pending.unscored.keys() - pending.failures.keys()):
        console.print(f"no score, but no failure: {counted(unscored, 'row')} (None, NaN or infinity; not trained on)")
    console.print(f"Took {seconds}, with {counted(pending.num_retries, 'retry', 'retries')}.")
    if pending.failures:
        raise typer.Exit(1)


def _refuse_model(path: str) -> Any:
    raise ConfigError(
        f"coati reward check needs a reward function, got the reward model {path!r}. Remove it with --set."
    )


def _request(rows: Sequence[Row], config: RunSettings) -> "RewardRequest":
    import torch

    from coati.rewards import RewardRequest

    completions: list[Any] = [row.get("completion", row.get("response")) for row in rows]
    if not all(isinstance(text, str) for text in completions):
        raise DataError(
            f"Every row must have a string column completion or response, got the columns {', '.join(rows[0])}."
        )
    prompts = [row[config.prompts.column] for row in rows]
    # Files that runs write hold the dataset's columns in a nested table.
    columns = [inner if isinstance(inner := row.get("columns"), Mapping) else row for row in rows]
    names = {name for one in columns for name in one} - {config.prompts.column, "completion", "response"}
    nothing = torch.zeros(len(rows), 0, dtype=torch.long)
    request = RewardRequest(
        prompts=[text if isinstance(text, str) else "\n".join(part["content"] for part in text) for text in prompts],
        completions=completions,
        columns={name: [one.get(name) for one in columns] for name in sorted(names)},
        sequences=nothing,
        attention_mask=nothing,
        action_mask=nothing.bool(),
    )
    if Path(config.tokenizer_path).is_dir():
        from coati.build import load_tokenizer

        request.completion_ids = load_tokenizer(config)(completions, add_special_tokens=False)["input_ids"]
    return request

"""`coati reward check REWARD --rows FILE`."""

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from coati.config import RunSettings, build_config, load_config
from coati.counting import counted, format_seconds
from coati.errors import ConfigError, DataError
from coati.prompts.table import Row, load_prompts
from coati.reward_functions.calling import excerpt
from coati.rewards import PendingScores, RewardRequest, RewardScorer, build_reward

_COMPLETION = ("completion", "response")  # what files of rows, and of runs, call it


def run_reward_check(source: str, rows: Path, *, overrides: Sequence[str], show: int) -> None:
    """Print the score, terms, details and failures of rows, and a summary; exit with 1 if the reward failed on one."""
    if source.endswith(".toml"):
        config = load_config(Path(source), overrides)
    else:
        unused = {"model": {"path": "none"}, "prompts": {"path": str(rows)}}
        config = build_config({**unused, "reward": {"function": source}}, overrides)
    settings, table = config.reward, load_prompts(rows, column=config.prompts.column)
    reward = build_reward(settings, load_model=_refuse_model, search_paths=config.reward_search_paths)
    scorer = RewardScorer(reward, None, retries=settings.retries, max_quarantined=1)
    scorer.working.update(part.label for part in settings.parts)  # each row has its own failure, even if all fail
    start = time.monotonic()
    pending = PendingScores(scorer, _request(table.rows, config), torch.device("cpu"), may_fail=True)
    scores = pending()
    seconds = time.monotonic() - start
    console = Console(highlight=False, markup=False, soft_wrap=True)
    columns = {"score": scores, **pending.terms}
    shown = Table("row", *columns, "completion", "details, or why it failed")
    for row in sorted(range(len(scores)), key=lambda row: row not in pending.failures)[:show]:
        said = pending.failures.get(row) or json.dumps(pending.details[row], ensure_ascii=False)
        numbers = (f"{float(values[row]):.4g}" for values in columns.values())
        shown.add_row(table.where(row), *numbers, excerpt(repr(pending.request.completions[row])), said)
    console.print(shown)
    for name, values in columns.items():
        console.print(f"{name}: {_summary(values)}")
    kinds = Counter(error.split(": ")[0] for error in pending.failures.values())
    for kind, count in kinds.most_common():
        console.print(f"failed on {counted(count, 'row')}: {kind}")
    console.print(
        f"{counted(len(scores), 'row')} in {format_seconds(seconds)}, asked again {pending.num_retries} times."
    )
    if pending.failures:
        raise typer.Exit(1)


def _summary(values: Tensor) -> str:
    found = values[values.isfinite()]
    scored = f"{len(found)} of {len(values)} rows have one"
    if not len(found):
        return scored
    return f"{scored}; mean {found.mean():.4g}, lowest {found.min():.4g}, highest {found.max():.4g}"


def _refuse_model(path: str) -> Any:
    raise ConfigError(f"coati reward check asks functions, not the reward model {path!r}. Take it out with --set.")


def _request(rows: Sequence[Row], config: RunSettings) -> RewardRequest:
    prompts, completions, columns = [], [], []
    for row in rows:
        key = next((name for name in _COMPLETION if isinstance(row.get(name), str)), None)
        if key is None:
            raise DataError(f"every row must have a text called {' or '.join(_COMPLETION)}, got {', '.join(row)}.")
        prompt = row[config.prompts.column]
        prompts.append(prompt if isinstance(prompt, str) else "\n".join(str(part["content"]) for part in prompt))
        completions.append(row[key])
        inner = row.get("columns")
        columns.append(inner if isinstance(inner, Mapping) else {**row, key: None})
    names = {name for one in columns for name in one} - {config.prompts.column, *_COMPLETION}
    nothing = torch.zeros(len(rows), 0, dtype=torch.long)
    request = RewardRequest(
        prompts=prompts,
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

"""A table of prompts, checked row by row when it is loaded: nothing odd turns up in the middle of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coati.errors import DataError
from coati.prompts.readers import Row, read_csv, read_dataset, read_json, read_jsonl, read_parquet


@dataclass(frozen=True, kw_only=True)
class PromptTable:
    """Rows of a dataset, one of whose columns holds the prompts.

    Example:
        >>> table = PromptTable(rows=[{"prompt": "the film", "topic": "film"}], source="here")
        >>> len(table), table.columns, table.other_columns
        (1, ['prompt', 'topic'], ['topic'])
    """

    rows: Sequence[Row]
    column: str = "prompt"
    """The column with the prompts: a non-empty text, or a list of chat messages."""
    source: str = "the table"
    """What errors call the table: its path or name."""

    def __post_init__(self) -> None:
        check_rows(self.rows, column=self.column, source=self.source)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def columns(self) -> list[str]:
        """All columns, in order of first appearance; a row that lacks one has None there."""
        return list(dict.fromkeys(name for row in self.rows for name in row))

    @property
    def other_columns(self) -> list[str]:
        """All columns but the prompts."""
        return [name for name in self.columns if name != self.column]


def load_prompts(path: str | Path, *, split: str = "train", column: str = "prompt") -> PromptTable:
    """Load prompts from a .jsonl, .json, .csv or .parquet file, a `datasets` folder, or a `datasets` name.

    A single file is one split, whatever `split` says, except for a .json file that holds several by name.

    Raises:
        DataError: when there is nothing to read, or a row has no proper prompt.
    """
    file = Path(path)
    if file.suffix == ".jsonl":
        rows = read_jsonl(file)
    elif file.suffix == ".json":
        rows = read_json(file, split=split)
    elif file.suffix == ".csv":
        rows = read_csv(file)
    elif file.suffix == ".parquet":
        rows = read_parquet(file)
    else:
        rows = read_dataset(str(path), split=split)
    return PromptTable(rows=rows, column=column, source=str(path))


def check_rows(rows: Sequence[Row], *, column: str, source: str) -> None:
    """Check that there are rows and that each has a proper prompt.

    Raises:
        DataError: naming the first row that is wrong.
    """
    if not rows:
        raise DataError(f"{source} must have at least one row, got none. Add prompts, or check prompts.split.")
    for index, row in enumerate(rows):
        if column not in row:
            raise DataError(
                f"{source} must have the column {column!r} in every row, got row {index} with the columns "
                f"{', '.join(map(str, row)) or '(none)'}. Set prompts.column to the one that holds the "
                "prompts."
            )
        problem = _prompt_problem(row[column])
        if problem:
            raise DataError(
                f"{source}, row {index}: {column!r} must be a non-empty text or a list of chat messages, "
                "each with "
                f"role and content, got {problem}. Correct the row, or set prompts.column to another column."
            )


def _prompt_problem(prompt: Any) -> str:
    """Say what came instead of a prompt; empty when it is one."""
    if isinstance(prompt, str):
        return "" if prompt else "an empty text"
    if not isinstance(prompt, list):
        return f"{str(prompt)[:60]!r} ({type(prompt).__name__})"
    if not prompt:
        return "an empty list"
    for number, message in enumerate(prompt):
        if not isinstance(message, dict):
            return f"a list whose element {number} is a {type(message).__name__}"
        if not isinstance(message.get("role"), str) or message.get("content") is None:
            return f"a list whose message {number} has the keys {', '.join(map(str, message)) or '(none)'}"
    return ""

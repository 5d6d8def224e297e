"""Loads a table of prompts. JSONL is read here, everything else by `datasets`, which the extra `data` installs."""

import importlib
import importlib.util
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from coati.errors import DataError

Row = dict[str, Any]

FILE_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")


@dataclass(frozen=True, kw_only=True)
class PromptTable:
    """Rows of a dataset, with one column of prompts. Raises DataError if a row has no valid prompt."""

    rows: Sequence[Row]
    column: str = "prompt"  # the column of prompts, each a non-empty text or a list of chat messages
    source: str = "the table"  # path or name of the table, for errors
    lines: Sequence[int] = ()  # line number of each row in its file, for errors; empty if rows are not lines

    def __post_init__(self) -> None:
        if not self.rows:
            splits = "" if self.source.endswith(".jsonl") else ", or check prompts.split"
            raise DataError(f"{self.source} has no rows. Add prompts{splits}.")
        for index, row in enumerate(self.rows):
            if self.column not in row:
                raise DataError(
                    f"{self.where(index)} has no column {self.column!r}; its columns are "
                    f"{', '.join(map(str, row)) or '(none)'}. Set prompts.column to the one that holds the prompts."
                )
            if problem := _prompt_problem(row[self.column]):
                raise DataError(
                    f"{self.where(index)}: {self.column!r} must be a non-empty text or a list of chat messages, each "
                    f"with role and content, got {problem}. Correct the row, or set prompts.column."
                )

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def other_columns(self) -> list[str]:
        """All columns except the prompts, in order of first appearance. Rows need not have all of them."""
        return list(dict.fromkeys(name for row in self.rows for name in row if name != self.column))

    def where(self, row: int) -> str:
        """Return the location of a row, for errors."""
        return f"{self.source}:{self.lines[row]}" if self.lines else f"{self.source}, row {row}"


def looks_local(path: str) -> bool:
    """Return whether a model or dataset path is local rather than a hub name.

    A hub name has at most one slash (`owner/name`). A path is local if it exists, starts like a path, has the suffix of
    a prompt file, has more slashes, or lies in an existing folder.
    """
    if path.startswith(("/", ".", "~")) or path.endswith(FILE_SUFFIXES) or path.count("/") > 1 or Path(path).exists():
        return True
    return "/" in path and Path(path).parent.is_dir()


def load_prompts(path: str | Path, *, split: str = "train", subset: str = "", column: str = "prompt") -> PromptTable:
    """Load prompts from a .jsonl, .json, .csv or .parquet file, or from a `datasets` folder or hub name.

    A single file is one split, so `split` is ignored. `subset` is the configuration of a hub dataset. Raises DataError
    if there are no prompts, or if the `datasets` package is needed and not installed.
    """
    file, path = Path(path), str(path)
    is_file = file.suffix in FILE_SUFFIXES
    if (is_file and not file.is_file()) or (not is_file and looks_local(path) and not file.is_dir()):
        rule = "which does not exist" if is_file else f"which is neither a folder nor a {'/'.join(FILE_SUFFIXES)} file"
        raise DataError(
            f"prompts.path is {path!r}, {rule}. Check the path. A relative path is looked up in the folder of the TOML "
            f"file, then in {Path.cwd()}."
        )
    if file.suffix == ".jsonl":
        rows = _read_jsonl(file)
        return PromptTable(rows=list(rows.values()), column=column, source=path, lines=list(rows))
    if importlib.util.find_spec("datasets") is None:
        raise DataError(
            f"prompts.path {path!r} needs the datasets package. Run pip install '.[data]' in your clone of "
            "coati, or convert the prompts to JSONL, which needs no package."
        )
    return PromptTable(rows=_read_dataset(path, split, subset), column=column, source=path)


def _read_jsonl(path: Path) -> dict[int, Row]:
    """Return the rows by line number, without blank lines."""
    rows: dict[int, Row] = {}
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    rows[number] = _parse_line(line, f"{path}:{number}")
    except OSError as error:
        raise DataError(f"prompts.path {str(path)!r} cannot be read: {error.strerror}.") from None
    return rows


def _parse_line(line: bytes, where: str) -> Row:
    try:
        row = json.loads(line.decode("utf-8-sig"))  # -sig: some editors write a byte-order mark
        problem = None if isinstance(row, dict) else f"a {type(row).__name__}"
    except UnicodeDecodeError as error:
        problem = f"{error.reason} at byte {error.start} of the line"
    except (ValueError, RecursionError) as error:
        problem = str(error)
    if problem is not None:
        raise DataError(
            f'{where} must be a JSON object in UTF-8, like {{"prompt": "the film"}}, got {problem}. Write one per line.'
        )
    return row  # type: ignore[no-any-return]


def _read_dataset(name: str, split: str, subset: str) -> list[Row]:
    """Read a split with `datasets`: a file, a `save_to_disk` folder, a folder of data files, or a hub name."""
    path = Path(name)
    try:
        datasets = importlib.import_module("datasets")
        if path.suffix in FILE_SUFFIXES:
            return _read_file(datasets, path)
        is_saved = any((path / marker).is_file() for marker in ("state.json", "dataset_dict.json"))
        data = datasets.load_from_disk(name) if is_saved else datasets.load_dataset(name, subset or None)
        if isinstance(data, dict) and split in data:
            data = data[split]
    except DataError:
        raise
    except Exception as error:  # `datasets` raises dozens of types
        cause = error.__cause__ or error
        raise DataError(
            f"prompts.path {name!r} cannot be loaded by `datasets`: {type(cause).__name__}: {str(cause)[:300]}. Check "
            "the path or name, prompts.subset, and the network."
        ) from error
    if isinstance(data, dict):
        raise DataError(f"{name!r} has no split {split!r}. Set prompts.split to one of {', '.join(data)}.")
    rows: list[Row] = data.to_list()
    return rows


def _read_file(datasets: Any, path: Path) -> list[Row]:
    kind = path.suffix.removeprefix(".")
    options = {"keep_default_na": False} if kind == "csv" else {}  # "NA" and "null" are texts
    # A temporary cache: the rows are read once, and the file may change before the next run.
    with tempfile.TemporaryDirectory(prefix="coati-prompts-") as cache:
        loaded = datasets.load_dataset(kind, data_files=str(path), cache_dir=cache, **options)
        rows: list[Row] = loaded["train"].to_list()
    if rows and "__index_level_0__" in rows[0]:
        raise DataError(f"{path} has more values in a row than columns. Put values that contain commas in quotes.")
    return rows


def _prompt_problem(prompt: Any) -> str | None:
    if isinstance(prompt, str):
        return _text_problem(prompt)
    if not isinstance(prompt, list):
        return f"{str(prompt)[:60]!r} ({type(prompt).__name__})"
    if not prompt:
        return "an empty list"
    for number, message in enumerate(prompt):
        if not isinstance(message, dict):
            return f"a list whose element {number} is a {type(message).__name__}"
        if not isinstance(message.get("role"), str) or message.get("content") is None:
            return f"a list whose message {number} has the keys {', '.join(map(str, message)) or '(none)'}"
        if isinstance(content := message["content"], str) and content and (problem := _text_problem(content)):
            return f"{problem} in message {number}"
    return None


def _text_problem(text: str) -> str | None:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can escape half of a surrogate pair, which no tokenizer accepts
        return f"a lone surrogate ({text[error.start]!a} at character {error.start})"
    return None if text else "an empty text"

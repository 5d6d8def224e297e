"""Rows from prompt files. JSONL, JSON and CSV need the standard library; the rest comes with `coati[data]`.

Every reader returns a list of dicts, or raises a `DataError` that names the file and, where there is one, the
line.
"""

from __future__ import annotations

import csv
import importlib
import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

from coati.errors import DataError

Row = dict[str, Any]

FILE_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
"""What a single prompt file may be called."""


def read_jsonl(path: Path, *, limit: int | None = None) -> list[Row]:
    """Read one JSON object per line; blank lines do not count. `limit` stops after so many rows."""
    rows: list[Row] = []
    with _open_text(path) as file:
        for number, line in enumerate(_lines(path, file), start=1):
            if limit is not None and len(rows) >= limit:
                break
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(
                    f"{path}:{number} must be one JSON object, got {_excerpt(line)} ({error.msg} at column "
                    f'{error.colno}). Write one object per line, for example {{"prompt": "the film"}}.'
                ) from None
            rows.append(_check_object(row, f"{path}:{number}"))
    return rows


def read_json(path: Path, *, split: str = "train", limit: int | None = None) -> list[Row]:
    """Read a JSON list of objects, or an object that holds such a list under the name of the split."""
    with _open_text(path) as file:
        try:
            data = json.load(file)
        except json.JSONDecodeError as error:
            raise DataError(
                f"{path}:{error.lineno} must be valid JSON, got {error.msg} at column {error.colno}. "
                "Write a list of objects, or use .jsonl with one object per line."
            ) from None
        except UnicodeDecodeError as error:
            raise _not_text(path, error) from None
    if isinstance(data, dict) and isinstance(data.get(split), list):
        data = data[split]
    if not isinstance(data, list):
        keys = f" with the keys {', '.join(data)}" if isinstance(data, dict) else ""
        raise DataError(
            f"{path} must hold a list of objects, or one under {split!r}, got a {type(data).__name__}{keys}. "
            'Write [{"prompt": "the film"}, …], or set prompts.split.'
        )
    return [_check_object(row, f"{path}, row {index}") for index, row in enumerate(data[:limit])]


def read_csv(path: Path, *, limit: int | None = None) -> list[Row]:
    """Read a CSV file whose first line names the columns. Every value is a text."""
    with _open_text(path, newline="") as file:
        reader = csv.DictReader(file)
        rows: list[Row] = []
        try:
            for row in islice(reader, limit):
                if None in row or None in row.values():
                    raise DataError(
                        f"{path}:{reader.line_num} must have one value for each of the "
                        f"{len(reader.fieldnames or ())} "
                        f"columns, got {'more' if None in row else 'fewer'}. Put values that contain commas "
                        "in quotes."
                    )
                rows.append(dict(row))
        except csv.Error as error:
            raise DataError(
                f"{path}:{reader.line_num} must be valid CSV, got: {error}. Check the quotes of that line."
            ) from None
        except UnicodeDecodeError as error:
            raise _not_text(path, error) from None
    return rows


def read_parquet(path: Path) -> list[Row]:
    """Read a Parquet file whole."""
    parquet = _import_data_module("pyarrow.parquet", str(path))
    try:
        rows: list[Row] = parquet.read_table(path).to_pylist()
    except (OSError, ValueError) as error:  # ArrowInvalid is a ValueError
        raise DataError(f"{path} must be a Parquet file, got: {error}. Write it again, or check the path.") from None
    return rows


def read_dataset(name: str, *, split: str) -> list[Row]:
    """Read a split through `datasets`: a `save_to_disk` folder, a folder of data files, or a hub name."""
    datasets = _import_data_module("datasets", name)
    folder = Path(name)
    saved = any((folder / marker).is_file() for marker in ("state.json", "dataset_dict.json"))
    try:
        data = datasets.load_from_disk(name) if saved else datasets.load_dataset(name)
    except Exception as error:  # the library raises dozens of kinds; each means that there are no prompts
        raise DataError(
            f"prompts.path must be a prompt file or something that `datasets` loads, got {name!r}: "
            f"{type(error).__name__}: {_excerpt(str(error), 300)}. "
            f"Check the name, the network, or use one of {', '.join(FILE_SUFFIXES)}."
        ) from error
    if isinstance(data, dict):  # several splits
        if split not in data:
            raise DataError(
                f"prompts.split must be one of {', '.join(data)}, the splits of {name!r}, got {split!r}. "
                "Set prompts.split."
            )
        data = data[split]
    return [dict(row) for row in data]


def _import_data_module(module: str, wanted_for: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(
            f"Reading {wanted_for} needs {module.partition('.')[0]}, got {error}. Run pip install "
            "'coati[data]', "
            "or write the prompts as JSONL, which needs nothing."
        ) from None


def _open_text(path: Path, **options: Any) -> Any:
    try:
        return path.open(encoding="utf-8-sig", **options)  # -sig: spreadsheets put a mark in front
    except OSError as error:
        raise DataError(
            f"prompts.path must be a readable file, got {path}: {error.strerror}. Check the path; relative "
            "ones "
            f"count from {Path.cwd()}."
        ) from None


def _lines(path: Path, file: Any) -> Any:
    try:
        yield from file
    except UnicodeDecodeError as error:
        raise _not_text(path, error) from None


def _not_text(path: Path, error: UnicodeDecodeError) -> DataError:
    return DataError(f"{path} must be UTF-8 text, got {error.reason} at byte {error.start}. Save it as UTF-8.")


def _check_object(row: Any, where: str) -> Row:
    if not isinstance(row, dict):
        raise DataError(
            f"{where} must be a JSON object, got {_excerpt(json.dumps(row))}. "
            'Write it with its column names, for example {"prompt": "the film"}.'
        )
    return row


def _excerpt(text: str, length: int = 60) -> str:
    text = text.strip()
    return text if len(text) <= length else text[: length - 1] + "…"


PEEKING_READERS: dict[str, Callable[..., list[Row]]] = {
    ".jsonl": read_jsonl,
    ".json": read_json,
    ".csv": read_csv,
}
"""Readers that can stop after a few rows, by file suffix."""

"""Prompts from every kind of file, and what is said about the bad ones."""

import importlib
import json

import pytest

from coati.errors import DataError
from coati.prompts import PromptTable, load_prompts

ROWS = [{"prompt": "the film", "topic": "film"}, {"prompt": "the plot, too", "topic": "plot"}]
CHAT = [{"role": "user", "content": "the film"}]


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_jsonl_json_and_csv_hold_the_same_rows(tmp_path):
    jsonl = write_jsonl(tmp_path / "a.jsonl", ROWS)
    (tmp_path / "a.json").write_text(json.dumps(ROWS))
    (tmp_path / "b.json").write_text(json.dumps({"train": [], "test": ROWS}))
    # A byte-order mark as spreadsheets write it, and a quoted comma.
    (tmp_path / "a.csv").write_text('\ufeffprompt,topic\nthe film,film\n"the plot, too",plot\n')
    assert load_prompts(jsonl).rows == ROWS
    assert load_prompts(tmp_path / "a.json").rows == ROWS
    assert load_prompts(tmp_path / "b.json", split="test").rows == ROWS
    assert load_prompts(str(tmp_path / "a.csv")).rows == ROWS


def test_blank_lines_do_not_count_but_line_numbers_do(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('\n{"prompt": "a"}\n\n{"prompt": \n')
    with pytest.raises(DataError, match=r"a\.jsonl:4 must be one JSON object.*Write one object per line"):
        load_prompts(path)


def test_parquet_and_datasets_folders(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": CHAT, "answer": 1}, {"prompt": CHAT, "answer": 2}]
    data = datasets.Dataset.from_list(rows)
    data.to_parquet(tmp_path / "a.parquet")
    data.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": data.select([0]), "test": data}).save_to_disk(tmp_path / "several")
    assert load_prompts(tmp_path / "a.parquet").rows == rows
    assert load_prompts(tmp_path / "one").rows == rows
    assert load_prompts(tmp_path / "several", split="test").rows == rows
    assert load_prompts(tmp_path / "several").rows == rows[:1]
    with pytest.raises(DataError, match=r"prompts\.split must be one of train, test.*got 'nope'"):
        load_prompts(tmp_path / "several", split="nope")


def test_a_broken_parquet_file(tmp_path):
    pytest.importorskip("pyarrow")
    (tmp_path / "a.parquet").write_bytes(b"not parquet")
    with pytest.raises(DataError, match=r"a\.parquet must be a Parquet file"):
        load_prompts(tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"gone\.parquet must be a Parquet file"):
        load_prompts(tmp_path / "gone.parquet")


def test_a_folder_of_nothing_is_a_clear_error(tmp_path):
    pytest.importorskip("datasets")
    with pytest.raises(DataError, match="something that `datasets` loads"):
        load_prompts(tmp_path)


@pytest.mark.parametrize("name", ["a.parquet", "owner/dataset"])
def test_without_the_extra_the_error_names_it(tmp_path, monkeypatch, name):
    def refuse(module, *args):
        raise ImportError(f"No module named {module!r}")

    monkeypatch.setattr(importlib, "import_module", refuse)
    with pytest.raises(DataError, match=r"pip install 'coati\[data\]'"):
        load_prompts(name)


def test_missing_file_names_the_folder_it_counts_from(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("gone.jsonl", "gone.json", "gone.csv"):
        with pytest.raises(DataError) as caught:
            load_prompts(name)
        assert name in str(caught.value)
        assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.jsonl", "", "must have at least one row, got none"),
        ("a.csv", "prompt\n", "must have at least one row, got none"),
        ("a.json", "[]", "must have at least one row, got none"),
        ("a.jsonl", "[1]\n", "a.jsonl:1 must be a JSON object, got [1]"),
        ("a.json", "[1]", "row 0 must be a JSON object, got 1"),
        ("a.json", "{", "a.json:1 must be valid JSON"),
        ("a.json", '{"other": [], "x": 1}', "got a dict with the keys other, x"),
        ("a.csv", "prompt,topic\na\n", "a.csv:2 must have one value for each of the 2 columns, got fewer"),
        ("a.csv", "prompt\na,b\n", "got more"),
        ("a.jsonl", '{"text": "a", "label": 1}\n', "got row 0 with the columns text, label"),
        ("a.jsonl", '{"prompt": "a"}\n{"text": "b"}\n', "got row 1 with the columns text"),
        ("a.jsonl", '{"prompt": ""}\n', "row 0: 'prompt' must be a non-empty text"),
        ("a.jsonl", '{"prompt": 7}\n', "got '7' (int)"),
        ("a.jsonl", '{"prompt": null}\n', "got 'None' (NoneType)"),
        ("a.jsonl", '{"prompt": []}\n', "got an empty list"),
        ("a.jsonl", '{"prompt": ["a"]}\n', "element 0 is a str"),
        ("a.jsonl", '{"prompt": [{"role": "user"}]}\n', "message 0 has the keys role"),
    ],
)
def test_bad_files(tmp_path, name, text, expected):
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError) as caught:
        load_prompts(tmp_path / name)
    assert expected in str(caught.value)
    assert str(caught.value).count(". ") >= 1  # the rule and, after it, the remedy


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv"])
def test_text_that_is_not_utf8(tmp_path, name):
    (tmp_path / name).write_bytes(b'prompt\n{"prompt": "\xe9"}')
    if name == "a.jsonl":
        (tmp_path / name).write_bytes(b'{"prompt": "\xe9"}')
    with pytest.raises(DataError, match=r"UTF-8"):
        load_prompts(tmp_path / name)


def test_columns_are_the_union_of_all_rows():
    table = PromptTable(rows=[{"q": "a", "x": 1}, {"y": 2, "q": "b"}], column="q")
    assert table.columns == ["q", "x", "y"]
    assert table.other_columns == ["x", "y"]
    assert len(table) == 2

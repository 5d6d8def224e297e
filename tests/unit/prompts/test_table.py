"""Loading prompts from every kind of file, and the errors for invalid ones."""

import importlib.util
import json

import pytest

from coati.errors import DataError
from coati.prompts.table import PromptTable, load_prompts

ROWS = [{"prompt": "the film", "topic": "film"}, {"prompt": "the plot, too", "topic": "null"}]
CHAT = [{"role": "user", "content": "the film"}]


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_jsonl_json_and_csv_give_the_same_rows(tmp_path):
    pytest.importorskip("datasets")
    jsonl = write_jsonl(tmp_path / "a.jsonl", ROWS)
    (tmp_path / "a.json").write_text(json.dumps(ROWS))
    # With a byte-order mark, as spreadsheets write it, and a quoted comma.
    (tmp_path / "a.csv").write_text('\ufeffprompt,topic\nthe film,film\n"the plot, too",null\n')
    assert load_prompts(jsonl).rows == ROWS
    assert load_prompts(tmp_path / "a.json").rows == ROWS
    assert load_prompts(str(tmp_path / "a.csv")).rows == ROWS


def test_a_file_that_changed_is_read_again(tmp_path):
    pytest.importorskip("datasets")
    for rows in (ROWS, ROWS[:1]):
        (tmp_path / "a.json").write_text(json.dumps(rows))
        assert load_prompts(tmp_path / "a.json").rows == rows


def test_blank_lines_are_skipped_but_count_for_line_numbers(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('\n{"prompt": "a"}\n\n{"prompt": \n')
    with pytest.raises(DataError, match=r"a\.jsonl:4 "):
        load_prompts(path)
    path.write_text('\n{"prompt": "a"}\n\n{"prompt": 7}\n')
    with pytest.raises(DataError, match=r"a\.jsonl:4: "):
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
    with pytest.raises(DataError, match=r"prompts\.split.*train, test"):
        load_prompts(tmp_path / "several", split="nope")


def test_a_subset_is_loaded_by_name(monkeypatch):
    datasets = pytest.importorskip("datasets")
    asked = []

    def load_dataset(*names):
        asked.append(names)
        return {"train": datasets.Dataset.from_list(ROWS)}

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert load_prompts("owner/data", subset="main").rows == ROWS
    assert load_prompts("owner/data").rows == ROWS
    assert asked == [("owner/data", "main"), ("owner/data", None)]


def test_a_damaged_parquet_file_and_an_empty_folder(tmp_path):
    pytest.importorskip("datasets")
    (tmp_path / "a.parquet").write_bytes(b"not parquet")
    for path in (tmp_path / "a.parquet", tmp_path):
        with pytest.raises(DataError, match="cannot be loaded"):
            load_prompts(path)


@pytest.mark.parametrize("name", ["a.csv", "owner/dataset"])
def test_the_error_names_the_missing_extra(tmp_path, monkeypatch, name):
    (tmp_path / "a.csv").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"pip install '\.\[data\]'"):
        load_prompts(name)


def test_the_error_for_a_missing_file_names_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("gone.jsonl", "gone.json", "gone.csv", "gone.parquet"):
        with pytest.raises(DataError) as caught:
            load_prompts(name)
        assert name in str(caught.value)
        assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "no rows"),
        ("[1]\n", "a.jsonl:1 "),
        ('{"prompt": ' * 100_000, "a.jsonl:1 "),
        ('{"text": "a", "label": 1}\n', "text, label"),
        ('{"prompt": "a"}\n{"text": "b"}\n', "a.jsonl:2 "),
        ('{"prompt": ""}\n', "empty text"),
        ('{"prompt": 7}\n', "'7' (int)"),
        ('{"prompt": null}\n', "NoneType"),
        ('{"prompt": []}\n', "empty list"),
        ('{"prompt": ["a"]}\n', "element 0 is a str"),
        ('{"prompt": [{"role": "user"}]}\n', "message 0 has the keys role"),
        ('{"prompt": "a"}\n{"prompt": "b\\u0000\\ud800"}\n', "a.jsonl:2: 'prompt'"),
        ('{"prompt": [{"role": "user", "content": "\\ud800"}]}\n', "surrogate"),
    ],
)
def test_bad_jsonl(tmp_path, text, expected):
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(DataError) as caught:
        load_prompts(tmp_path / "a.jsonl")
    assert expected in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.csv", "prompt\n", "a.csv"),
        ("a.csv", "prompt\na,b\n", "quotes"),
        ("a.csv", "topic,prompt\na\n", "empty text"),
        ("a.json", "[]", "a.json"),
        ("a.json", "{", "a.json"),
        ("a.json", "[1]", "'prompt'"),
        ("a.json", '{"train": [1]}', "'prompt'"),
        ("a.json", '{"other": [], "x": 1}', "other, x"),
    ],
)
def test_bad_files_of_other_formats(tmp_path, name, text, expected):
    pytest.importorskip("datasets")
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError) as caught:
        load_prompts(tmp_path / name)
    assert expected in str(caught.value)


def test_text_that_is_not_utf8_is_named_by_its_line(tmp_path):
    """The line number counts from the start of the file, not of a chunk."""
    good = b'{"prompt": "%s"}\n' % (b"a" * 100)
    (tmp_path / "a.jsonl").write_bytes(good * 1000 + b'{"prompt": "\xe9"}')
    with pytest.raises(DataError, match=r"a\.jsonl:1001 .*UTF-8.* byte 12 "):
        load_prompts(tmp_path / "a.jsonl")


def test_columns_are_the_union_of_all_rows():
    table = PromptTable(rows=[{"q": "a", "x": 1}, {"y": 2, "q": "b"}], column="q")
    assert table.other_columns == ["x", "y"]
    assert len(table) == 2

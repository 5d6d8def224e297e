"""Files of metrics: writing and reading them back."""

import json
import math
import sys

import pytest

from coati.errors import ConfigError, DataError
from coati.monitor import load_metrics, read_jsonl
from coati.monitor.metrics import append_jsonl


def test_lines_are_on_disk_when_the_call_returns(tmp_path):
    path = tmp_path / "samples.jsonl"
    append_jsonl(path, [{"text": "größer\nthan two lines\u2028or three"}, {"text": "a\udc80b"}])
    assert [row["text"] for row in read_jsonl(path)] == ["größer\nthan two lines\u2028or three", "a\udc80b"]
    assert "größer" in path.read_text(errors="replace")


def test_nan_and_infinity_are_written_as_null_and_read_as_nan(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append_jsonl(path, [{"policy/loss": math.nan, "policy/ratio_max": math.inf, "value/loss": 1.0}])
    raw = json.loads(path.read_text(), parse_constant=pytest.fail)  # strict: no NaN, no Infinity
    assert (raw["policy/loss"], raw["policy/ratio_max"]) == (None, None)
    (record,) = read_jsonl(path)
    assert math.isnan(record["policy/loss"])
    assert record["value/loss"] == 1.0


def test_an_incomplete_last_line_is_ignored(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n{"step": 1, "rew')
    assert [record["step"] for record in read_jsonl(path)] == [0]


def test_metrics_load_as_a_data_frame_indexed_by_step(tmp_path):
    pandas = pytest.importorskip("pandas")
    rows = [{"step": 1, "version": 0, "policy/loss": None}, {"step": 2, "version": 0, "policy/loss": 0.5}]
    append_jsonl(tmp_path / "metrics.jsonl", rows)
    table = load_metrics(tmp_path)
    assert isinstance(table, pandas.DataFrame)
    assert list(table.index) == [1, 2]
    assert table["policy/loss"].isna().tolist() == [True, False]
    append_jsonl(tmp_path / "metrics.jsonl", [{"step": 2, "version": 1, "eval/held-out/avg@1": 0.5}])
    table = load_metrics(tmp_path)
    assert list(table.index) == [1, 2], "the final model's evaluation is part of the last step"
    assert table.loc[2, ["version", "policy/loss", "eval/held-out/avg@1"]].tolist() == [0, 0.5, 0.5]


def test_a_run_without_metrics_yet_loads_as_an_empty_data_frame(tmp_path):
    pytest.importorskip("pandas")
    (tmp_path / "metrics.jsonl").touch()
    table = load_metrics(tmp_path)
    assert (table.index.name, len(table)) == ("step", 0)


def test_without_pandas_the_error_names_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ConfigError, match="pip install pandas"):
        load_metrics(tmp_path)


@pytest.mark.parametrize("damage", [b"garbage", b"[1]", b""])
def test_the_error_for_a_damaged_line_names_the_line(tmp_path, damage):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n' + damage + b'\n{"step": 2}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 2: every line must be a JSON object"):
        read_jsonl(path)

"""Metrics reach the disk, and losing a log does not lose the run."""

import json
import logging
import math
import subprocess
import sys

import pytest

from coati.errors import ConfigError, DataError
from coati.monitor.trackers import JsonlTracker, TensorBoardTracker, TrackerGroup, read_jsonl


class FakeTracker:
    """Remembers what it was given; fails from the call named in `breaks` on, as on a full disk."""

    def __init__(self, breaks: str = "") -> None:
        self.breaks = breaks
        self.seen = []
        self.calls = 0

    def _take(self, what, *args):
        self.calls += 1
        if what == self.breaks:
            raise OSError(28, "No space left on device")
        self.seen.append((what, *args))

    def log(self, step, metrics):
        self._take("log", step, dict(metrics))

    def text(self, step, tag, text):
        self._take("text", step, tag, text)

    def close(self):
        self._take("close")


def test_a_line_is_on_disk_when_the_call_returns(tmp_path):
    tracker = JsonlTracker(tmp_path / "run" / "metrics.jsonl")
    tracker.log(3, {"reward/mean": 0.5})
    tracker.text(3, "samples", "größer\nals zwei Zeilen\u2028oder drei")
    metrics, text = read_jsonl(tracker.path)  # not closed yet
    assert metrics.pop("time") > 1.7e9
    assert metrics == {"step": 3, "reward/mean": 0.5}
    assert (text["tag"], text["text"]) == ("samples", "größer\nals zwei Zeilen\u2028oder drei")
    tracker.close()
    tracker.close()


def test_what_json_cannot_say_is_null_and_comes_back_as_nan(tmp_path):
    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    tracker.log(0, {"policy/loss": math.nan, "policy/ratio_max": math.inf, "value/loss": 1})
    tracker.close()
    raw = json.loads(tracker.path.read_text(), parse_constant=pytest.fail)  # strict: no NaN, no Infinity
    assert raw["policy/loss"] is None
    assert raw["policy/ratio_max"] is None
    (record,) = read_jsonl(tracker.path)
    assert math.isnan(record["policy/loss"])
    assert record["value/loss"] == 1.0


def test_text_cut_inside_a_character_is_written(tmp_path):
    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    tracker.text(0, "samples", "a\udc80b")
    tracker.close()
    assert read_jsonl(tracker.path)[0]["text"] == "a\udc80b"


def test_a_torn_last_line_is_cut_off_when_the_file_is_continued(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n{"step": 1, "rew')
    assert [record["step"] for record in read_jsonl(path)] == [0]
    with caplog.at_level(logging.WARNING):
        tracker = JsonlTracker(path)
    assert "torn line of 16 bytes" in caplog.text
    tracker.log(2, {})
    tracker.close()
    assert [record["step"] for record in read_jsonl(path)] == [0, 2]


@pytest.mark.parametrize("tail", [b'{"step": 1}', b'{"step": 1}\n', b""])
def test_a_whole_last_line_is_kept_when_the_file_is_continued(tmp_path, tail, caplog):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n' + tail)
    tracker = JsonlTracker(path)
    tracker.log(2, {})
    tracker.close()
    assert [record["step"] for record in read_jsonl(path)] == ([0, 1, 2] if tail else [0, 2])
    assert not caplog.records


@pytest.mark.parametrize("damage", [b"garbage", b"[1]", b""])
def test_a_damaged_line_in_the_middle_is_named(tmp_path, damage):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n' + damage + b'\n{"step": 2}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 2: every line must be a JSON object"):
        read_jsonl(path)


def test_a_half_written_line_is_taken_back(tmp_path):
    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    tracker.log(0, {})
    tracker._file = DiskThatFillsUp(tracker._file)
    with pytest.raises(OSError, match="No space left"):
        tracker.log(1, {"reward/mean": 0.5})
    tracker._file = tracker._file.real  # somebody freed the disk
    tracker.log(2, {})
    tracker.close()
    assert [record["step"] for record in read_jsonl(tracker.path)] == [0, 2]


class DiskThatFillsUp:
    """Takes five bytes, then no more."""

    def __init__(self, real) -> None:
        self.real = real
        self.room = 5

    def write(self, data):
        if not self.room:
            raise OSError(28, "No space left on device")
        written, self.room = self.real.write(data[: self.room]), 0
        return written

    def __getattr__(self, name):
        return getattr(self.real, name)


def test_a_metric_must_not_take_the_name_of_a_key(tmp_path):
    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    with pytest.raises(ConfigError, match="must not be called 'step'"):
        TrackerGroup([tracker]).log(0, {"step": 1.0})
    tracker.close()


@pytest.mark.parametrize("breaks", ["log", "text"])
def test_a_tracker_that_fails_is_reported_once_and_dropped(breaks, caplog):
    good, bad = FakeTracker(), FakeTracker(breaks=breaks)
    group = TrackerGroup([bad, good])
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            group.log(step, {"reward/mean": 0.5})
            group.text(step, "samples", "hello")
    assert len(caplog.records) == 1
    assert f"FakeTracker.{breaks} failed with OSError" in caplog.text
    assert "No space left on device" in caplog.text
    assert group.trackers == (good,)
    assert bad.seen[-1] == ("close",)
    assert good.seen[:2] == [("log", 0, {"reward/mean": 0.5}), ("text", 0, "samples", "hello")]
    assert len(good.seen) == 6


def test_a_tracker_that_cannot_close_does_not_keep_the_others_open(caplog):
    good, bad = FakeTracker(), FakeTracker(breaks="close")
    TrackerGroup([bad, good]).close()
    assert good.seen == [("close",)]
    assert bad.calls == 1
    assert "FakeTracker.close failed" in caplog.text


def test_tensorboard_reads_back_what_was_logged(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    tracker = TensorBoardTracker(tmp_path)
    tracker.log(1, {"reward/mean": 0.25})
    tracker.log(2, {"reward/mean": 0.5})
    tracker.text(2, "samples", "hello")
    tracker.close()
    events = accumulator.EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5)]
    assert "samples/text_summary" in events.Tags()["tensors"]


def test_without_tensorboard_the_error_names_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"pip install 'coati\[tensorboard\]'"):
        TensorBoardTracker(tmp_path)


def test_monitor_and_callbacks_import_neither_torch_nor_rich_nor_ray():
    check = (
        "import sys, coati.monitor, coati.ray.callbacks; "
        "print([name for name in ('torch', 'rich', 'ray') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr

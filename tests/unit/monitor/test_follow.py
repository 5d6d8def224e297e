"""What a run sends to trackers, and that a tracker that fails does not affect the run."""

import json
import os
import subprocess
import sys
import threading

import pytest

import coati
from coati.build import check_inputs
from coati.config import build_config, dump_config
from coati.errors import ConfigError
from coati.monitor import RunLog, read_jsonl
from coati.monitor import follow as follow_module
from coati.monitor.follow import RowReader, following
from coati.monitor.metrics import append_jsonl, cut_jsonl

SECTIONS = {"model": {"path": "m"}, "prompts": {"path": "p.jsonl"}, "reward": {"function": "r:f"}}


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """Wait long: a tracker's process has low priority, and the test machine may be busy."""
    monkeypatch.setattr(follow_module, "_WAIT_SECONDS", 300.0)


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    (path / "config.toml").write_text(dump_config(build_config({**SECTIONS, "run": {"name": "film"}})))
    return path


class FakeTracker:
    """Records its calls; the method that `breaks` names raises."""

    def __init__(self, breaks=""):
        self.breaks = breaks
        self.logged, self.tables, self.closed = [], [], []

    def log(self, step, metrics):
        self._may_fail("log")
        self.logged.append((step, dict(metrics)))

    def samples(self, step, samples):
        self._may_fail("samples")
        self.tables.append((step, [sample["response"] for sample in samples]))

    def close(self, failed):
        self._may_fail("close")
        self.closed.append(failed)

    def _may_fail(self, what):
        if what == self.breaks:
            raise OSError(28, "No space left on device")


def sample(version, text):
    return {"version": version, "prompt": "the film", "response": text, "reward": 0.5, "sample_id": version}


def write_row(folder, step, version, *, time, texts=(), **metrics):
    """Write as a run does: the samples of a version, then the row of its last step."""
    if texts:
        append_jsonl(folder / "samples.jsonl", [sample(version, text) for text in texts])
        metrics["maker/samples"] = 4.0
    append_jsonl(folder / "metrics.jsonl", [{"step": step, "version": version, "time": time, **metrics}])


def steps_read(reader):
    return [(row["step"], [sample["response"] for sample in samples]) for row, samples in reader.read()]


def test_each_row_is_read_once_with_the_samples_of_its_version(folder):
    reader = RowReader(folder)
    assert steps_read(reader) == []  # nothing is written yet
    write_row(folder, 1, 0, time=1.0)
    append_jsonl(folder / "samples.jsonl", [sample(0, "a"), sample(0, "b"), sample(1, "later")])
    append_jsonl(folder / "metrics.jsonl", [{"step": 2, "version": 0, "time": 2.0, "maker/samples": 2.0}])
    assert steps_read(reader) == [(1, []), (2, ["a", "b"])]
    assert steps_read(reader) == []
    write_row(folder, 3, 1, time=3.0, texts=["c"])
    assert steps_read(reader) == [(3, ["later", "c"])]


def test_an_incomplete_row_is_read_once_it_is_complete(folder):
    reader = RowReader(folder)
    row = json.dumps({"step": 1, "version": 0, "time": 1.0}).encode() + b"\n"
    with (folder / "metrics.jsonl").open("ab", buffering=0) as file:
        file.write(row[:9])
        assert steps_read(reader) == []
        file.write(row[9:])
        assert steps_read(reader) == [(1, [])]


def test_rows_rewritten_after_a_resume_are_sent_again(folder):
    reader = RowReader(folder)
    for step in range(1, 5):
        write_row(folder, step, step - 1, time=float(step), texts=[f"old {step}"])
    assert [step for step, _ in steps_read(reader)] == [1, 2, 3, 4]
    cut_jsonl(folder / "metrics.jsonl", lambda row: row["step"] <= 2)
    cut_jsonl(folder / "samples.jsonl", lambda row: row["version"] < 2)
    for step in range(3, 6):
        write_row(folder, step, step - 1, time=10.0 + step, texts=[f"new {step}"])
    assert steps_read(reader) == [(step, [f"new {step}"]) for step in (3, 4, 5)]
    resumed = RowReader(folder, seen=reader.seen - 1.0)  # after a process that had sent all but the last row
    assert steps_read(resumed) == [(5, ["new 5"])]


def test_a_tracker_object_gets_the_content_of_the_files(folder):
    tracker, log = FakeTracker(), RunLog(folder, total_steps=2)
    with following(folder, [tracker]):
        for step in (1, 2):
            made = {"reward/mean": coati.monitor.Mean(0.5, 4), "kl/per_sample": coati.monitor.Mean(1.0, 4)}
            made["maker/samples"] = coati.monitor.Sum(4)
            log.add_report(
                "maker-0", [{"version": step - 1, "metrics": made, "samples": [sample(step - 1, f"text {step}")]}]
            )
            log.add_report("trainer-0", [{"batch": step, "version": step - 1, "metrics": {"policy/loss": 0.5 * step}}])
        log.flush()
    rows = read_jsonl(folder / "metrics.jsonl")
    assert len(rows) == 2
    assert tracker.logged == [
        (row["step"], {name: value for name, value in row.items() if name not in ("step", "time")}) for row in rows
    ]
    assert tracker.tables == [(1, ["text 1"]), (2, ["text 2"])]
    assert tracker.closed == [False]


def test_a_tracker_object_gets_no_rows_from_before_a_resume(folder):
    write_row(folder, 1, 0, time=1.0, texts=["before"])
    tracker = FakeTracker()
    with following(folder, [tracker]):
        write_row(folder, 2, 1, time=1e12, texts=["after"])
    assert tracker.tables == [(2, ["after"])]


@pytest.mark.parametrize("breaks", ["log", "samples", "close"])
def test_a_failing_tracker_object_is_reported_once_and_others_continue(breaks, folder, caplog):
    bad, good = FakeTracker(breaks), FakeTracker()
    with following(folder, [bad, good]):
        for step in range(1, 4):
            write_row(folder, step, step - 1, time=1e12 + step, texts=["text"])
    assert len(caplog.messages) == 1
    assert "FakeTracker failed; training continues" in caplog.text
    assert "No space left on device" in caplog.text
    assert (len(good.logged), len(good.tables), good.closed) == (3, 3, [False])


def test_trackers_are_told_that_the_run_failed(folder):
    tracker = FakeTracker()
    with pytest.raises(RuntimeError, match="training"), following(folder, [tracker]):
        raise RuntimeError("training went wrong")
    assert tracker.closed == [True]


def open_pipes():
    with os.scandir("/proc/self/fd") as entries:
        links = [os.readlink(entry.path) for entry in entries if os.path.lexists(entry.path)]
    return sum(link.startswith("pipe:") for link in links)


def test_tracker_objects_leave_no_open_pipes(folder, caplog):
    before = open_pipes()
    with following(folder, [FakeTracker(), FakeTracker("log")]):
        write_row(folder, 1, 0, time=1e12)
    assert "FakeTracker failed" in caplog.text
    assert open_pipes() == before


def test_a_tracker_that_hangs_does_not_block_the_run(folder, monkeypatch, caplog):
    monkeypatch.setattr(follow_module, "_WAIT_SECONDS", 0.01)
    answer, tracker = threading.Event(), FakeTracker()
    tracker.log = lambda step, metrics: answer.wait()
    write_row(folder, 1, 0, time=1e12)
    with following(folder, [tracker, FakeTracker()]):
        pass
    assert "FakeTracker: still sending" in caplog.text
    answer.set()


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Install a fake package trackio, with a given `init`, for tracker processes."""

    def make(init):
        (tmp_path / "packages").mkdir()
        (tmp_path / "packages" / "trackio.py").write_text(init)
        paths = [str(tmp_path / "packages"), os.environ.get("PYTHONPATH", "")]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))

    return make


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        ("raise RuntimeError(f'the key {os.environ[\"TRACKIO_KEY\"]} is wrong')", "the key <TRACKIO_KEY> is wrong"),
        ("os._exit(7)", "exited with code 7"),
        ("sys.exit('no terminal')", "no terminal"),
    ],
)
def test_a_failing_tracker_process_is_reported_once_with_a_remedy_and_without_keys(
    failure, message, package, folder, monkeypatch, caplog
):
    monkeypatch.setenv("TRACKIO_KEY", "hf_SecretSecret")
    package(f"import os, sys\ndef init(**options):\n    print('hello')\n    {failure}\n")
    with following(folder, ["trackio"]):
        write_row(folder, 1, 0, time=1.0)
    assert len(caplog.messages) == 1
    assert "trackio failed; training continues" in caplog.text
    assert message in caplog.text
    assert f"-m coati.monitor.follow {folder} trackio" in caplog.text
    assert "SecretSecret" not in caplog.text
    assert "hello" in (folder / "trackers" / "trackio.log").read_text()


PACKAGE = """
import json, os
class Trace:
    def __init__(self, messages, metadata): self.row = [messages[1]["content"], metadata["reward"]]
class run:
    name = None
    def log(metrics, step): tell(step, [trace.row for trace in metrics.pop("samples", [])] or metrics)
    def finish(): tell("finish")
def tell(*what): print(json.dumps(what), file=open("calls", "a"))
def init(**options):
    run.name = options["name"]
    tell("init", options["name"].partition("-")[0], options["resume"], options["project"])
    return run
run.id = "1"
"""


def test_a_resumed_run_keeps_its_name_and_sends_only_new_rows(package, folder, monkeypatch):
    package(PACKAGE)
    monkeypatch.chdir(folder)
    settings = {**SECTIONS, "run": {"name": "film"}, "logging": {"trackers": {"trackio": {"project": "mine"}}}}
    (folder / "config.toml").write_text(dump_config(build_config(settings)))
    with following(folder, ["trackio"]):
        write_row(folder, 1, 0, time=1.0, texts=["a"])
    first = json.loads((folder / "trackers" / "trackio.json").read_text())
    with following(folder, ["trackio"]):
        write_row(folder, 2, 1, time=2.0)
    command = [sys.executable, "-m", "coati.monitor.follow", str(folder), "trackio"]
    subprocess.run(command, check=True, timeout=100)  # by hand, with nothing left to send
    assert json.loads((folder / "trackers" / "trackio.json").read_text())["id"] == first["id"]
    assert [json.loads(line) for line in (folder / "calls").read_text().splitlines()] == [
        ["init", "film", "never", "mine"],
        [1, {"version": 0, "maker/samples": 4.0}],
        [1, [["a", 0.5]]],
        ["finish"],
        ["init", "film", "allow", "mine"],
        [2, {"version": 1}],
        ["finish"],
        ["init", "film", "allow", "mine"],
        ["finish"],
    ]


def test_tensorboard_shows_the_last_values_written_for_each_step(folder):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with following(folder, ["tensorboard"]):
        for step in (1, 2, 3):
            write_row(folder, step, step - 1, time=float(step), texts=[f"a|b\n{step}"], **{"policy/loss": 0.25 * step})
    cut_jsonl(folder / "metrics.jsonl", lambda row: row["step"] <= 1)
    cut_jsonl(folder / "samples.jsonl", lambda row: row["version"] < 1)
    with following(folder, ["tensorboard"]):
        write_row(folder, 2, 1, time=4.0, texts=["again"], **{"policy/loss": 8.0})
    events = accumulator.EventAccumulator(str(folder / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("policy/loss")] == [(1, 0.25), (2, 8.0)]
    tables = {event.step: event.tensor_proto.string_val[0].decode() for event in events.Tensors("samples")}
    assert "a\\|b<br>1" in tables[1]
    assert "again" in tables[2]


@pytest.mark.parametrize(
    ("table", "key"),
    [
        ({"api_key": "c0ffee"}, "logging.trackers.swanlab.api_key"),
        ({"key": "c0ffee"}, "logging.trackers.swanlab.key"),
        ({"hub_token": "c0ffee"}, "logging.trackers.swanlab.hub_token"),
        ({"settings": {"api_key": "c0ffee"}}, "logging.trackers.swanlab.settings.api_key"),
        ({"web_host": "https://me:c0ffee@host"}, "logging.trackers.swanlab.web_host"),
        ({"server_url": "http://host/?write_token=c0ffee"}, "logging.trackers.swanlab.server_url"),
    ],
)
def test_secrets_in_settings_are_rejected(table, key):
    with pytest.raises(ConfigError, match=f"{key} must be unset") as raised:
        build_config({**SECTIONS, "logging": {"trackers": {"swanlab": table}}})
    assert "c0ffee" not in str(raised.value)


def test_an_unknown_or_missing_tracker_is_an_error_before_the_run(tmp_path, monkeypatch):
    for wrong in (["wandb"], {"weights": {}}):
        with pytest.raises(ConfigError, match=r"logging\.trackers.* must be .*wandb"):
            build_config({**SECTIONS, "logging": {"trackers": wrong}})
    monkeypatch.setitem(sys.modules, "swanlab", None)
    config = build_config({**SECTIONS, "logging": {"trackers": {"swanlab": {}}}})
    with pytest.raises(ConfigError, match="pip install swanlab"):
        check_inputs(config)

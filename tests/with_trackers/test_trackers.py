"""Real runs with the real package of each tracker, offline: the tracker's data equals the run's own files.

The run is resumed from a checkpoint before its last steps, so that these steps are sent twice.
"""

import importlib
import json
import math
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import tiny

import coati
from coati.config import build_config, dump_config
from coati.monitor import read_jsonl

REWARD = "def letters(completions): return [0.25 * len(set(text)) for text in completions]\n"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a model, prompts and a reward, and an environment in which trackers write into it."""
    folder = tmp_path_factory.mktemp("tracked")
    tiny.save_words(folder)
    (folder / "letters_of_trackers.py").write_text(REWARD)
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(("WANDB_", "MLFLOW_", "TRACKIO_", "SWANLAB_"))]:
            patch.delenv(name)
        patch.setenv("HOME", str(folder))
        patch.setenv("TRACKIO_DIR", str(folder / "trackio"))
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # what mlflow-skinny can write without a database
        yield folder


def settings_of(place, tracker, **options):
    return {
        "run": {"name": "film", "output": str(place / tracker)},
        "model": {"path": str(place / "model"), "device": "cpu"},
        "prompts": {"path": str(place / "prompts.jsonl")},
        "reward": {"function": "letters_of_trackers:letters", "search_paths": [str(place)]},
        "rollout": {"prompts_per_batch": 4, "max_new_tokens": 4},
        "train": {"total_steps": 4, "batch_size": 4, "save_every": 1},
        "topology": {"threads_per_actor": 1},
        "logging": {"tensorboard": False, "samples_kept": 2, "trackers": {tracker: options}},
    }


def run_and_resume(place, tracker, **options):
    """Train four steps, then go on from the checkpoint after the third; return the run's folder."""
    pytest.importorskip(tracker)
    folder = coati.train(settings_of(place, tracker, **options), sync=True).folder
    shutil.rmtree(folder / "checkpoints" / "version-4")
    shutil.rmtree(folder / "model")
    coati.train(resume=folder, overrides=["train.total_steps=5"], sync=True)
    warnings = folder / "warnings.log"
    assert not warnings.exists() or tracker not in warnings.read_text()
    return folder


def check(folder, rows, samples):
    """Hold what a tracker has against the run's files: the last numbers of each step, and all samples of it."""
    expected = {row["step"]: row for row in read_jsonl(folder / "metrics.jsonl")}
    assert list(expected) == [1, 2, 3, 4, 5]
    held = {}
    for step, numbers in rows:
        held.setdefault(step, {}).update(numbers)
    for step, row in expected.items():
        for name, value in row.items():
            if name not in ("step", "time"):
                got = float(held[step][name])
                assert got == pytest.approx(value, rel=1e-6) or (math.isnan(got) and math.isnan(value)), (step, name)
    assert "reward/mean" in expected[1]
    texts = {step: [] for step in expected}
    for sample in read_jsonl(folder / "samples.jsonl"):
        if sample["version"] + 1 in texts:
            texts[sample["version"] + 1].append((sample["prompt"], sample["response"], sample["reward"]))
    assert all(len(of_step) == 2 for of_step in texts.values())
    for step, of_step in texts.items():
        assert [row for at, row in samples if at == step][-2:] == of_step


def records_of(path):
    """The records of a file in LevelDB's log format, which wandb and swanlab write."""
    data, position, part = path.read_bytes(), 7, b""
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        part += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            yield part
            part = b""


def test_wandb(place):
    folder = run_and_resume(place, "wandb", mode="offline", project="films")
    pb = importlib.import_module("wandb.proto.wandb_internal_pb2")
    starts = sorted((folder / "trackers" / "wandb").glob("offline-run-*"))
    assert len(starts) == 2
    rows, samples, ids = [], [], set()
    for start in starts:
        for data in records_of(next(start.glob("run-*.wandb"))):
            record = pb.Record.FromString(data)
            if record.HasField("run"):
                ids.add((record.run.run_id, record.run.project, record.run.display_name))
            if record.HasField("history"):
                items = {
                    ".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item
                }
                rows.append((items["step"], {k: v for k, v in items.items() if isinstance(v, int | float)}))
        for table in sorted(start.glob("files/media/table/*.json")):
            content = json.loads(table.read_text())
            for row in content["data"]:
                cells = dict(zip(content["columns"], row, strict=True))
                samples.append((cells["step"], (cells["prompt"], cells["response"], cells["reward"])))
    kept = json.loads((folder / "trackers" / "wandb.json").read_text())
    assert ids == {(kept["id"], "films", "film")}
    check(folder, rows, samples)


def test_mlflow(place):
    store = f"file://{place / 'mlruns'}"
    folder = run_and_resume(place, "mlflow", tracking_uri=store, experiment="films")
    from mlflow import MlflowClient

    client = MlflowClient(store)
    (run,) = client.search_runs([client.get_experiment_by_name("films").experiment_id])
    assert run.info.run_name == "film"
    assert run.info.status == "FINISHED"
    assert run.info.run_id == json.loads((folder / "trackers" / "mlflow.json").read_text())["id"]
    assert run.data.params["train.total_steps"] == "4"
    rows = [
        (point.step, {name: point.value})
        for name in run.data.metrics
        for point in client.get_metric_history(run.info.run_id, name)
    ]
    samples = []
    for artifact in client.list_artifacts(run.info.run_id, "samples"):
        content = json.loads(Path(client.download_artifacts(run.info.run_id, artifact.path)).read_text())
        for row in content["data"]:
            cells = dict(zip(content["columns"], row, strict=True))
            step = int(artifact.path.rpartition("-")[2].removesuffix(".json"))
            samples.append((step, (cells["prompt"], cells["response"], cells["reward"])))
    check(folder, rows, samples)


def test_trackio(place):
    folder = run_and_resume(place, "trackio", project="films", auto_log_cpu=False)
    from trackio.sqlite_storage import SQLiteStorage

    (name,) = SQLiteStorage.get_runs("films")
    assert name == json.loads((folder / "trackers" / "trackio.json").read_text())["id"]
    assert name.startswith("film-")
    rows = [
        (row.pop("step"), {k: v for k, v in row.items() if isinstance(v, int | float)})
        for row in SQLiteStorage.get_logs("films", name)
    ]
    samples = []
    for trace in SQLiteStorage.get_traces("films", name, sort="step_asc"):
        prompt, response = (message["content"] for message in trace["messages"])
        samples.append((trace["step"], (prompt, response, trace["metadata"]["reward"])))
    check(folder, rows, samples)


def test_swanlab(place):
    folder = run_and_resume(place, "swanlab", mode="offline", project="films")
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record

    rows, samples, ids = [], [], set()
    starts = sorted((folder / "trackers" / "swanlog").glob("run-*"))
    assert len(starts) == 2
    for start in starts:
        for data in records_of(next(start.glob("*.swanlab"))):
            record = Record.FromString(data)
            if record.HasField("start"):
                ids.add((record.start.id, record.start.project, record.start.name))
            if record.HasField("scalar"):
                rows.append((record.scalar.step, {record.scalar.key: record.scalar.value.number}))
            if record.HasField("media"):
                for item in record.media.value.items:
                    content = json.loads(next(start.rglob(item.filename)).read_text())
                    for cells in content["rowData"]:
                        samples.append((record.media.step, (cells["prompt"], cells["response"], cells["reward"])))
    kept = json.loads((folder / "trackers" / "swanlab.json").read_text())
    assert ids == {(kept["id"], "films", "film")}
    check(folder, rows, samples)


@pytest.mark.parametrize("tracker", ["wandb", "swanlab"])
def test_without_a_key_training_goes_on_and_the_reason_is_told_once(place, tracker, caplog):
    pytest.importorskip(tracker)
    settings = settings_of(place, tracker)
    settings["run"]["output"] = str(place / f"{tracker}-without-key")
    result = coati.train(settings, sync=True)
    assert not result.was_stopped
    told = [line for line in caplog.messages if f"{tracker} failed; training continues" in line]
    assert len(told) == 1
    assert "key" in told[0].lower() or "login" in told[0].lower()


def test_a_run_without_a_tracker_can_be_sent_afterwards(place):
    pytest.importorskip("mlflow")
    store = f"file://{place / 'later'}"
    settings = settings_of(place, "mlflow", tracking_uri=store, experiment="later")
    settings["run"]["output"] = str(place / "later-run")
    offline = {**settings, "logging": {"tensorboard": False}}
    folder = coati.train(offline, sync=True).folder
    (folder / "config.toml").write_text(dump_config(build_config(settings)))
    command = [sys.executable, "-m", "coati.monitor.follow", str(folder), "mlflow"]
    subprocess.run(command, check=True, timeout=300)
    from mlflow import MlflowClient

    client = MlflowClient(store)
    (run,) = client.search_runs([client.get_experiment_by_name("later").experiment_id])
    history = client.get_metric_history(run.info.run_id, "reward/mean")
    assert [point.step for point in history] == [1, 2, 3, 4]

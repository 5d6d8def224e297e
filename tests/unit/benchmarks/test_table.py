"""The table of docs/performance.md: who measures when, and what the rows say."""

import argparse
import json
import sys
import time
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"

PROCESS = """
import os, sys
sys.path.insert(0, sys.argv[1])
from rollout_vllm import TURN, wait_for_turn
wait_for_turn(os.environ[TURN])
open(sys.argv[2], "a").write(sys.argv[3] + " began\\n")
open(sys.argv[2], "a").write(sys.argv[3] + " ended\\n")
print('\\nend_to_end result: {"tokens_per_second": 5.0, "ms_per_step": 1.0}')
"""


@pytest.fixture
def table(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import table

    return table


@pytest.fixture
def arguments(tmp_path):
    return argparse.Namespace(
        folder=tmp_path,
        waves=["7B"],
        processes=None,
        vllm_site=None,
        seconds=60.0,
        start_seconds=60.0,
        device="cpu",
        tiny=True,
        repeats=1,
        case_seconds=1.0,
    )


def job(table, arguments, name, code=PROCESS):
    order = arguments.folder / "order.txt"
    command = [sys.executable, "-c", code, str(BENCHMARKS), str(order), name]
    return table.Job(name, command, arguments, needs_vllm=False)


def test_processes_of_a_wave_measure_one_after_the_other(table, arguments, monkeypatch, capsys):
    (arguments.folder / "models-7B").mkdir()
    (arguments.folder / "models-7B" / "prompts.jsonl").touch()
    codes = {"first": PROCESS, "broken": "raise SystemExit(3)", "last": PROCESS}
    monkeypatch.setattr(
        table, "training_jobs", lambda *_: [job(table, arguments, name, code) for name, code in codes.items()]
    )
    table.run_waves(arguments)
    order = (arguments.folder / "order.txt").read_text().splitlines()
    assert order == ["first began", "first ended", "last began", "last ended"]
    kept = {name: json.loads((arguments.folder / f"{name}.json").read_text()) for name in codes}
    assert kept["last"]["tokens_per_second"] == 5.0
    assert kept["broken"]["left_out"] == "status 3"


def test_only_the_processes_asked_for_are_started(table, arguments, monkeypatch):
    started = []
    monkeypatch.setattr(table, "Job", lambda name, *_, **__: started.append(name))
    arguments.processes = ["native-7B", "vllm-1.5B", "trl-vllm-0.5B", "coati-ppo-0.5B"]
    for wave in ("rollout", "0.5B", "7B"):
        for start in table.starts(wave, arguments):
            start()
    assert sorted(started) == ["coati-ppo-0.5B", "native-7B", "vllm-1.5B"]  # TRL's needs a GPU


def test_a_process_that_takes_too_long_is_stopped(table, arguments):
    late = job(table, arguments, "late", "import time; time.sleep(600)")
    assert not late.is_ready
    assert late.end(time.monotonic()) == "stopped: its time was over"
    assert late.process.poll() is not None


def test_the_table_by_hand(table, tmp_path):
    def keep(name, value):
        (tmp_path / f"{name}.json").write_text(json.dumps(value))

    keep(
        "native-7B",
        [
            {"case": "64x512+512", "engine": "native", "tokens_per_second": 12_000.4},
            {"case": "64x512+512", "engine": "memory limit", "tokens_per_second": 16_000.0},
        ],
    )
    keep("vllm-7B", {"64x512+512": {"tokens_per_second": 8_000.0}})
    keep("vllm-0.5B", {"left_out": "it could not"})
    keep("coati-ppo-0.5B", {"tokens_per_second": 36_000.0, "ms_per_step": 455.1, "peak_gib": 50.2})
    keep("trl-vllm-0.5B", {"tokens_per_second": 9_000.0, "ms_per_step": 1820.0, "peak_gib": 100.0})
    lines = table.table(tmp_path)
    assert "| 7B, 64 × (512 + 512) | 12,000 | 8,000 | **1.50** | 1.25 × | 75% |" in lines
    assert "| 7B, 256 × (512 + 512) |  |  |  | 1.2 × |  |" in lines
    assert "| 0.5B, 64 × (128 + 256) | coati, PPO | 36,000 | 455 ms | 50 GiB | **4.00** | 4.5 × |" in lines
    ragged = "0.5B, 2,048 × (512 + geometric to 2,048) through 256 slots"
    assert any(line.startswith(f"| {ragged} |") for line in lines)

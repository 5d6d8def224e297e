"""What the staleness benchmark takes for finished, and what it compares."""

import json
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import staleness

    return staleness


def test_only_whole_lines_of_the_same_settings_are_finished_runs(benchmark, tmp_path):
    done, changed, cut, absent = (benchmark.Cell("tame", "naive", eta, 1) for eta in (0, 1, 2, 4))

    def line(cell, recipe):
        return json.dumps({**cell.__dict__, "recipe": recipe, "reward": 0.5})

    lines = [
        line(done, benchmark.recipe_of(done)),
        line(changed, "another recipe"),
        "",
        line(cut, benchmark.recipe_of(cut))[:-9],
    ]
    log = tmp_path / "runs.jsonl"
    log.write_text("\n".join(lines), encoding="utf-8")
    assert benchmark.finished_runs(log, [done, changed, cut, absent]).keys() == {done}
    assert benchmark.finished_runs(log, [absent]) == {}
    assert benchmark.finished_runs(tmp_path / "none.jsonl", [done]) == {}


def test_methods_differ_in_the_correction_and_in_nothing_else(benchmark):
    from staleness_run import make_config

    def settings(method):
        config = make_config(benchmark.Cell("harsh", method, 4, 1), "base", "prompts.jsonl")
        return config.algorithm.resolved(config.topology.max_staleness)

    naive, decoupled, truncated = (settings(method) for method in benchmark.METHODS)
    assert naive.correction == "none"
    assert (decoupled.correction, decoupled.importance, decoupled.importance_cap) == ("decoupled", "truncate", 1e9)
    assert (truncated.correction, truncated.importance, truncated.importance_cap) == ("decoupled", "truncate", 2.0)
    assert {settings.importance_level for settings in (decoupled, truncated)} == {"token"}

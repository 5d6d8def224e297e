"""The arithmetic and the files of the staleness benchmark's report, on a grid made by hand."""

import doctest
import importlib.util
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def report():
    spec = importlib.util.spec_from_file_location("staleness_report", ROOT / "benchmarks" / "staleness_report.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cell(method, eta, rewards, weights=None):
    names = ("reward", "objective", "area", "kl", "age_mean", "distinct", "clip_fraction")
    measures = dict.fromkeys(names, rewards)
    measures["effective_samples"] = weights or [None] * len(rewards)
    return {"setting": "hard", "method": method, "eta": eta, "measures": measures}


@pytest.fixture
def results():
    return {
        "facts": {
            "machine": "a machine",
            "python": "3",
            "torch": "2",
            "transformers": "5",
            "num_runs": 12,
            "seconds": 120.0,
            "base_rewards": [0.1, 0.2, 0.0],
            "ratio_max": 7.0,
            "skipped": 0,
        },
        "settings": {"hard": "What it means."},
        "methods": ["naive", "truncated"],
        "etas": [0, 4],
        "seeds": [1, 2, 3],
        "lead": -1,
        "cells": [
            cell("naive", 0, [0.5, 0.7, 0.6]),
            cell("naive", 4, [0.2, 0.4, 0.3]),
            cell("truncated", 0, [0.5, 0.7, 0.6], [1.0, 1.0, 1.0]),
            cell("truncated", 4, [0.5, 0.41, 0.9], [0.5, 0.25, 0.75]),
        ],
    }


def test_docstring_examples_run(report):
    assert doctest.testmod(report).failed == 0


def test_differences_are_paired_by_seed_and_marked_beyond_two_standard_errors(report, results):
    naive, truncated = report.noise(results, "hard", "reward")
    assert "η = 4: -0.300 ± 0.000*" in naive
    # 0, -0.29 and 0.3: mean 0.0033, standard deviation 0.295, over the root of 3 seeds
    assert "η = 4: +0.003 ± 0.170" in truncated
    assert "*" not in truncated


def test_table_by_hand(report, results):
    lines = report.table(results, "hard").splitlines()
    assert lines[0] == "| | method | η = 0 | η = 4 |"
    assert "| reward | naive PPO | 0.60 (0.50 to 0.70) | 0.30 (0.20 to 0.40) |" in lines
    assert "| effective sample size | truncated weights | 100% | 50% |" in lines
    # Naive PPO has no weights: it has no row, and not a row of nothing.
    assert [line for line in lines if "effective sample size | naive" in line] == []


def test_verdict_needs_all_seeds_to_agree(report, results):
    # 0.41, 0.5 and 0.9 are all above 0.4, the best of naive PPO; at η = 0 the ranges are the same.
    assert report.verdicts(results, "hard", "reward") == ["truncated weights: above at η = 4"]
    results["cells"][3]["measures"]["reward"] = [0.4, 0.5, 0.9]
    assert report.verdicts(results, "hard", "reward") == ["truncated weights: overlaps everywhere"]
    results["cells"][3]["measures"]["reward"] = [0.1, 0.0, 0.19]
    assert report.verdicts(results, "hard", "reward") == ["truncated weights: below at η = 4"]


def test_cost_of_age_compares_medians(report, results):
    assert report.cost_of_age(results, "hard", "reward") == ["naive PPO 0.60 → 0.30", "truncated weights 0.60 → 0.50"]


def test_ticks_enclose_negative_and_constant_numbers(report):
    assert report.nice_ticks(-1.24, 0.7) == [-1.5, -1.0, -0.5, 0.0, 0.5, 1.0]
    ticks = report.nice_ticks(0.5, 0.5)
    assert ticks[0] <= 0.5 <= ticks[-1]
    assert ticks[0] < ticks[-1]


def test_docs_are_filled_between_the_marks(report, results, tmp_path):
    (tmp_path / "staleness.md").write_text("before\n<!-- made: results -->\nold\n<!-- end: results -->\nafter\n")
    (tmp_path / "results.json").write_text(json.dumps(results))
    report.write_docs(tmp_path / "results.json", tmp_path)
    page = (tmp_path / "staleness.md").read_text()
    assert page.startswith("before\n<!-- made: results -->\n![")
    assert "(staleness.svg)\n\nMeasured on a machine" in page
    assert page.endswith("<!-- end: results -->\nafter\n")
    assert "12 runs of 10 s on average" in page
    assert "old" not in page
    ElementTree.parse(tmp_path / "staleness.svg")


def test_page_without_marks_is_an_error(report):
    with pytest.raises(ValueError, match="one block"):
        report.with_block("no marks", "results", "text")


def test_plot_places_a_point_for_every_cell(report, results):
    root = ElementTree.fromstring(report.plot(results))
    circles = root.findall("{http://www.w3.org/2000/svg}circle")
    assert len(circles) == 2 * len(results["cells"])  # two measures
    # Rewards from 0.2 to 0.9 get ticks from 0.2 to 1.0, the panel is 170 high and begins at 64:
    # the medians of naive PPO, 0.6 and 0.3, lie 4/8 and 7/8 of the way down.
    heights = [float(circle.get("cy")) for circle in circles[:2]]
    assert heights == pytest.approx([64 + 170 * 4 / 8, 64 + 170 * 7 / 8], abs=0.06)


def test_the_docs_page_has_the_block():
    page = (ROOT / "docs" / "staleness.md").read_text(encoding="utf-8")
    assert page.count("<!-- made: results -->") == page.count("<!-- end: results -->") == 1


def test_ways_of_writing_are_compared_by_seed(report):
    def row(writing, seed, reward):
        numbers = dict.fromkeys(("reward", "objective", "area"), reward)
        return {"setting": "hard", "method": "naive", "eta": 4, "seed": seed, "writing": writing, **numbers}

    rows = [row("whole", seed, 0.5 + seed / 5) for seed in (1, 2)]
    rows += [row("in-flight", seed, 0.6 + seed / 5) for seed in (2, 1)]
    # 0.7 and 0.9: mean 0.8, standard error 0.1, times 12.71. Both seeds gain 0.1.
    numbers = "0.800 ± 1.271 | 0.900 ± 1.271 | +0.100 ± 0.000"
    assert f"| hard | naive PPO | 4 | 2 | {numbers} |" in report.writing_tables(rows).splitlines()

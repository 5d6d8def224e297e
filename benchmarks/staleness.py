"""Measure the cost of stale data: final reward against staleness η, for four off-policy methods.

    python benchmarks/staleness.py --workers 16 --output FOLDER       run what FOLDER lacks, then print the tables
    python benchmarks/staleness.py --output FOLDER --docs             write FOLDER/results.json into docs/
    python benchmarks/staleness.py --workers 16 --output FOLDER --settings demo praise --methods truncated naive \\
        --etas 1 4 0 8 --writing whole in-flight                      responses of one version against those of several

The model and the reward are the demo's; the setting "praise" uses GRPO with the verifier of `algorithms.py`. A run
alternates between the real objects (prompts, pipeline, weight stage, learner) in one process, like `coati.synchronous`,
but its maker generates everything that η allows before the trainer takes a batch. Every batch is therefore exactly
min(v, η) versions old at version v, and a run that finds another age stops. Detached runs have younger data on
average: this is the worst case of each η.

All methods use the same prompts, number of samples and settings. FOLDER/runs.jsonl gets one line per finished run, so
an interrupted benchmark continues where it stopped; lines of other settings are ignored. At the end the benchmark
writes FOLDER/results.json, FOLDER/results.md and FOLDER/plot.svg. With several ways of writing it compares them in
FOLDER/writing.md instead (--report compares the runs finished so far).
"""

import argparse
import concurrent.futures
import itertools
import json
import multiprocessing
import os
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import staleness_report as report
import torch
import transformers
from checked import quiet_libraries
from staleness_run import (
    METHODS,
    MORE_METHODS,
    OLDEST,
    SETTINGS,
    WRITING,
    Cell,
    about,
    base_rewards,
    recipe_of,
    run_cell,
)

from coati.demo.base_model import pretrain
from coati.demo.grammar import PROMPTS
from coati.demo.reward import sentiment_analyzer

ETAS = (0, 1, 2, 4, 8)
SEEDS = (1, 2, 3, 4, 5)  # the settings were chosen with seed 0
LONGEST_SILENCE_SECONDS = 1200.0  # without a finished run, something hangs

# Measures of each run that results.json keeps.
MEASURES = (
    "reward",
    "objective",
    "area",
    "kl",
    "age_mean",
    "distinct",
    "clip_fraction",
    "effective_samples",
    "above_cap",
    "log_ratio",
)


def finished_runs(path: Path, cells: Sequence[Cell]) -> dict[Cell, dict[str, Any]]:
    """Return the finished runs of `cells` in the file. Truncated lines and lines of other settings are ignored."""
    wanted = {(cell, recipe_of(cell)) for cell in cells}
    found: dict[Cell, dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
            cell = Cell(row["setting"], row["method"], row["eta"], row["seed"], row["lead"], row["writing"])
        except (ValueError, KeyError):
            continue
        if (cell, row.get("recipe")) in wanted:
            found[cell] = row
    return found


def run_cells(cells: Sequence[Cell], base: str, prompts: str, num_workers: int) -> Iterator[dict[str, Any]]:
    """Yield rows as runs finish. An error in a run ends the benchmark; finished runs are kept."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):  # inherited by the workers: many runs, one thread each
        os.environ[name] = "1"
    context = multiprocessing.get_context("spawn")  # a fork would share torch's thread pools
    with concurrent.futures.ProcessPoolExecutor(num_workers, mp_context=context) as pool:
        waiting = {pool.submit(run_cell, cell, base, prompts): cell for cell in cells}
        try:
            while waiting:
                done, _ = concurrent.futures.wait(
                    waiting, timeout=LONGEST_SILENCE_SECONDS, return_when=concurrent.futures.FIRST_COMPLETED
                )
                if not done:
                    raise TimeoutError(f"no run finished for {LONGEST_SILENCE_SECONDS:g} s; {len(waiting)} are left")
                for future in done:
                    del waiting[future]
                    yield future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():  # otherwise leaving the pool waits for them
                process.terminate()
            raise


def machine() -> dict[str, Any]:
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def run_grid(cells: Sequence[Cell], output: Path, num_workers: int) -> None:
    """Run missing cells and report on all."""
    output.mkdir(parents=True, exist_ok=True)
    log, prompts = output / "runs.jsonl", output / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS), encoding="utf-8")
    rows = finished_runs(log, cells)
    missing = [cell for cell in cells if cell not in rows]
    print(f"{len(cells)} runs, {len(rows)} of them finished before; {num_workers} workers", flush=True)
    base = str(output / "base")
    pretrain(output / "base")
    started = time.monotonic()
    with log.open("a", encoding="utf-8") as file:
        file.write("\n" if file.tell() else "")  # end a line that a kill truncated
        for count, row in enumerate(run_cells(missing, base, str(prompts), num_workers), start=1):
            file.write(json.dumps(row) + "\n")
            file.flush()
            cell = Cell(row["setting"], row["method"], row["eta"], row["seed"], row["lead"], row["writing"])
            rows[cell] = row
            elapsed = time.monotonic() - started
            left = elapsed / count * (len(missing) - count)
            print(
                f"[{count}/{len(missing)}, {elapsed:.0f} s, about {left:.0f} s left] {cell}: "
                f"reward {row['reward']:.3f}, KL {row['kl']:.2f}, distinct {row['distinct']:.0%}"
                f" in {row['seconds']:.0f} s",
                flush=True,
            )
    if len({cell.writing for cell in cells}) > 1:
        compare_writing(rows, output)
    else:
        write_results(cells, rows, output, base_rewards(base, str(prompts), sorted({cell.seed for cell in cells})))


def compare_writing(rows: Mapping[Cell, dict[str, Any]], output: Path) -> None:
    """Write and print tables that compare the ways of writing, from the finished runs."""
    text = report.writing_tables(list(rows.values()))
    (output / "writing.md").write_text(text + "\n", encoding="utf-8")
    print(text)


def write_results(
    cells: Sequence[Cell], rows: Mapping[Cell, dict[str, Any]], output: Path, untrained: Sequence[float]
) -> None:
    """Write results.json, results.md and plot.svg, and print the report."""
    grid = dict.fromkeys((cell.setting, cell.method, cell.eta) for cell in cells)
    results = {
        "facts": {
            **machine(),
            "num_runs": len(rows),
            "seconds": sum(row["seconds"] for row in rows.values()),
            "base_rewards": list(untrained),
            "ratio_max": max((row["ratio_max"] or 1.0 for row in rows.values()), default=1.0),
            "skipped": sum(row["skipped"] for row in rows.values()),
        },
        "settings": {setting: about(setting) for setting in dict.fromkeys(cell.setting for cell in cells)},
        "methods": list(dict.fromkeys(cell.method for cell in cells)),
        "etas": sorted({cell.eta for cell in cells}),
        "seeds": sorted({cell.seed for cell in cells}),
        "lead": cells[0].lead,
        "writing": cells[0].writing,
        "cells": [
            {
                "setting": setting,
                "method": method,
                "eta": eta,
                "measures": {
                    measure: [rows[cell][measure] for cell in cells if (cell.setting, cell.method, cell.eta) == key]
                    for measure in MEASURES
                },
            }
            for key in grid
            for setting, method, eta in [key]
        ],
    }
    (output / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    text = report.summary(results)
    (output / "results.md").write_text(text + "\n", encoding="utf-8")
    (output / "plot.svg").write_text(report.plot(results), encoding="utf-8")
    print(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/staleness"), metavar="FOLDER")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=["tame", "demo", "harsh"])
    parser.add_argument("--methods", nargs="+", choices=[*METHODS, *MORE_METHODS], default=list(METHODS))
    parser.add_argument("--etas", type=int, nargs="+", default=list(ETAS))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--lead", type=int, default=OLDEST, help="distribute ages like the ledger does with this lead")
    parser.add_argument(
        "--writing",
        nargs="+",
        choices=WRITING,
        default=["whole"],
        help="whole = each response is generated by one version; in-flight = in equal parts by all versions up to the "
        "one that is trained on",
    )
    parser.add_argument("--docs", action="store_true", help="only write FOLDER/results.json into docs/")
    parser.add_argument(
        "--report", action="store_true", help="only compare the ways of writing, from the runs finished so far"
    )
    arguments = parser.parse_args()
    if arguments.writing != ["whole"] and arguments.lead != OLDEST:
        parser.error("--writing always uses the largest age that η allows: leave out --lead.")
    # Ordered by η and seed, so that an interrupted benchmark has complete results for the first of them.
    cells = [
        Cell(setting, method, eta, seed, arguments.lead, writing)
        for eta, seed, setting, method, writing in itertools.product(
            arguments.etas, arguments.seeds, arguments.settings, arguments.methods, arguments.writing
        )
        if eta > 0 or writing == arguments.writing[0]  # with η = 0 all ways of writing are the same
    ]
    if arguments.report:
        compare_writing(finished_runs(arguments.output / "runs.jsonl", cells), arguments.output)
        return
    if arguments.docs:
        report.write_docs(arguments.output / "results.json", Path(__file__).resolve().parent.parent / "docs")
        return
    sentiment_analyzer()  # if the package is missing, fail here and not in every worker
    quiet_libraries()
    run_grid(cells, arguments.output, arguments.workers)


if __name__ == "__main__":
    main()

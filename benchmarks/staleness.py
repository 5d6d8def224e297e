"""What old data costs: final reward against staleness η, for four ways of learning from it.

    python benchmarks/staleness.py --workers 16 --output FOLDER       run what FOLDER lacks, then print the tables
    python benchmarks/staleness.py --output FOLDER --docs             write FOLDER/results.json into docs/
    python benchmarks/staleness.py --workers 16 --output FOLDER --settings demo praise --methods truncated naive \\
        --etas 1 4 0 8 --writing whole in-flight                      responses of one version against those of several

The model and the reward are the demo's; the setting "praise" has the verifier of `algorithms.py`, and GRPO. A run takes
the real objects (prompts, pipeline and gate, weight stage, learner) through one process, one after the other, as
`coati.synchronous` does; but its gate is bounded by η, and its maker uses all that the gate allows before the trainer
takes a batch. So every batch is as old as the bound lets it be: min(v, η) versions when it is trained at version v, and
a run that finds another age stops. Detached runs have younger data on average: this is the worst case of each η.

All methods see the same prompts, the same number of samples and the same settings. FOLDER/runs.jsonl gets one line for
each finished run, so an interrupted benchmark continues where it was; lines of other settings are ignored. The last
step writes FOLDER/results.json, FOLDER/results.md and FOLDER/plot.svg; with several ways of writing it compares them
in FOLDER/writing.md (--report: those runs that are there).
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
LONGEST_SILENCE_SECONDS = 1200.0  # no run finished for so long: something hangs

# What results.json keeps of a run, for each seed.
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
    """The runs of `cells` that the file holds. A line that a kill cut short, or of other settings, does not count."""
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
    """Rows as they finish, in no order. An error in a run ends the benchmark; what is finished is kept."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):  # the workers inherit it: many runs, one thread each
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
            for process in multiprocessing.active_children():  # leaving the pool would wait for them
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
    """Run what is missing, and report the whole."""
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
        file.write("\n" if file.tell() else "")  # a line that a kill cut short must not swallow the next
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
    """Tables of the ways of writing beside each other, from the runs that are there."""
    text = report.writing_tables(list(rows.values()))
    (output / "writing.md").write_text(text + "\n", encoding="utf-8")
    print(text)


def write_results(
    cells: Sequence[Cell], rows: Mapping[Cell, dict[str, Any]], output: Path, untrained: Sequence[float]
) -> None:
    """Everything the report needs in one small file, and the report."""
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
    parser.add_argument("--lead", type=int, default=OLDEST, help="ages as the ledger distributes them with this lead")
    parser.add_argument(
        "--writing",
        nargs="+",
        choices=WRITING,
        default=["whole"],
        help="whole = a response is written by one version; in-flight = by all up to the one that is trained on, an "
        "equal part each",
    )
    parser.add_argument("--docs", action="store_true", help="only write FOLDER/results.json into docs/")
    parser.add_argument("--report", action="store_true", help="only compare the ways of writing, with what is there")
    arguments = parser.parse_args()
    if arguments.writing != ["whole"] and arguments.lead != OLDEST:
        parser.error("--writing takes the ages that η allows at most: leave --lead out.")
    # η by η and seed by seed, so that an interrupted benchmark has the first of them whole.
    cells = [
        Cell(setting, method, eta, seed, arguments.lead, writing)
        for eta, seed, setting, method, writing in itertools.product(
            arguments.etas, arguments.seeds, arguments.settings, arguments.methods, arguments.writing
        )
        if eta > 0 or writing == arguments.writing[0]  # one version at a time leaves nothing to choose
    ]
    if arguments.report:
        compare_writing(finished_runs(arguments.output / "runs.jsonl", cells), arguments.output)
        return
    if arguments.docs:
        report.write_docs(arguments.output / "results.json", Path(__file__).resolve().parent.parent / "docs")
        return
    sentiment_analyzer()  # missed here, with its remedy, and not in every worker
    quiet_libraries()
    run_grid(cells, arguments.output, arguments.workers)


if __name__ == "__main__":
    main()

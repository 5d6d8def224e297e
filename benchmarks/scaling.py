"""Throughput and cost as makers, batch, response length and model grow; and where a larger pipeline would saturate.

    python benchmarks/scaling.py                         all of it on this machine (about twelve short runs)
    python benchmarks/scaling.py --only simulation       calibrate, check and simulate; no further runs

1. Runs: one trainer, `max_staleness` 1, one thread for each actor; each row changes one thing of the base (2 layers,
   d 64, 64 samples of 16 tokens a step). Samples and tokens per second, and seconds of actors for a thousand samples.
   Warm-up steps are left out; the median of `--repeats` runs.
2. Calibration: runs with `max_staleness` 0, in which actors take turns. Their spans give the cost of
   each piece of work alone: a rollout (fixed and by sample, from two batch sizes), sending, taking in, a training
   step (likewise), publishing and delivering weights (fixed and by maker, from one and two makers), committing.
3. Check: the event simulation of `pipeline_simulation.py` with those costs, compared with the real runs with
   `max_staleness` 1, none of which it has seen. All actors of a run share the cores that this machine has, and its
   memory: how much more several training processes do at the same time than one is measured between the two parts.
4. Prediction: the same costs, every actor on its own core, 1 to 1,024 makers, each delivering one rollout batch
   for every version. With training as fast as measured, and 16 and 256 times as fast (a trainer on GPUs): what
   saturates, and where. A prediction is no measurement.
"""

import argparse
import dataclasses
import json
import os
import tempfile
from pathlib import Path

from checked import check_warmup, one_or_more, zero_or_more
from detached_runs import TRAIN, Measured, Workload, machine_gain, run
from pipeline_simulation import Outcome, PipelineModel, saturation, simulate, sweep

from coati.counting import counted

MAKERS = (1, 2, 4)
SCALE = [2**power for power in range(11)]
SPEEDUPS = (1, 16, 256)
BASE = Workload(prompt_tokens=8, new_tokens=16, batch=64)


def variants(base: Workload) -> list[tuple[str, Workload, int]]:
    """(what changes, workload, makers) of each real run."""
    changed = [(counted(count, "maker"), base, count) for count in MAKERS]
    changed += [(f"batch {batch}", dataclasses.replace(base, batch=batch), 1) for batch in (16, 256)]
    changed += [(f"{count} new tokens", dataclasses.replace(base, new_tokens=count), 1) for count in (8, 64)]
    changed += [(f"d {hidden}", dataclasses.replace(base, hidden=hidden), 1) for hidden in (128, 256)]
    return changed


def line(base_value: float, value: float, base_count: int, count: int) -> tuple[float, float]:
    """The straight line through two points, neither part below zero: (at nothing, for each)."""
    slope = max(0.0, (base_value - value) / (base_count - count))
    return max(0.0, base_value - slope * base_count), slope


def calibrated(full: Measured, half: Measured, two_makers: Measured, *, batch: int) -> PipelineModel:
    """Costs of the pieces of work from runs in which each works alone."""
    # A batch is scored in several pieces, so its spans are added up; the others come once a step.
    rollout = [one.per_step("maker-0", "generate", "score") for one in (full, half)]
    generate_base, generate_per_sample = line(rollout[0], rollout[1], batch, batch // 2)
    train_base, train_per_sample = line(full.medians["train"], half.medians["train"], batch, batch // 2)
    publish_base, publish_per_maker = line(two_makers.medians["publish"], full.medians["publish"], 2, 1)
    deliver_base, deliver_per_maker = line(two_makers.medians["deliver"], full.medians["deliver"], 2, 1)
    return PipelineModel(
        rollout_batch=batch,
        train_batch=batch,
        versions=200,
        generate_base=generate_base,
        generate_per_sample=generate_per_sample,
        send=full.medians["send"],
        intake=full.medians["take_in"],
        train_base=train_base,
        train_per_sample=train_per_sample,
        publish_base=publish_base,
        publish_per_maker=publish_per_maker,
        deliver_base=deliver_base,
        deliver_per_maker=deliver_per_maker,
        commit=full.medians.get("commit", 0.0),
        max_staleness=1,
    )


def for_run(model: PipelineModel, *, batch: int, makers: int, cores: float) -> PipelineModel:
    """The model of one of the real runs, whose makers share the samples of a step."""
    return dataclasses.replace(model, makers=makers, rollout_batch=batch // makers, train_batch=batch, cores=cores)


def for_cluster(model: PipelineModel, makers: int, speedup: float) -> PipelineModel:
    """Every maker delivers one rollout batch for every version, and training is so many times as quick."""
    return dataclasses.replace(
        model,
        makers=makers,
        train_batch=model.rollout_batch * makers,
        versions=40,
        train_base=model.train_base / speedup,
        train_per_sample=model.train_per_sample / speedup,
        cores=None,
    )


def show_runs(rows: list[dict]) -> None:
    print("| changed | samples/s | tokens/s | actor-seconds per 1,000 samples |\n|---|---|---|---|")
    for row in rows:
        rates = f"{row['samples_per_second']:.0f} | {row['tokens_per_second']:,.0f}"
        print(f"| {row['changed']} | {rates} | {row['cost']:.1f} |")


def show_check(rows: list[dict]) -> None:
    print("| run | measured, samples/s | simulated | off by |\n|---|---|---|---|")
    for row in rows:
        print(f"| {row['changed']} | {row['measured']:.0f} | {row['simulated']:.0f} | {row['error']:+.0%} |")


def show_prediction(speedup: float, outcomes: list[tuple[int, Outcome]]) -> None:
    found = saturation(outcomes)
    end = f"saturates at {found[0]} makers: {found[1]}" if found else "does not saturate"
    print(f"\nTraining {speedup} times as quick as measured: {end}.")
    print("| makers | samples/s | makers busy | intake | training | weights | limit |\n|---|---|---|---|---|---|---|")
    for count, outcome in outcomes:
        used = outcome.utilization
        print(
            f"| {count:,} | {outcome.samples_per_second:,.0f} | {used['makers']:.0%} | {used['intake']:.0%} | "
            f"{used['training']:.0%} | {used['weights']:.0%} | {outcome.limit} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["simulation"], help="leave out the runs that only the first table needs")
    parser.add_argument("--steps", type=one_or_more, default=28)
    parser.add_argument("--warmup", type=zero_or_more, default=4)
    parser.add_argument("--repeats", type=one_or_more, default=1, help="runs of each kind; medians")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write everything here")
    arguments = parser.parse_args()
    check_warmup(parser, steps=arguments.steps, warmup=arguments.warmup)
    base = dataclasses.replace(BASE, steps=arguments.steps, seed=arguments.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def go(workload: Workload, **shape: int) -> Measured:
            runs = [run(workload, folder, warmup=arguments.warmup, **shape) for _ in range(arguments.repeats)]
            rates = ", ".join(f"{one.samples_per_second:.0f}" for one in runs)
            print(f"  {workload}, {shape}: {rates} samples/s", flush=True)
            return sorted(runs, key=lambda one: one.samples_per_second)[len(runs) // 2]

        print(f"load average {os.getloadavg()[0]:.1f}", flush=True)
        half = dataclasses.replace(base, batch=base.batch // 2)
        model = calibrated(
            go(base, staleness=0), go(half, staleness=0), go(base, staleness=0, makers=2), batch=base.batch
        )
        model_path = str(base.save_model(folder))
        cores = machine_gain(os.cpu_count() or 1, program=TRAIN, arguments=(model_path,), seconds=3.0)
        print(f"  {os.cpu_count()} processes that train do {cores:.2f} times as much as one", flush=True)
        chosen = variants(base)
        if arguments.only:
            chosen = [row for row in chosen if "maker" in row[0]]
        runs, checks = [], []
        for changed, workload, makers in chosen:
            measured = go(workload, makers=makers, staleness=1)
            runs.append(
                {
                    "changed": changed,
                    "samples_per_second": measured.samples_per_second,
                    "tokens_per_second": measured.samples_per_second * workload.new_tokens,
                    "cost": measured.cost,
                }
            )
            if (workload.hidden, workload.new_tokens) == (base.hidden, base.new_tokens):
                simulated = simulate(for_run(model, batch=workload.batch, makers=makers, cores=cores))
                rate = simulated.samples_per_second
                error = rate / measured.samples_per_second - 1
                checks.append(
                    {"changed": changed, "measured": measured.samples_per_second, "simulated": rate, "error": error}
                )
    print(f"load average {os.getloadavg()[0]:.1f}")
    show_runs(runs)
    print(f"\nCalibrated: {model}\n")
    show_check(checks)
    predictions = {}
    for speedup in SPEEDUPS:
        outcomes = [(count, sweep(for_cluster(model, count, speedup), [count])[0][1]) for count in SCALE]
        show_prediction(speedup, outcomes)
        predictions[speedup] = {count: dataclasses.asdict(outcome) for count, outcome in outcomes}
    if arguments.json:
        found = {
            "runs": runs,
            "cores": cores,
            "model": dataclasses.asdict(model),
            "checks": checks,
            "predictions": predictions,
        }
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()

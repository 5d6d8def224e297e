"""Measure how well generation and training overlap: the longer half alone over the wall time of a detached run.

    python benchmarks/overlap.py                                    a small model on the CPU
    python benchmarks/overlap.py --hidden 128 --new-tokens 64
    python benchmarks/overlap.py --device cuda --half-billion --steps 16       maker and trainer share one GPU

`--half-billion` is a Llama of Qwen2-0.5B's size (24 layers, d 896, 2 key-value heads, 151,936 tokens) with 64 × (128
+ 256) tokens per step.

One maker and one trainer run the real pipeline as Ray actors. First with `max_staleness` 0: they alternate, so their
spans give the time per step of generation (generate, score, send, commit) and of training (train, publish) while the
other one is idle. Then with `--staleness` (1): the same work, overlapping. Both alternate `--repeats` times; values are
medians.

    ideal    the longer of the two halves: the lower bound with one maker and one trainer
    overlap  ideal / wall time of the detached run; 1 is perfect
    gain     wall time of the alternating run / wall time of the detached run
    machine  speedup of two busy processes over one, measured just before: 2 on two idle cores. A lower value means that
             other programs use the cores; (generation + training) / machine is then a lower bound for any overlap

The first `--warmup` steps are not counted. Responses have a fixed length, and seeds are fixed.
"""

import argparse
import dataclasses
import json
import os
import statistics
import tempfile
from pathlib import Path

from checked import below_one, check_device, check_warmup, one_or_more, zero_or_more
from detached_runs import Measured, Workload, machine_gain, run

HALF_BILLION = {
    "hidden": 896,
    "layers": 24,
    "inner": 4864,
    "kv_heads": 2,
    "vocabulary": 151_936,
    "prompt_tokens": 128,
    "new_tokens": 256,
}


def halves(turns: Measured) -> tuple[float, float]:
    """Return the seconds per step of generation and of training, each alone."""
    return turns.work_per_step("maker-0"), turns.work_per_step("trainer-0")


def row_of(turns: Measured, detached: Measured, machine: float) -> dict[str, float]:
    """Return one repeat in milliseconds per step, with the ratios."""
    making, learning = halves(turns)
    ideal = max(making, learning)
    share = {
        f"{actor}, {what}": seconds / detached.seconds
        for actor, spent in detached.spent.items()
        for what, seconds in spent.items()
        if what.startswith("wait_")
    }
    return {
        "generation_ms": making * 1e3,
        "training_ms": learning * 1e3,
        "ideal_ms": ideal * 1e3,
        "turns_ms": turns.seconds_per_step * 1e3,
        "detached_ms": detached.seconds_per_step * 1e3,
        "wall_over_ideal": detached.seconds_per_step / ideal,
        "overlap": ideal / detached.seconds_per_step,
        "machine": machine,
        "overlap_of_what_the_machine_allows": max(ideal, (making + learning) / machine) / detached.seconds_per_step,
        "gain_over_turns": turns.seconds_per_step / detached.seconds_per_step,
        "samples_per_second": detached.samples_per_second,
        **share,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=one_or_more, default=128)
    parser.add_argument("--layers", type=one_or_more, default=2)
    parser.add_argument("--half-billion", action="store_true", help="the model and lengths described above")
    parser.add_argument("--prompt-tokens", type=one_or_more, default=16)
    parser.add_argument("--new-tokens", type=one_or_more, default=48)
    parser.add_argument("--batch", type=one_or_more, default=64)
    parser.add_argument("--micro-batch", type=zero_or_more, default=0, help="samples per pass of the learner; 0 = all")
    parser.add_argument("--steps", type=one_or_more, default=28)
    parser.add_argument("--warmup", type=zero_or_more, default=4)
    parser.add_argument("--repeats", type=one_or_more, default=3)
    parser.add_argument("--staleness", type=zero_or_more, default=1)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--trainer-share", type=below_one, default=0.5, help="share of the GPU; the maker gets the rest"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write every repeat to this file")
    arguments = parser.parse_args()
    check_device(parser, arguments.device)
    check_warmup(parser, steps=arguments.steps, warmup=arguments.warmup)
    workload = Workload(
        hidden=arguments.hidden,
        layers=arguments.layers,
        prompt_tokens=arguments.prompt_tokens,
        new_tokens=arguments.new_tokens,
        batch=arguments.batch,
        micro_batch=arguments.micro_batch,
        steps=arguments.steps,
        device=arguments.device,
        dtype="bfloat16" if arguments.device == "cuda" else "float32",
        trainer_share=arguments.trainer_share,
        seed=arguments.seed,
    )
    if arguments.half_billion:
        workload = dataclasses.replace(workload, **HALF_BILLION)
    print(f"load average {os.getloadavg()[0]:.1f}, {workload}", flush=True)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for _ in range(arguments.repeats):
            turns = run(workload, Path(name), staleness=0, warmup=arguments.warmup)
            machine = machine_gain(2)
            detached = run(workload, Path(name), staleness=arguments.staleness, warmup=arguments.warmup)
            rows.append(row_of(turns, detached, machine))
            said = f"overlap {rows[-1]['overlap']:.2f}, machine {machine:.2f}, load average {os.getloadavg()[0]:.1f}"
            print(f"  {said}", flush=True)
    medians = {key: statistics.median(row.get(key, 0.0) for row in rows) for key in rows[0]}
    print("| per step | median of", len(rows), "|\n|---|---|")
    for key, value in medians.items():
        print(f"| {key} | {value:.1f} |" if key.endswith("_ms") else f"| {key} | {value:.3g} |")
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"workload": str(workload), "repeats": rows, "medians": medians}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()

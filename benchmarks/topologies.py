"""Does every shape of makers and trainers finish, and learn? The demo's task, one private Ray for each shape.

    python benchmarks/topologies.py                           1×1, 2×1, 1×2, 2×2, 3×2 and 1×3, 40 steps each
    python benchmarks/topologies.py --shapes 4x1 --steps 80

The demo's base model, reward and learning rates. A step is 60 samples over all trainers, whatever their number, so the
shapes do the same work; at `max_staleness` 1 makers and trainers overlap. Reported: mean reward of 256 fresh samples
from the weights before and after, samples trained on (they must be steps × 60), the greatest age of any sample, and
seconds from the first sample to the saved model and for the whole run with starting Ray and loading models.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

from checked import one_or_more, two_counts, zero_or_more

SHAPES = ("1x1", "2x1", "1x2", "2x2", "3x2", "1x3")
SAMPLES_PER_STEP = 60


def settings(makers: int, trainers: int, *, base: str, folder: str, steps: int, staleness: int, seed: int):
    """The demo's settings for another shape."""
    from coati.config import build_config

    return build_config(
        {
            "run": {"name": "topologies", "seed": seed, "output": folder},
            "model": {"path": base, "device": "cpu"},
            "prompts": {"path": str(Path(folder) / "prompts.jsonl")},
            "reward": {"function": "coati.demo.reward:film_sentiment"},
            "rollout": {"prompts_per_batch": SAMPLES_PER_STEP // makers, "max_new_tokens": 16},
            "algorithm": {"kl_coef": 0.05},
            "train": {
                "total_steps": steps,
                "batch_size": SAMPLES_PER_STEP // trainers,
                "actor_lr": 1e-3,
                "critic_lr": 1e-3,
                "warmup_steps": 2,
            },
            "topology": {"makers": makers, "trainers": trainers, "max_staleness": staleness, "threads_per_actor": 1},
            "logging": {"tensorboard": False, "samples_kept": 0},
        }
    )


def run(makers: int, trainers: int, options: dict) -> dict:
    """Train once on a private Ray and evaluate before and after."""
    from coati.cli.train import quiet_libraries
    from coati.demo.evaluation import evaluate
    from coati.demo.grammar import PROMPTS
    from coati.monitor import RunLog, read_jsonl
    from coati.ray.launcher import DetachedRun

    quiet_libraries(verbose=False)
    with tempfile.TemporaryDirectory() as folder:
        config = settings(makers, trainers, folder=folder, **options)
        Path(config.prompts.path).write_text("".join(json.dumps({"prompt": p}) + "\n" for p in PROMPTS))
        before = evaluate(config, config.model.path, num_samples=256)
        log = RunLog(Path(folder), total_steps=config.train.total_steps)
        started = time.monotonic()
        DetachedRun(config, log).run(f"{folder}/model")
        whole = time.monotonic() - started
        training = log.snapshot().elapsed
        log.close()
        after = evaluate(config, f"{folder}/model", num_samples=256)
        rows = read_jsonl(Path(folder) / "metrics.jsonl")
    return {
        "shape": f"{makers}×{trainers}",
        "before": before.reward,
        "after": after.reward,
        "kl": after.kl,
        "samples": int(sum(row["train/samples"] for row in rows)) * trainers,  # the first rank's, and all take the same
        "oldest": max(row["train/age_max"] for row in rows),
        "training": training,
        "whole": whole,
    }


def main() -> None:
    from coati.demo.base_model import pretrain

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shapes = "makers x trainers; both must divide 60"
    parser.add_argument("--shapes", type=two_counts("x"), nargs="+", default=list(SHAPES), help=shapes)
    parser.add_argument("--steps", type=one_or_more, default=40)
    parser.add_argument("--staleness", type=zero_or_more, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write every run here")
    arguments = parser.parse_args()
    for shape in arguments.shapes:
        if any(SAMPLES_PER_STEP % int(number) for number in shape.split("x")):
            parser.error(f"--shapes must divide the {SAMPLES_PER_STEP} samples of a step, got {shape!r}")
    base = tempfile.mkdtemp()
    pretrain(Path(base))
    options = {"base": base, "steps": arguments.steps}
    options |= {"staleness": arguments.staleness, "seed": arguments.seed}
    print("| makers × trainers | reward before | after | KL | samples | oldest | training, s | whole run, s |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    rows = []
    for shape in arguments.shapes:
        row = run(*map(int, shape.split("x")), options)
        rows.append(row)
        print(
            f"| {row['shape']} | {row['before']:.2f} | {row['after']:.2f} | {row['kl']:.1f} | {row['samples']:,} | "
            f"{row['oldest']:.0f} | {row['training']:.0f} | {row['whole']:.0f} |",
            flush=True,
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()

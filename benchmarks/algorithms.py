"""Compare how losses and algorithms learn a small task, on-policy and on old data, with several seeds.

    python benchmarks/algorithms.py --output runs/algorithms              all of them, 5 seeds; resumable
    python benchmarks/algorithms.py --output runs/x --variants clip --seeds 1 --versions 10
    python benchmarks/algorithms.py --output runs/algorithms --report     only the tables

The task has a verifier: a response scores 1 if prompt and response form a sentence of the demo's film grammar that
praises (compound sentiment above 0.6), else 0. The base model is the demo's. Each run is one process with one thread,
in which a maker and a trainer alternate. A version has 8 prompts × 8 samples and four optimizer steps, so that ratios
leave 1 even on-policy, and no KL penalty. Staleness 0 trains each version on its own samples, staleness 1 (the default
bound) on those of the previous version.

The report has medians over seeds: success of 256 fresh samples of the final weights (with the lowest and highest seed),
mean success over all samples of the run (learning speed), KL to the base model (distill: to the teacher) in nats per
sample, distinct texts among 64, the fraction of tokens clipped or masked, and success at equal compute: over the last
three versions completed within the CPU time of the "clip" run (GRPO) with the same seed and staleness. CPU time hardly
depends on other processes.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from checked import quiet_libraries

HERE = Path(__file__).resolve().parent
GROUP_SIZE, GROUPS = 8, 8
STALENESS = (0, 1)
PRAISE = 0.6

GRPO: dict[str, Any] = {"name": "grpo", "kl_coef": 0.0}
VARIANTS: dict[str, dict[str, Any]] = {
    **{loss: {**GRPO, "loss": loss} for loss in ("clip", "cispo", "dppo", "sapo", "gspo", "icepop", "geometric_mask")},
    "maxrl": {"name": "maxrl"},
    "dr_grpo": {"name": "dr_grpo"},
    "dapo": {"name": "dapo", "dynamic_sampling": False},  # the schedule cannot hold replacement prompts
    "rloo": {"name": "rloo", "kl_coef": 0.0},
    "reinforce++": {"name": "reinforce++", "kl_coef": 0.0},
    "reinforce++_baseline": {"name": "reinforce++_baseline", "kl_coef": 0.0},
    "ppo": {"name": "ppo", "kl_coef": 0.0},
    "vapo": {"name": "vapo"},
    "vapo, λ 0.5 × length, warm-up": {"name": "vapo", "adaptive_lam": 0.5, "critic_warmup_steps": 8},
}


def is_praise(completions: Sequence[str], prompts: Sequence[str], **_: object) -> list[float]:
    """Return 1 for a sentence of the grammar that praises, else 0."""
    from sentences import is_grammatical

    from coati.demo.reward import film_sentiment

    warmth = film_sentiment(completions, prompts)
    texts = [f"{prompt} {completion}" for prompt, completion in zip(prompts, completions, strict=True)]
    return [float(is_grammatical(text) and score > PRAISE) for text, score in zip(texts, warmth, strict=True)]


def make_config(algorithm: dict[str, Any], seed: int, staleness: int, *, base: str, versions: int, teacher: str = ""):
    """Return the settings of one run."""
    from coati.config import build_config

    return build_config(
        {
            "run": {"name": "algorithms", "seed": seed},
            "model": {"path": base, "device": "cpu", "reference": teacher},
            "prompts": {"path": f"{base}/prompts.jsonl"},
            "reward": {"function": "algorithms:is_praise", "search_paths": [str(HERE)]},
            "rollout": {"prompts_per_batch": GROUPS, "samples_per_prompt": GROUP_SIZE, "max_new_tokens": 16},
            "algorithm": algorithm,
            "train": {
                "total_steps": versions,
                "epochs": 4,
                "batch_size": GROUPS * GROUP_SIZE,
                "actor_lr": 5e-4,
                "critic_lr": 2e-3,
                "warmup_steps": 2,
            },
            "topology": {"max_staleness": staleness, "threads_per_actor": 1},
        }
    )


def run(variant: str, algorithm: dict[str, Any], seed: int, staleness: int, **options: Any) -> dict[str, Any]:
    """Train once and return the row for runs.jsonl."""
    import torch
    from fresh_samples import evaluate
    from staleness_run import Schedule, StaleRun

    torch.set_num_threads(1)
    config = make_config(algorithm, seed, staleness, **options)
    versions, per_version = config.train.total_steps, GROUPS if config.algorithm.uses_groups else GROUPS * GROUP_SIZE
    trained = [list(range(version * per_version, (version + 1) * per_version)) for version in range(versions)]
    written: list[list[int]] = [[] for _ in range(versions)]
    for version, numbers in enumerate(trained):
        written[max(0, version - staleness)] += numbers
    seconds: list[float] = []

    class Timed(StaleRun):
        def publish(self) -> None:
            super().publish()
            seconds.append(time.process_time() - started)

    training = Timed(config, Schedule(written, trained))
    started = time.process_time()
    training.train()
    with tempfile.TemporaryDirectory() as folder:
        training.strategy_save_actor(folder)
        final = evaluate(config, folder, num_samples=256)
        if (variant, seed, staleness) == ("clip", 0, 0):  # becomes the teacher of "distill"
            training.strategy_save_actor(f"{options['base']}/teacher")
    rewards = dict(training.rewards_by_version)
    return {
        "variant": variant,
        "seed": seed,
        "staleness": staleness,
        **{key: final.numbers[key] for key in ("reward", "kl", "distinct", "grammatical")},
        "area": statistics.fmean(reward for each in rewards.values() for reward in each),
        "curve": {version: round(statistics.fmean(each), 4) for version, each in rewards.items()},
        "seconds": [round(each, 2) for each in seconds],
        "clip_fraction": statistics.fmean(training.metrics["policy/clip_fraction"]),
        "dropped": statistics.fmean(training.metrics.get("off_policy/dropped") or [0.0]),
        "skipped": training.metrics["optim/skipped_batches"][-1],
        "samples": [sample.prompt + sample.response for sample in final.samples[:4]],
    }


def at_compute(row: dict[str, Any], budget: float) -> float:
    """Return the success over the last three versions completed within `budget` seconds of CPU time."""
    made = [int(version) for version in row["curve"] if int(version) == 0 or row["seconds"][int(version) - 1] <= budget]
    return statistics.fmean(row["curve"][str(version)] for version in made[-3:])


def report(rows: list[dict[str, Any]]) -> None:
    """Print the tables and some samples."""
    budgets = {(row["seed"], row["staleness"]): row["seconds"][-1] for row in rows if row["variant"] == "clip"}
    for staleness in STALENESS:
        print(f"\nStaleness {staleness}\n")
        heads = ["variant", "seeds", "success", "lowest to highest", "over the run", "equal compute", "KL", "distinct"]
        print(f"| {' | '.join([*heads, 'clipped'])} |\n|{'---|' * (len(heads) + 1)}")
        names = dict.fromkeys(row["variant"] for row in rows)
        for name in names:
            own = [row for row in rows if (row["variant"], row["staleness"]) == (name, staleness)]
            if not own:
                continue
            middle = {key: statistics.median(row[key] for row in own) for key in ("reward", "area", "kl", "distinct")}
            held = statistics.median(row["clip_fraction"] + row["dropped"] for row in own)
            lowest, highest = min(row["reward"] for row in own), max(row["reward"] for row in own)
            equal = [at_compute(row, budgets[cell]) for row in own if (cell := (row["seed"], staleness)) in budgets]
            cells = [
                name,
                len(own),
                f"{middle['reward']:.2f}",
                f"{lowest:.2f} to {highest:.2f}",
                f"{middle['area']:.2f}",
            ]
            cells += [f"{statistics.median(equal):.2f}" if equal else "", f"{middle['kl']:.1f}"]
            cells += [f"{middle['distinct']:.0%}", f"{held:.1%}"]
            print(f"| {' | '.join(map(str, cells))} |")
    print("\nSamples (seed 0):")
    for row in rows:
        if row["seed"] == 0:
            print(f"  {row['variant']:>30}, staleness {row['staleness']}: {row['samples'][0]} | {row['samples'][1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for runs.jsonl and the base model")
    parser.add_argument("--variants", nargs="+", default=[*VARIANTS, "distill"], choices=[*VARIANTS, "distill"])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--versions", type=int, default=20)
    parser.add_argument("--report", action="store_true")
    arguments = parser.parse_args()
    sys.path.insert(0, str(HERE))
    arguments.output.mkdir(parents=True, exist_ok=True)
    journal, base = arguments.output / "runs.jsonl", arguments.output / "base"
    rows = [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []
    done = {(row["variant"], row["seed"], row["staleness"]) for row in rows}
    # Ordered by seed, so that an interrupted benchmark has complete tables for the first seeds.
    cells = [
        (variant, seed, staleness)
        for seed in range(arguments.seeds)
        for variant in arguments.variants
        for staleness in STALENESS
        if (variant, seed, staleness) not in done
    ]
    if not arguments.report and cells:
        from coati.demo.base_model import pretrain
        from coati.demo.grammar import PROMPTS

        quiet_libraries()
        if not base.exists():
            pretrain(base)
            (base / "prompts.jsonl").write_text("".join(json.dumps({"prompt": each}) + "\n" for each in PROMPTS))
        run("warm-up", GRPO, 0, 0, base=str(base), versions=2)  # so that no measured run pays for imports
        for number, (variant, seed, staleness) in enumerate(cells, 1):
            options = {"base": str(base), "versions": arguments.versions}
            if variant == "distill":  # the final model of "clip" with seed 0
                options["teacher"] = str(base / "teacher")
            algorithm = VARIANTS.get(variant, {"name": "distill"})
            row = run(variant, algorithm, seed, staleness, **options)
            with journal.open("a") as file:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
            rows.append(json.loads(json.dumps(row)))
            print(
                f"{number} of {len(cells)}: {variant}, seed {seed}, staleness {staleness}: {row['reward']:.2f}",
                flush=True,
            )
    report(rows)


if __name__ == "__main__":
    main()

"""Do the algorithms learn? Each of them on the demo's task, with several seeds.

    python benchmarks/algorithms.py                               every algorithm, 5 seeds
    python benchmarks/algorithms.py --algorithms grpo --seeds 1 --steps 40

Every run is synchronous and on-policy, in a process of one thread: the demo's base model and reward, groups of 8
samples, 64 samples a step, the same learning rate for all. The KL coefficient is the same where an algorithm has a KL
term (`--kl`); those whose papers leave it out run as their papers say (0), unless `--kl-for-all` is given. Reported are
means of 256 fresh samples from the final weights: reward (before and after training), KL to the base model, and how
many of 64 samples are distinct; medians over seeds, with the lowest and highest reward.
"""

import argparse
import concurrent.futures
import json
import multiprocessing
import os
import statistics
import tempfile
from pathlib import Path

SAMPLES_PER_PROMPT = 8


def settings(name: str, seed: int, *, base: str, folder: str, steps: int, kl: float, kl_for_all: bool):
    """The demo's settings with another algorithm."""
    from coati.config import AlgorithmSettings, build_config

    algorithm = {"name": name}
    if kl_for_all or AlgorithmSettings(name=name).kl_coef:
        algorithm["kl_coef"] = kl
    prompts = Path(folder) / "prompts.jsonl"
    return build_config(
        {
            "run": {"name": "algorithms", "seed": seed, "output": folder},
            "model": {"path": base, "device": "cpu"},
            "prompts": {"path": str(prompts)},
            "reward": {"function": "coati.demo.reward:film_sentiment"},
            "rollout": {"prompts_per_batch": 8, "samples_per_prompt": SAMPLES_PER_PROMPT, "max_new_tokens": 16},
            "algorithm": algorithm,
            "train": {
                "total_steps": steps,
                "batch_size": 64,
                "actor_lr": 1e-3,
                "critic_lr": 1e-3,
                "warmup_steps": 2,
            },
            "topology": {"max_staleness": 0, "threads_per_actor": 1},
            "logging": {"tensorboard": False, "samples_kept": 0},
        }
    )


def run(name: str, seed: int, options: dict) -> dict:
    """Train once and evaluate before and after."""
    import torch

    torch.set_num_threads(1)
    from coati.cli.train import quiet_libraries
    from coati.demo.evaluation import evaluate
    from coati.demo.grammar import PROMPTS
    from coati.ledger.audit import audit_run
    from coati.monitor import RunLog
    from coati.synchronous import SynchronousRun

    quiet_libraries(verbose=False)
    with tempfile.TemporaryDirectory() as folder:
        config = settings(name, seed, folder=folder, **options)
        Path(config.prompts.path).write_text("".join(json.dumps({"prompt": p}) + "\n" for p in PROMPTS))
        log = RunLog(None, total_steps=config.train.total_steps)
        training = SynchronousRun(config, log)
        before = evaluate(config, config.model.path, num_samples=256)
        training.run(f"{folder}/model")
        account = audit_run(config.output_folder)
        after = evaluate(config, f"{folder}/model", num_samples=256)
    return {
        "algorithm": name,
        "seed": seed,
        "kl_coef": config.algorithm.kl_coef,
        "before": before.numbers["reward"],
        "reward": after.numbers["reward"],
        "kl": after.numbers["kl"],
        "distinct": after.numbers["distinct"],
        "samples": [sample.prompt + sample.response for sample in after.samples[:3]],
        "dropped": sum(row[3] for row in account.table() if row[0] == "dropped"),
    }


def main() -> None:
    from coati.config.algorithm import ALGORITHMS
    from coati.demo.base_model import pretrain

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS), choices=list(ALGORITHMS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--kl", type=float, default=0.05)
    parser.add_argument("--kl-for-all", action="store_true")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--json", type=Path, help="write every run here")
    arguments = parser.parse_args()
    base = tempfile.mkdtemp()
    pretrain(Path(base))
    options = {"base": base, "steps": arguments.steps, "kl": arguments.kl, "kl_for_all": arguments.kl_for_all}
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(arguments.workers, mp_context=spawn) as pool:
        jobs = [
            pool.submit(run, name, seed, options) for name in arguments.algorithms for seed in range(arguments.seeds)
        ]
        for number, job in enumerate(concurrent.futures.as_completed(jobs), 1):
            print(f"\r{number} of {len(jobs)} runs", end="", flush=True)
            job.result()
        runs = [job.result() for job in jobs]
    print("\n\n| algorithm | KL coef. | reward before | after | lowest to highest | KL | distinct of 64 |")
    print("|---|---|---|---|---|---|---|")
    for name in arguments.algorithms:
        rows = [row for row in runs if row["algorithm"] == name]
        middle = {key: statistics.median(row[key] for row in rows) for key in ("before", "reward", "kl", "distinct")}
        rewards = [row["reward"] for row in rows]
        print(
            f"| {name} | {rows[0]['kl_coef']:g} | {middle['before']:.2f} | {middle['reward']:.2f} | "
            f"{min(rewards):.2f} to {max(rewards):.2f} | {middle['kl']:.1f} | {middle['distinct']:.0%} |"
        )
    print("\nOne sample of each (seed 0):")
    for row in runs:
        if row["seed"] == 0:
            print(f"  {row['algorithm']:>20}: {row['samples'][0]}")
    if arguments.json:
        arguments.json.write_text(json.dumps(runs, indent=2) + "\n")


if __name__ == "__main__":
    main()

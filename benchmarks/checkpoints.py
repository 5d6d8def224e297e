"""Measure what checkpoints cost a trainer: alternating steps with and without them, in one process.

    python benchmarks/checkpoints.py                  a 0.5B Qwen2 shape, float32 weights and moments, on a GPU
    python benchmarks/checkpoints.py --device cpu     a model of the demo's size, one thread

A step is the learner's, on 64 samples that are ready: a trainer that waits for data has time to spare, so this is the
maximum cost of checkpoints. Blocks of steps alternate: one without a checkpoint, and one that starts with
`Checkpoints.save` (the training thread copies the state to host memory; another thread writes, syncs and renames it
while training continues) and ends when the checkpoint is written, because the next one would wait for that. The cost is
the mean difference with its standard error; divided by the time of `--every` steps, it is the share of the throughput.
"""

import argparse
import json
import math
import statistics
import tempfile
import time
from pathlib import Path

import torch
from checked import check_device, one_or_more, quiet_libraries, two_or_more
from train_step import TINY, Case, Shape, make_batch, make_learner

from coati.config import TrainSettings
from coati.demo.base_model import build_tokenizer
from coati.devices import set_up_cpu
from coati.trainer.checkpoints import Checkpoints
from coati.trainer.ppo import PPOLearner

DEMO = Shape(
    layers=2,
    width=64,
    heads=4,
    kv_heads=4,
    intermediate=128,
    vocabulary=320,
    max_length=64,
    max_positions=64,
    group_prompt=8,
    group_response=16,
)


class Blocks:
    """Blocks of learner steps, with or without a checkpoint."""

    def __init__(self, shape: Shape, device: str, folder: Path) -> None:
        self.learner: PPOLearner = make_learner(Case(is_mixed=device == "cuda"), shape, device)
        self._batch = make_batch(shape, "groups", seed=0)[0]
        self._checkpoints = Checkpoints(
            folder, self.learner, None, train=TrainSettings(checkpoints_kept=1), tokenizer=build_tokenizer
        )
        self._version = 0

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.learner.step(self._batch.select(slice(None)))  # the learner moves its batch and may write to it

    def save(self) -> None:
        self._version += 1
        self._checkpoints.save(self._version, {})

    def block(self, count: int, *, saves: bool) -> dict[str, float]:
        """Run a block and return its seconds and those of its parts."""
        began = time.perf_counter()
        if saves:
            self.save()
        copied = time.perf_counter()
        self.steps(count)
        stepped = time.perf_counter()
        self._checkpoints.wait()
        ended = time.perf_counter()
        return {"total": ended - began, "copy": copied - began, "steps": stepped - copied, "wait": ended - stepped}

    def time_to_write(self) -> float:
        """Return the seconds to write a checkpoint while training is idle."""
        began = time.perf_counter()
        self.save()
        self._checkpoints.wait()
        return time.perf_counter() - began


def measure(shape: Shape, device: str, folder: Path, *, steps: int, rounds: int) -> dict[str, object]:
    blocks = Blocks(shape, device, folder)
    blocks.steps(5)
    first = blocks.block(3, saves=True)  # includes one-time costs
    write = blocks.time_to_write()
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    print(f"{size / 2**20:.1f} MiB; first copy {first['copy']:.2f} s; written in {write:.2f} s", flush=True)
    pairs = []
    for number in range(rounds):
        order = (False, True) if number % 2 == 0 else (True, False)
        pairs.append({saves: blocks.block(steps, saves=saves) for saves in order})
    costs = [pair[True]["total"] - pair[False]["total"] for pair in pairs]
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "bytes": size,
        "first_copy_seconds": first["copy"],
        "write_seconds": write,
        "block_steps": steps,
        "step_seconds": statistics.median(pair[False]["total"] for pair in pairs) / steps,
        "copy_seconds": statistics.median(pair[True]["copy"] for pair in pairs),
        "cost_seconds": statistics.fmean(costs),
        "cost_error": statistics.stdev(costs) / math.sqrt(len(costs)),
        "rounds": [{"without": pair[False], "with": pair[True]} for pair in pairs],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="use a tiny model and tiny batches")
    parser.add_argument("--every", type=one_or_more, default=50, help="steps per checkpoint (train.save_every)")
    parser.add_argument("--steps", type=one_or_more, help="steps per block; default 50, on the CPU 10")
    parser.add_argument("--rounds", type=two_or_more, help="pairs of blocks; default 5, on the CPU 100")
    parser.add_argument(
        "--folder", type=Path, help="parent folder for checkpoints; default: the system's temporary folder"
    )
    parser.add_argument("--json", type=Path, help="also write all numbers to this file")
    options = parser.parse_args()
    check_device(parser, options.device)
    steps, rounds = (10, 100) if options.device == "cpu" else (50, 5)
    quiet_libraries()
    if options.device == "cpu":
        set_up_cpu(1)
    shape = TINY if options.tiny else DEMO if options.device == "cpu" else Shape()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        steps, rounds = options.steps or steps, options.rounds or rounds
        result = measure(shape, options.device, Path(folder), steps=steps, rounds=rounds)
    step, cost, error = (result[name] for name in ("step_seconds", "cost_seconds", "cost_error"))
    share, share_error = (seconds / (step * options.every) for seconds in (cost, error))
    print(
        f"a checkpoint costs {cost:.3f} ± {error:.3f} s or {cost / step:.2f} steps of {step:.3f} s, of which "
        f"{result['copy_seconds']:.3f} s for the copy; every {options.every} steps: {share:.1%} ± {share_error:.1%}"
    )
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

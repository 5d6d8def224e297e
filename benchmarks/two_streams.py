"""Actor and critic one after the other, or beside each other (`train.overlap_critic`): a step's time and memory.

    python benchmarks/two_streams.py                              0.5B parameters each; 64, 16, 4 samples of 128 + 256
    python benchmarks/two_streams.py --share 0.5 --json two.json  on half of the card's processors, as beside a maker
    python benchmarks/two_streams.py --device cpu --tiny          a smoke test: there are no streams, and no difference

Both make the same step from the same batch with `train.compile`, in passes of at most 32,768 tokens; in turn, medians
after a warm-up. `apart` is how far their losses are from each other. The peak is that of torch's memory, which is
emptied before each of the two.
"""

import argparse
import contextlib
import copy
import gc
import json
import statistics
from dataclasses import replace
from pathlib import Path

import torch
from checked import below_one, check_device, one_or_more
from logprob_memory import timed
from train_step import TINY, Shape, make_batch
from transformers import AutoModelForCausalLM

from coati.cpu import set_up_cpu
from coati.gpu import ProcessorShare
from coati.models import Actor, Critic
from coati.trainer.ppo import PPOLearner, PPOSettings
from coati.trainer.strategies import DDPStrategy

WAYS = {"in turn": False, "beside": True}


def make_learner(shape: Shape, device: str) -> PPOLearner:
    torch.manual_seed(0)
    is_cuda = device == "cuda"
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(shape.config(), dtype=torch.bfloat16 if is_cuda else torch.float32)
    # A rate of 0, so that both ways begin every step with the same weights.
    settings = PPOSettings(actor_lr=0.0, critic_lr=0.0, micro_batch_tokens=shape.micro_batch_tokens, compile=is_cuda)
    strategy = DDPStrategy(seed=0, device=device)
    return PPOLearner(Actor(model), Critic(copy.deepcopy(model.base_model)), strategy, settings)


def measure(shape: Shape, learner: PPOLearner, arguments: argparse.Namespace) -> list[dict[str, object]]:
    """A row for each way."""
    batch, _, _ = make_batch(shape, "groups", seed=0)
    is_cuda = arguments.device == "cuda"
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    peaks: dict[str, float] = {}
    losses: dict[str, tuple[float, float]] = {}

    def step(way: str) -> None:
        metrics = learner.step(batch.select(slice(None)))
        losses[way] = metrics["actor_loss"], metrics["critic_loss"]

    for way, overlaps in WAYS.items():
        learner.settings = replace(learner.settings, overlap_critic=overlaps)
        if is_cuda:
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        for _ in range(arguments.warm_up):
            step(way)
        peaks[way] = torch.cuda.max_memory_reserved() / 2**30 if is_cuda else 0.0
    for _ in range(arguments.steps):
        for way, overlaps in WAYS.items():
            learner.settings = replace(learner.settings, overlap_critic=overlaps)
            seconds[way].append(timed(lambda way=way: step(way), arguments.device))
    medians = {way: statistics.median(taken) for way, taken in seconds.items()}
    rows: list[dict[str, object]] = [
        {
            "samples": shape.grouped_samples,
            "way": way,
            "step_ms": median * 1e3,
            "over_in_turn": median / medians["in turn"],
            "peak_gib": peaks[way],
            "all_ms": [taken * 1e3 for taken in seconds[way]],
            "apart": max(abs(mine - one) for mine, one in zip(losses[way], losses["in turn"], strict=True)),
        }
        for way, median in medians.items()
    ]
    for row in rows:
        print(
            f"{row['samples']:>4} samples {row['way']:<8} {row['step_ms']:>8.1f} ms {row['over_in_turn']:>6.2f} of "
            f"in turn {row['peak_gib']:>6.1f} GiB  {row['apart']:.1e} apart",
            flush=True,
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=one_or_more, nargs="+", default=[64, 16, 4])
    parser.add_argument("--share", type=below_one, help="of the card's processors; default: all")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model and batches of nearly nothing")
    parser.add_argument("--steps", type=one_or_more, default=9, help="timed steps")
    parser.add_argument("--warm-up", type=one_or_more, default=2, help="steps before them")
    parser.add_argument("--json", type=Path, help="write all numbers here too")
    arguments = parser.parse_args()
    check_device(parser, arguments.device)
    shape = replace(TINY if arguments.tiny else Shape(), micro_batch_tokens=32_768)
    if arguments.device == "cpu":
        set_up_cpu()
    learner = make_learner(shape, arguments.device)
    is_confined = arguments.device == "cuda" and arguments.share
    processors = ProcessorShare(learner.device, arguments.share) if is_confined else None
    rows: list[dict[str, object]] = []
    with processors.used() if processors else contextlib.nullcontext():
        for samples in arguments.samples:
            rows += measure(replace(shape, grouped_samples=samples), learner, arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps({"share": arguments.share, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

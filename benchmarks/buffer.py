"""Measure items per second through the replay buffer, relative to raw Ray calls that move the same bytes.

    python benchmarks/buffer.py
    python benchmarks/buffer.py --tokens 128+256 --batches 64

Buffer: `extend` with single items, which are checked, collated to training batches and put into the queue actor; then
`sample`, which takes whole batches. Raw: an actor with a list, one call to put the arrays of a training batch and one
to get them back, without checks, collation, counts or limits. A ratio of 1 would mean that these are free.

The table also has the time a consumer waits for a batch that is ready, and the share of checking and collating. Both
sides alternate after a warm-up; values are medians.
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import ray
import torch
from checked import one_or_more, two_counts, zero_or_more

from coati.experience_buffer.utils import BufferItem, make_experience_batch
from coati.ray.detached_replay_buffer import DetachedReplayBuffer


@ray.remote(num_cpus=0)
class Keeper:
    """The minimal actor: a list behind two calls."""

    def __init__(self) -> None:
        self._batches: list = []

    def put(self, batch: object) -> None:
        self._batches.append(batch)

    def get(self) -> object:
        return self._batches.pop(0)


def make_items(count: int, prompt: int, response: int, seed: int) -> list[BufferItem]:
    generator = torch.Generator().manual_seed(seed)

    def floats() -> torch.Tensor:
        return torch.randn(response, generator=generator)

    return [
        BufferItem(
            sequences=torch.randint(0, 30_000, (prompt + response,), generator=generator),
            action_log_probs=floats(),
            values=floats(),
            reward=torch.tensor(1.0),
            kl=floats(),
            advantages=floats(),
            attention_mask=torch.ones(prompt + response, dtype=torch.long),
            action_mask=torch.ones(response, dtype=torch.bool),
            sample_ids=torch.tensor(index),
            policy_versions=torch.zeros(response, dtype=torch.long),
            temperatures=torch.tensor(1.0),
        )
        for index in range(count)
    ]


def through_buffer(buffer: DetachedReplayBuffer, items: list[BufferItem], num_batches: int) -> float:
    started = time.perf_counter()
    buffer.extend(items)
    for _ in range(num_batches):
        buffer.sample()
    return time.perf_counter() - started


def through_ray(keeper: object, arrays: list[dict]) -> float:
    started = time.perf_counter()
    for batch in arrays:
        ray.get(keeper.put.remote(batch))
    for _ in arrays:
        ray.get(keeper.get.remote())
    return time.perf_counter() - started


def collating(items: list[BufferItem], batch: int) -> float:
    started = time.perf_counter()
    for start in range(0, len(items), batch):
        make_experience_batch(items[start : start + batch])
    return time.perf_counter() - started


def waiting(buffer: DetachedReplayBuffer, items: list[BufferItem], batch: int) -> float:
    """Return the seconds until a consumer gets a batch that is ready."""
    buffer.extend(items[:batch])
    started = time.perf_counter()
    buffer.sample()
    return time.perf_counter() - started


def measure(tokens: str, batch: int, arguments: argparse.Namespace) -> dict[str, object]:
    prompt, response = map(int, tokens.split("+"))
    items = make_items(batch * arguments.count, prompt, response, arguments.seed)
    batches = [make_experience_batch(items[start : start + batch]) for start in range(0, len(items), batch)]
    arrays = [{name: tensor.numpy() for name, tensor in one.tensors()} for one in batches]
    buffer, keeper = DetachedReplayBuffer(batch), Keeper.remote()
    seconds: dict[str, list[float]] = {"buffer": [], "ray": [], "collate": [], "wait": []}
    for _ in range(arguments.warmups + arguments.repeats):
        seconds["buffer"].append(through_buffer(buffer, items, arguments.count))
        seconds["ray"].append(through_ray(keeper, arrays))
        seconds["collate"].append(collating(items, batch))
        seconds["wait"].append(waiting(buffer, items, batch))
    buffer.close()
    ray.kill(keeper)
    medians = {name: statistics.median(values[arguments.warmups :]) for name, values in seconds.items()}
    return {
        "tokens": tokens,
        "batch": batch,
        "megabytes": sum(array.nbytes for array in arrays[0].values()) / 2**20,
        "buffer_items_per_second": len(items) / medians["buffer"],
        "ray_items_per_second": len(items) / medians["ray"],
        "ratio": medians["ray"] / medians["buffer"],
        "collate_share": medians["collate"] / medians["buffer"],
        "next_batch_ms": medians["wait"] * 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = ["16+16", "128+256", "512+1536"]
    parser.add_argument("--tokens", type=two_counts("+"), nargs="+", default=sizes, metavar="PROMPT+RESPONSE")
    parser.add_argument("--batches", type=one_or_more, nargs="+", default=[8, 64], metavar="SAMPLES")
    parser.add_argument("--count", type=one_or_more, default=8, help="batches per repeat")
    parser.add_argument("--repeats", type=one_or_more, default=9)
    parser.add_argument("--warmups", type=zero_or_more, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    print(f"load average {os.getloadavg()[0]:.1f}")
    print("| tokens | batch | MB a batch | buffer, items/s | raw Ray | ratio | collating | next batch, ms |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    rows = []
    for tokens in arguments.tokens:
        for batch in arguments.batches:
            row = measure(tokens, batch, arguments)
            rows.append(row)
            print(
                f"| {tokens} | {batch} | {row['megabytes']:.2f} | {row['buffer_items_per_second']:,.0f} | "
                f"{row['ray_items_per_second']:,.0f} | {row['ratio']:.2f} | {row['collate_share']:.0%} | "
                f"{row['next_batch_ms']:.2f} |",
                flush=True,
            )
    ray.shutdown()
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()

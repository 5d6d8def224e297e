"""The gain of generating the next batch while reward functions score the last one, in one maker.

    python benchmarks/reward_overlap.py
    python benchmarks/reward_overlap.py --reward 0.5 1 --hidden 256
    python benchmarks/reward_overlap.py --device cuda --half-billion

The maker's real loop (`coati.experience_maker.work_loop`) in this process, without trainers: what it delivers is split
into items and dropped. The reward function sleeps, like one that calls a server or a sandbox, for `--reward` times as
long as the models need for a batch. Each length is run three times: without a reward (`models`), in turn (the next
batch waits for the scores, as with `max_staleness` 0) and overlapping; all of it `--repeats` times; medians.

    gain     seconds a batch in turn / overlapping
    ideal    the most that it can be: seconds a batch in turn / the longer of models and reward
    late     from the moment that models and reward are done with a batch until it is delivered, which is between tokens

Responses always have the same length, and seeds are fixed.
"""

import argparse
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from checked import check_device, one_or_more
from detached_runs import Workload
from overlap import HALF_BILLION
from transformers import AutoTokenizer

from coati.devices import set_up_cpu
from coati.experience import BufferItem
from coati.experience_maker import NaiveExperienceMaker
from coati.experience_maker.base import MakerBatch
from coati.experience_maker.pipeline import ExperiencePipeline
from coati.experience_maker.work_loop import WorkLoop
from coati.experience_maker.work_source import LoaderPrompts
from coati.models import Actor, Critic
from coati.rewards import FunctionReward, RewardScorer
from coati.weights.served import ServedModels


class Overlapping(ExperiencePipeline):
    """Notes when the models are done with each batch."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.begun: list[float] = []

    def advance(self, **settings: Any) -> MakerBatch | None:
        batch = super().advance(**settings)
        if batch is not None:
            self.begun.append(time.perf_counter())
        return batch


class Maker:
    """The loop, and the clock readings that the table is made of."""

    def __init__(self, workload: Workload, folder: Path) -> None:
        path = workload.save_model(folder)
        dtype = getattr(torch, workload.dtype)
        actor, critic, reference = (
            kind.from_pretrained(path, dtype=dtype).to(workload.device) for kind in (Actor, Critic, Actor)
        )
        scorer = RewardScorer(FunctionReward(self._reward), AutoTokenizer.from_pretrained(path))
        self._maker = NaiveExperienceMaker(actor, critic, scorer, reference, engine="native", seed=workload.seed)
        self._workload = workload
        self._reward_seconds = 0.0
        self._ended: list[float] = []
        self._delivered: list[float] = []

    def run(self, num_batches: int, reward_seconds: float, *, in_turn: bool) -> tuple[float, float]:
        """Seconds from one delivery to the next, and those by which one is late; medians.

        `in_turn`: each batch is finished before the next is begun.
        """
        self._reward_seconds = reward_seconds
        self._ended.clear()
        self._delivered.clear()
        pipeline = Overlapping(
            self._maker,
            ServedModels(self._maker.trained_models),
            generate_kwargs={"max_new_tokens": self._workload.new_tokens, "eos_token_id": [], "pad_token_id": 0},
        )
        prompts = LoaderPrompts(lambda: self._prompts(num_batches))
        loop = WorkLoop(pipeline, prompts, self)
        if in_turn:
            for batch in prompts:
                loop.make(batch)
        else:
            loop.run()
        ready = map(max, pipeline.begun, self._ended)
        late = [delivered - since for delivered, since in zip(self._delivered, ready, strict=True)]
        cycles = [after - before for before, after in itertools.pairwise(self._delivered)]
        return statistics.median(cycles), statistics.median(late)

    def _prompts(self, num_batches: int) -> Iterator[dict[str, Any]]:
        size = self._workload.batch
        generator = torch.Generator().manual_seed(self._workload.seed)
        for first in range(0, num_batches * size, size):
            prompts = torch.randint(3, 20, (size, self._workload.prompt_tokens), generator=generator)
            yield {"input_ids": prompts, "sample_ids": torch.arange(first, first + size)}

    def _reward(self, completions: list[str]) -> list[float]:
        time.sleep(self._reward_seconds)
        self._ended.append(time.perf_counter())
        return [float(len(text) % 7) for text in completions]

    def send(self, items: list[BufferItem]) -> None:  # noqa: ARG002
        """Take the clock reading of a delivery."""
        self._delivered.append(time.perf_counter())

    def collect(self) -> None:
        pass

    def has_room(self) -> bool:
        """Always, because nothing is kept."""
        return True

    def check_trainers(self) -> None:
        """There are none."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reward", type=float, nargs="+", default=[0.25, 0.75, 1.0, 2.0], help="in times of a batch")
    parser.add_argument("--hidden", type=one_or_more, default=128)
    parser.add_argument("--layers", type=one_or_more, default=2)
    parser.add_argument("--half-billion", action="store_true", help="the model and lengths of overlap.py")
    parser.add_argument("--new-tokens", type=one_or_more, default=48)
    parser.add_argument("--batch", type=one_or_more, default=64)
    parser.add_argument("--batches", type=one_or_more, default=8)
    parser.add_argument("--repeats", type=one_or_more, default=3)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--json", type=Path, help="write every repeat here")
    arguments = parser.parse_args()
    check_device(parser, arguments.device)
    sizes: dict[str, Any] = {
        "hidden": arguments.hidden,
        "layers": arguments.layers,
        "prompt_tokens": 16,
        "new_tokens": arguments.new_tokens,
        "batch": arguments.batch,
        "device": arguments.device,
        "dtype": "bfloat16" if arguments.device == "cuda" else "float32",
    }
    workload = Workload(**(sizes | HALF_BILLION if arguments.half_billion else sizes))
    set_up_cpu(1)
    print(f"load average {os.getloadavg()[0]:.1f}, {workload}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        maker = Maker(workload, Path(name))
        maker.run(2, 0.0, in_turn=True)
        once, _ = maker.run(arguments.batches, 0.0, in_turn=True)
    rows = []
    for factor, _ in itertools.product(arguments.reward, range(arguments.repeats)):
        reward = factor * once
        models, _ = maker.run(arguments.batches, 0.0, in_turn=True)
        in_turn, _ = maker.run(arguments.batches, reward, in_turn=True)
        overlapping, late = maker.run(arguments.batches, reward, in_turn=False)
        rows.append(
            {
                "factor": factor,
                "reward": reward * 1e3,
                "models": models * 1e3,
                "in turn": in_turn * 1e3,
                "overlapping": overlapping * 1e3,
                "gain": in_turn / overlapping,
                "ideal": in_turn / max(models, reward),
                "late": late * 1e3,
            }
        )
    print(f"milliseconds a batch, medians of {arguments.repeats}, load average {os.getloadavg()[0]:.1f}")
    names = [name for name in rows[0] if name != "factor"]
    print(f"| {' | '.join(names)} |\n|{'---|' * len(names)}")
    for factor in arguments.reward:
        of_factor = [row for row in rows if row["factor"] == factor]
        medians = {name: statistics.median(row[name] for row in of_factor) for name in names}
        cells = [f"{value:.2f}" if name in ("gain", "ideal") else f"{value:.0f}" for name, value in medians.items()]
        print(f"| {' | '.join(cells)} |")
    if arguments.json:
        arguments.json.write_text(json.dumps({"workload": str(workload), "repeats": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""How long a weight update takes, in plain memory copies of the same bytes, and how long generation pauses for it.

    python benchmarks/weight_sync.py                       16, 128 and 1024 MB to 1, 2 and 4 makers
    python benchmarks/weight_sync.py --sizes 512 --makers 2

Each maker is a Ray actor with the real stage and served models. Its compute thread "generates": it takes steps of
about a millisecond inside `ServedModels.use()`, with the weights free for a commit between batches of steps, and
notes the longest gap between two steps. The update goes through the real publisher and weight channel; it is over
when every maker serves the new version. A plain copy is `numpy.copyto` of the same bytes on one thread, measured in
the same run. Medians; one warm-up update; Ray starts once.
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import numpy as np
import ray
import torch
from torch import nn

from coati.deadlines import Deadlines
from coati.ray.weight_channel import WeightChannel
from coati.trainer.strategies import DDPStrategy
from coati.weights import ServedModels, WeightStage, new_header, weight_messages

LAYER_MB = 4
STEPS_PER_BATCH = 16


def make_module(megabytes: int) -> nn.Module:
    """Float32 layers of 4 MB each."""
    module = nn.Module()
    count = max(1, megabytes // LAYER_MB)
    layer = LAYER_MB * 2**20 // 4 if megabytes >= LAYER_MB else megabytes * 2**20 // 4
    module.layers = nn.ParameterList([nn.Parameter(torch.zeros(layer), requires_grad=False) for _ in range(count)])
    return module


@ray.remote(num_cpus=0, concurrency_groups={"model_io": 1, "compute": 1})
class BenchMaker:
    """The weight side of a maker, and a loop that stands for generation."""

    def __init__(self, megabytes: int) -> None:
        torch.set_num_threads(1)
        self._module = make_module(megabytes)
        modules = {"actor": self._module}
        self._stage, self._served = WeightStage(modules), ServedModels(modules)
        self._should_run = True
        self._gaps: list[float] = []
        self._work = torch.randn(256, 256)

    @ray.method(concurrency_group="model_io")
    def update_experience_maker(self, update=None, chunk=None, manifest=None, **_) -> None:
        if update is not None:
            self._stage.begin(update.update_id, version=update.version, source=update.source)
        elif chunk is not None:
            self._stage.add_chunk(chunk)
        elif manifest is not None:
            self._served.offer(self._stage.finish(manifest))

    @ray.method(concurrency_group="compute")
    def generate(self) -> None:
        last = time.perf_counter()
        while self._should_run:
            with self._served.use():
                for _ in range(STEPS_PER_BATCH):
                    self._work @ self._work
                    now = time.perf_counter()
                    self._gaps.append(now - last)
                    last = now

    def stop(self) -> None:
        self._should_run = False

    def wait_for(self, version: int) -> bool:
        return self._served.wait_for_version(version, deadline_seconds=60) and self._served.version >= version

    def take_gaps(self) -> list[float]:
        gaps, self._gaps = self._gaps, []
        return gaps


def plain_copy_seconds(megabytes: int, repeats: int) -> float:
    source = np.ones(megabytes * 2**20, dtype=np.uint8)
    target = np.empty_like(source)
    np.copyto(target, source)
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def measure(megabytes: int, num_makers: int, repeats: int) -> dict[str, float]:
    names = [f"bench-{megabytes}-{num_makers}-{index}" for index in range(num_makers)]
    makers = [BenchMaker.options(name=name).remote(megabytes) for name in names]
    loops = [maker.generate.remote() for maker in makers]
    module = make_module(megabytes)
    strategy = DDPStrategy(device="cpu")
    channel = WeightChannel(names, deadlines=Deadlines())
    updates, pauses, quiet = [], [], []
    for version in range(repeats + 1):
        ray.get([maker.take_gaps.remote() for maker in makers])
        time.sleep(0.5)
        baseline = max(max(gaps) for gaps in ray.get([maker.take_gaps.remote() for maker in makers]))
        started = time.perf_counter()
        header = new_header(version=version, source="benchmark")
        shards = (("actor", shard) for shard in strategy.get_model_state_dict_shard(module))
        channel.send(header, weight_messages(header, shards), fully_update=False)
        while not all(ray.get([maker.wait_for.remote(version) for maker in makers])):
            pass
        seconds = time.perf_counter() - started
        gaps = ray.get([maker.take_gaps.remote() for maker in makers])
        if version:  # the first is a warm-up
            updates.append(seconds)
            pauses.append(max(max(found) for found in gaps))
            quiet.append(baseline)
    ray.get([maker.stop.remote() for maker in makers])
    ray.get(loops)
    for maker in makers:
        ray.kill(maker)
    copy = plain_copy_seconds(megabytes, repeats)
    return {
        "megabytes": megabytes,
        "makers": num_makers,
        "copy_ms": copy * 1e3,
        "update_ms": statistics.median(updates) * 1e3,
        "update_in_copies": statistics.median(updates) / copy,
        "pause_ms": statistics.median(pauses) * 1e3,
        "pause_in_copies": statistics.median(pauses) / copy,
        "longest_step_without_update_ms": statistics.median(quiet) * 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[16, 128, 1024], metavar="MB")
    parser.add_argument("--makers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the rows here too")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    rows = []
    print(f"{'MB':>6} {'makers':>6} {'copy ms':>9} {'update ms':>10} {'copies':>7} {'pause ms':>9} {'copies':>7}")
    for megabytes in arguments.sizes:
        for num_makers in arguments.makers:
            row = measure(megabytes, num_makers, arguments.repeats)
            rows.append(row)
            print(
                f"{megabytes:>6} {num_makers:>6} {row['copy_ms']:>9.1f} {row['update_ms']:>10.1f} "
                f"{row['update_in_copies']:>7.2f} {row['pause_ms']:>9.1f} {row['pause_in_copies']:>7.2f}"
            )
    ray.shutdown()
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""Measure a weight update in plain memory copies of the same bytes, and how long it pauses generation.

    python benchmarks/weight_sync.py                       16, 128 and 1024 MB to 1, 2 and 4 makers
    python benchmarks/weight_sync.py --sizes 512 --makers 2
    python benchmarks/weight_sync.py --sizes 512 --makers 2 --load none
    python benchmarks/weight_sync.py --device cuda --params 0.5B --makers 1     one GPU for both; weights stay on it

Each maker is a Ray actor with the real receiver and served models. The update goes through the real sender and ends
when every maker serves the new version.

`--load busy` (the default): each maker's compute thread "generates" continuously, in steps of about a millisecond, and
allows a commit between batches of steps. The pause is the longest gap between two steps during the update. With as many
makers as cores, the makers alone saturate the machine, and trainer, staging and Ray compete with them for cores.
`--load none`: makers only wait for weights; the pause is then the commit time that the maker measures.

A plain copy is `numpy.copyto` of the same bytes on one thread, measured before every update while no maker generates.
The first updates are warm-ups (`--warmups`): they touch memory for the first time, which costs more than the copy
itself. Values are medians over the others.

With `--device cuda` the model has the 290 tensors of Qwen2-0.5B in bfloat16, makers and sender share the GPU, a plain
copy is one `Tensor.copy_` of the same bytes on the device, and a step of generation ends with a synchronize. `path`
shows the transport: "device" (weights stayed on the GPU) or "store" (Ray's object store; `--host` forces it).
"""

import argparse
import json
import os
import statistics
import threading
import time
from pathlib import Path

import numpy as np
import ray
import torch
from checked import check_device, one_or_more, zero_or_more
from torch import nn

from coati.config import Deadlines, TopologySettings
from coati.monitor.timeline import Timeline
from coati.ray.peers import RayPeers
from coati.trainer.strategies import DDPStrategy
from coati.weights.message import SharedGpuMemory
from coati.weights.receiver import WeightReceiver
from coati.weights.sender import Recipients, WeightSender
from coati.weights.served import ServedModels

LAYER_MB = 4
STEPS_PER_BATCH = 16
PATHS = {"NoneType": "store", "SharedGpuMemory": "device"}
DEADLINE_SECONDS = 120.0


def make_module(megabytes: int) -> nn.Module:
    """Return a module of float32 layers of 4 MB each."""
    module = nn.Module()
    count = max(1, megabytes // LAYER_MB)
    layer = LAYER_MB * 2**20 // 4 if megabytes >= LAYER_MB else megabytes * 2**20 // 4
    module.layers = nn.ParameterList([nn.Parameter(torch.zeros(layer), requires_grad=False) for _ in range(count)])
    return module


def qwen2_half_billion() -> nn.Module:
    """Return bfloat16 parameters with the shapes of Qwen2-0.5B, on the GPU."""
    hidden, heads, inner = 896, 128, 4864
    layer = [(hidden, hidden), (hidden,), (heads, hidden), (heads,), (heads, hidden), (heads,), (hidden, hidden)]
    layer += [(inner, hidden), (inner, hidden), (hidden, inner), (hidden,), (hidden,)]
    shapes = [(151_936, hidden), *(layer * 24), (hidden,)]
    module = nn.Module()
    module.weights = nn.ParameterList(
        [nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16, device="cuda"), requires_grad=False) for shape in shapes]
    )
    return module


def build(megabytes: int | str) -> nn.Module:
    return qwen2_half_billion() if megabytes == "0.5B" else make_module(megabytes)


@ray.remote(num_cpus=0, concurrency_groups={"model_io": 1, "compute": 1})
class BenchMaker:
    """The weight handling of a maker, with a loop in place of generation."""

    def __init__(self, megabytes: int | str) -> None:
        torch.set_num_threads(1)
        modules = {"actor": build(megabytes)}
        self._served = ServedModels(modules)
        self._receiver = WeightReceiver(self._served)
        self._should_run = True
        self._may_generate = threading.Event()
        self._gaps: list[float] = []
        self._work = torch.randn(256, 256, device=self._receiver.device)

    def sharing_fault(self, probe) -> str | None:
        return self._receiver.sharing_fault(probe)

    @ray.method(concurrency_group="model_io")
    def update_experience_maker(self, *, message) -> None:
        self._receiver.receive(message)

    @ray.method(concurrency_group="compute")
    def generate(self) -> None:
        while self._should_run:
            self._may_generate.wait(DEADLINE_SECONDS)
            last = time.perf_counter()
            while self._may_generate.is_set():
                with self._served.use():
                    for _ in range(STEPS_PER_BATCH):
                        self._work @ self._work
                        if self._work.is_cuda:
                            torch.cuda.current_stream().synchronize()
                        now = time.perf_counter()
                        self._gaps.append(now - last)
                        last = now

    def set_generating(self, may_generate: bool) -> None:
        self._gaps = []
        if may_generate:
            self._may_generate.set()
        else:
            self._may_generate.clear()

    def stop(self) -> None:
        self._should_run = False
        self._may_generate.set()
        self._may_generate.clear()

    def wait_until_served(self, version: int) -> bool:
        return self._served.wait_for_version(version, deadline_seconds=DEADLINE_SECONDS)

    def pause_seconds(self) -> float:
        return max(self._gaps, default=self._served.last_commit_seconds)

    def commit_seconds(self) -> float:
        return self._served.last_commit_seconds


def plain_copy_seconds(source: np.ndarray | torch.Tensor, target: np.ndarray | torch.Tensor) -> float:
    """Return the best of three copies."""
    seconds = []
    for _ in range(3):
        if isinstance(source, torch.Tensor):
            torch.cuda.synchronize()
        started = time.perf_counter()
        if isinstance(source, torch.Tensor):
            target.copy_(source)
            torch.cuda.synchronize()
        else:
            np.copyto(target, source)
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def measure(megabytes: int | str, num_makers: int, arguments: argparse.Namespace) -> dict[str, float]:
    is_cuda = arguments.device == "cuda"
    names = [f"bench-{megabytes}-{num_makers}-{index}" for index in range(num_makers)]
    share = 0.9 / num_makers if is_cuda else 0
    makers = [BenchMaker.options(name=name, num_gpus=share).remote(megabytes) for name in names]
    loops = [maker.generate.remote() for maker in makers]
    module = build(megabytes)
    num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
    source = torch.ones(num_bytes, dtype=torch.uint8, device="cuda") if is_cuda else np.ones(num_bytes, dtype=np.uint8)
    target = torch.zeros_like(source) if is_cuda else np.zeros_like(source)
    strategy = DDPStrategy(device=arguments.device)
    sender = WeightSender(
        {"actor": module},
        strategy,
        Recipients(RayPeers(), names, Deadlines(start_seconds=DEADLINE_SECONDS, update_seconds=DEADLINE_SECONDS)),
        TopologySettings(chunk_mib=arguments.chunk_mib),
        timeline=Timeline(),
        shared=SharedGpuMemory(strategy.device) if is_cuda and not arguments.host else None,
    )
    copies, updates, pauses, commits = [], [], [], []
    for version in range(arguments.warmups + arguments.repeats):
        copies.append(plain_copy_seconds(source, target))
        if arguments.load == "busy":
            ray.get([maker.set_generating.remote(True) for maker in makers])
            time.sleep(0.2)  # until every maker generates
        started = time.perf_counter()
        sender.send(version)
        assert all(ray.get([maker.wait_until_served.remote(version) for maker in makers]))
        updates.append(time.perf_counter() - started)
        pauses.append(max(ray.get([maker.pause_seconds.remote() for maker in makers])))
        commits.append(max(ray.get([maker.commit_seconds.remote() for maker in makers])))
        ray.get([maker.set_generating.remote(False) for maker in makers])
    ray.get([maker.stop.remote() for maker in makers])
    ray.get(loops)
    for maker in makers:
        ray.kill(maker)
    copy, update, pause, commit = (
        statistics.median(values[arguments.warmups :]) for values in (copies, updates, pauses, commits)
    )
    return {
        "path": PATHS[type(sender.memory).__name__],
        "megabytes": megabytes,
        "makers": num_makers,
        "copy_ms": copy * 1e3,
        "first_update_ms": updates[0] * 1e3,
        "update_ms": update * 1e3,
        "update_in_copies": update / copy,
        "pause_ms": pause * 1e3,
        "pause_in_copies": pause / copy,
        "commit_ms": commit * 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=one_or_more, nargs="+", default=[16, 128, 1024], metavar="MB")
    parser.add_argument("--makers", type=one_or_more, nargs="+", default=[1, 2, 4])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--params", choices=["0.5B"], help="Qwen2-0.5B in bfloat16 instead of --sizes (needs cuda)")
    parser.add_argument(
        "--host", action="store_true", help="use the object store even if makers can open the sender's memory"
    )
    parser.add_argument("--load", choices=["busy", "none"], default="busy")
    parser.add_argument("--chunk-mib", type=float, default=64)
    parser.add_argument("--repeats", type=one_or_more, default=7)
    parser.add_argument("--warmups", type=zero_or_more, default=4)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    arguments = parser.parse_args()
    check_device(parser, arguments.device)
    if (arguments.params is None) != (arguments.device == "cpu"):
        parser.error("--params and --device cuda go together")
    torch.set_num_threads(1)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    rows: list[dict[str, float]] = []
    print(f"load average {os.getloadavg()[0]:.1f}, load {arguments.load}")
    columns = ("MB", "makers", "path", "copy ms", "update ms", "copies", "pause ms", "copies", "commit ms")
    print(" ".join(f"{column:>9}" for column in columns))
    for megabytes in [arguments.params] if arguments.params else arguments.sizes:
        for num_makers in arguments.makers:
            row = measure(megabytes, num_makers, arguments)
            rows.append(row)
            print(
                f"{megabytes:>9} {num_makers:>9} {row['path']:>9} {row['copy_ms']:>9.2f} {row['update_ms']:>9.1f} "
                f"{row['update_in_copies']:>9.2f} {row['pause_ms']:>9.2f} {row['pause_in_copies']:>9.2f} "
                f"{row['commit_ms']:>9.2f}",
                flush=True,
            )
    ray.shutdown()
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()

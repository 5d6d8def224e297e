"""Measure each strategy on one GPU: seconds and peak memory of a PPO step, and the largest model that fits a cap.

    python benchmarks/strategies.py                                     a 0.5B Qwen2 shape, bfloat16, actor and critic
    python benchmarks/strategies.py --cases ddp gemini-offload --json rows.json
    python benchmarks/strategies.py --largest --cap-gib 16              the largest model under a memory cap
    python benchmarks/strategies.py --device cpu --tiny                 a smoke test, in seconds

Every case is a separate process with one rank, so that no case inherits memory from another. A step is the learner's:
policy and critic, forward and backward in micro-batches, clipping, Adam. Peak memory is what torch allocated on the
device (`max_memory_allocated`), including the models; the time is the median of the timed steps, after a warm-up.
"mixed" cases keep float32 weights and compute in bfloat16; the others are entirely bfloat16.

With one rank nothing is sharded, so zero1, zero2 and gemini show only their overhead; the savings of offloading show in
full. The cap uses `torch.cuda.set_per_process_memory_fraction`: exceeding it is an out-of-memory error, which ends the
case.

`--largest` searches for the deepest model that trains, in layers of 61M weights: first the depth at which weights,
gradients and moments alone fill the memory, then half of it, then by bisection (`largest_model.py`). It reports
whether the cap, the host memory (`--host-gib`) or time (`--search-seconds` per case) was the limit. Each size runs two
steps; the second includes Adam's moments. A weight costs 8 bytes (bfloat16 weight, gradient and two moments), on the
GPU or on the host, and the critic is as large as the actor. Sizes are powers of two, because torch rounds pinned memory
up to them.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from checked import check_device, one_or_more, zero_or_more
from largest_model import find_deepest
from torch import nn
from transformers import Qwen2Config
from transformers.initialization import no_init_weights

from coati.config import TrainSettings
from coati.errors import OutOfMemory
from coati.experience_maker import Experience
from coati.models import Actor, Critic
from coati.trainer.ppo import PPOLearner
from coati.trainer.strategies import DDPStrategy, GeminiStrategy, LowLevelZeroStrategy, Strategy

CASES = {
    "ddp": lambda **options: DDPStrategy(**options),
    "zero1": lambda **options: LowLevelZeroStrategy(stage=1, **options),
    "zero2": lambda **options: LowLevelZeroStrategy(stage=2, **options),
    "zero2-offload": lambda **options: LowLevelZeroStrategy(stage=2, cpu_offload=True, **options),
    "gemini": lambda **options: GeminiStrategy(**options),
    "gemini-offload": lambda **options: GeminiStrategy(cpu_offload=True, **options),
    "ddp-mixed": lambda **options: DDPStrategy(compute_dtype=torch.bfloat16, **options),
    "gemini-mixed": lambda **options: GeminiStrategy(compute_dtype=torch.bfloat16, **options),
    "gemini-offload-mixed": lambda **options: GeminiStrategy(cpu_offload=True, compute_dtype=torch.bfloat16, **options),
}
OFFLOADED = {
    "zero2-offload",
    "gemini-offload",
    "gemini-offload-mixed",
}  # weights, gradients and moments are on the host
OUT_OF_MEMORY = 77  # exit status of a case that did not fit
KILLED = (-9, 137)  # exit status after the kernel's out-of-memory killer
NO_HOST_MEMORY = (
    "can't allocate memory",
    "CUDA error: out of memory",
)  # torch's messages for pageable and pinned memory


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A Qwen2 model and the batch it is trained on."""

    layers: int = 24
    width: int = 896
    heads: int = 14
    kv_heads: int = 2
    intermediate: int = 4864
    vocabulary: int = 151_936
    samples: int = 16
    micro_batch: int = 4
    prompt_tokens: int = 128
    response_tokens: int = 256

    @property
    def parameters(self) -> int:
        """Parameters of the actor, without norms and biases."""
        attention = 2 * self.width**2 + 2 * self.width * self.kv_heads * (self.width // self.heads)
        return self.vocabulary * self.width + self.layers * (attention + 3 * self.width * self.intermediate)

    def training_gib(self, case: str) -> float:
        """Return the GiB of weights, gradients and two moments of actor and critic."""
        return 2 * 4 * (4 if "mixed" in case else 2) * self.parameters / 2**30


TINY = Shape(
    layers=2,
    width=32,
    heads=4,
    kv_heads=2,
    intermediate=64,
    vocabulary=101,
    samples=4,
    micro_batch=2,
    prompt_tokens=6,
    response_tokens=8,
)
SEARCHED = Shape(
    layers=1,
    width=2048,
    heads=16,
    kv_heads=4,
    intermediate=8192,
    vocabulary=131_072,
    samples=2,
    micro_batch=2,
    prompt_tokens=128,
    response_tokens=128,
)


def model_config(shape: Shape) -> Qwen2Config:
    return Qwen2Config(
        num_hidden_layers=shape.layers,
        hidden_size=shape.width,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        intermediate_size=shape.intermediate,
        vocab_size=shape.vocabulary,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )


def make_batch(shape: Shape, seed: int) -> Experience:
    """Return a random batch with the magnitudes of a real run."""
    generator = torch.Generator().manual_seed(seed)
    length = shape.prompt_tokens + shape.response_tokens

    def noise(scale: float) -> torch.Tensor:
        return torch.randn(shape.samples, shape.response_tokens, generator=generator) * scale

    return Experience(
        sequences=torch.randint(3, shape.vocabulary, (shape.samples, length), generator=generator),
        action_log_probs=noise(0.1) - 11.0,
        values=noise(0.1),
        reward=torch.zeros(shape.samples),
        kl=torch.zeros(shape.samples, shape.response_tokens),
        advantages=noise(1.0),
        attention_mask=torch.ones(shape.samples, length, dtype=torch.long),
        action_mask=torch.ones(shape.samples, shape.response_tokens, dtype=torch.bool),
    )


def drawn_on(device: str, model_class: type[nn.Module], config: Qwen2Config, dtype: torch.dtype) -> nn.Module:
    """Return a model with random weights generated on the device, because that takes minutes on a CPU."""
    with no_init_weights():
        model = model_class.from_config(config, dtype=dtype)
    next(model.children()).tie_weights()
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            parameter.data.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            parameter.data.copy_(torch.randn(parameter.shape, dtype=dtype, device=device).mul_(0.02))
    return model


def make_learner(case: str, shape: Shape, device: str) -> PPOLearner:
    strategy: Strategy = CASES[case](seed=0, device=device)
    dtype = torch.float32 if strategy.compute_dtype is not None else torch.bfloat16
    # Models without sharding are created on their device.
    place = nullcontext() if case.startswith("gemini") else torch.device(device)
    with place, strategy.model_init_context():
        actor, critic = (drawn_on(device, model_class, model_config(shape), dtype) for model_class in (Actor, Critic))
    settings = TrainSettings(actor_lr=1e-6, critic_lr=1e-5, micro_batch_size=shape.micro_batch, micro_batch_tokens=0)
    return PPOLearner(actor, critic, strategy, settings, optimizer_class=strategy.optimizer_class)


def measure(case: str, shape: Shape, device: str, *, steps: int, cap_gib: float) -> dict[str, object]:
    """Build, warm up and time one case in this process."""
    is_cuda = device == "cuda"
    if is_cuda:
        torch.cuda.init()
        total = torch.cuda.get_device_properties(0).total_memory
        if cap_gib:
            torch.cuda.set_per_process_memory_fraction(min(1.0, cap_gib * 2**30 / total))
        torch.cuda.reset_peak_memory_stats()
    learner = make_learner(case, shape, device)
    seconds = []
    metrics: dict[str, float] = {}
    for step in range(steps + 1):
        experience = make_batch(shape, step)
        if is_cuda:
            torch.cuda.synchronize()
        started = time.perf_counter()
        metrics = learner.step(experience)
        if is_cuda:
            torch.cuda.synchronize()
        if step:  # the first step is a warm-up
            seconds.append(time.perf_counter() - started)
    if metrics["optim/skipped_batches"]:
        raise RuntimeError("a step was skipped because its gradient was not finite, so the measurement is invalid")
    parameters = sum(p.numel() for model in learner.models.values() for p in model.parameters())
    row: dict[str, object] = {
        "case": case,
        **asdict(shape),
        "parameters": parameters,
        "actor_parameters": sum(p.numel() for p in learner.actor.parameters()),
        "cap_gib": cap_gib,
        "step_seconds": statistics.median(seconds),
        "tokens_per_second": shape.samples * (shape.prompt_tokens + shape.response_tokens) / statistics.median(seconds),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if is_cuda else 0.0,
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30 if is_cuda else 0.0,
        "host_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,  # Linux counts in KiB
        "loss": metrics["policy/loss"],
        "grad_norm": metrics["policy/grad_norm"],
        "device": torch.cuda.get_device_name() if is_cuda else "cpu",
        "torch": torch.__version__,
    }
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return row


def run_in_process(case: str, shape: Shape, arguments: argparse.Namespace, *, cap_gib: float) -> dict[str, object]:
    """Measure one case in a separate process. If it fails, the row has the error and the limit it hit."""
    command = [
        *(sys.executable, __file__, "--one", case, "--device", arguments.device, "--steps", str(arguments.steps)),
        *("--cap-gib", str(cap_gib), "--shape", json.dumps(asdict(shape))),
    ]
    places = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in places}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=arguments.case_seconds, env=environment, check=False
        )
    except subprocess.TimeoutExpired:
        return failure(case, shape, cap_gib, f"over {arguments.case_seconds:g} s", "time")
    if done.returncode == 0:
        row: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
        return row
    if done.returncode == OUT_OF_MEMORY:
        return failure(case, shape, cap_gib, "out of GPU memory", cap_of(cap_gib))
    lines = done.stderr.strip().splitlines() or ["no message"]
    is_host = done.returncode in KILLED or any(words in done.stderr for words in NO_HOST_MEMORY)
    error = "killed" if done.returncode in KILLED else lines[-1]
    return failure(case, shape, cap_gib, error, "host memory" if is_host else "an error")


def failure(case: str, shape: Shape, cap_gib: float, error: str, limit: str) -> dict[str, object]:
    return {"case": case, **asdict(shape), "cap_gib": cap_gib, "error": error, "limit": limit}


def print_row(row: dict[str, object]) -> None:
    if "error" in row:
        what = f"{row['layers']} layers of {row['width']}"
        print(f"{row['case']:<20} {what:<22} {str(row['error'])[:90]}", flush=True)
        return
    print(
        f"{row['case']:<20} {row['actor_parameters'] / 1e6:>9.1f} M {row['step_seconds']:>9.3f} s "
        f"{row['tokens_per_second']:>9.0f} tok/s {row['peak_gib']:>8.2f} GiB {row['reserved_gib']:>8.2f} GiB reserved "
        f"{row['host_gib']:>7.1f} GiB host",
        flush=True,
    )


def compare(arguments: argparse.Namespace, shape: Shape) -> list[dict[str, object]]:
    rows = []
    for case in arguments.cases:
        rows.append(run_in_process(case, shape, arguments, cap_gib=arguments.cap_gib))
        print_row(rows[-1])
    return rows


def find_largest(case: str, arguments: argparse.Namespace, shape: Shape) -> list[dict[str, object]]:
    """Search the largest model of a case; return rows of all tried sizes and the answer."""
    rows = []
    most, limit = most_layers(case, shape, cap_gib=arguments.cap_gib, host_gib=arguments.host_gib)

    def attempt(layers: int) -> str:
        rows.append(run_in_process(case, replace(shape, layers=layers), arguments, cap_gib=arguments.cap_gib))
        print_row(rows[-1])
        return rows[-1].get("limit", "")

    answer = find_deepest(attempt, most=most, limit=limit, seconds=arguments.search_seconds, tries=arguments.tries)
    largest = replace(shape, layers=answer.layers).parameters if answer.layers else 0
    next_one = replace(shape, layers=answer.too_many).parameters
    print(
        f"{case:<20} largest: {largest / 1e9:.2f}B weights in {answer.layers} layers, actor and critic each; "
        f"{next_one / 1e9:.2f}B in {answer.too_many} layers do not fit. Limit: {answer.limit}.",
        flush=True,
    )
    return [*rows, {"case": case, "largest_parameters": largest, **asdict(answer)}]


def most_layers(case: str, shape: Shape, *, cap_gib: float, host_gib: float) -> tuple[int, str]:
    """Return the most layers whose weights, gradients and moments fit, and the memory that limits them."""
    room, limit = (host_gib, f"{host_gib:g} GiB of host memory") if case in OFFLOADED else (cap_gib, cap_of(cap_gib))
    layers = 0
    while replace(shape, layers=layers + 1).training_gib(case) <= room:
        layers += 1
    return layers, limit


def cap_of(gib: float) -> str:
    return f"the cap of {gib:g} GiB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=None)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="use a tiny model and a tiny batch")
    parser.add_argument(
        "--steps",
        type=one_or_more,
        default=None,
        help="timed steps after a warm-up step; default 5, or 1 with --largest",
    )
    parser.add_argument("--micro-batch", type=zero_or_more, default=None, help="samples per pass")
    parser.add_argument("--cap-gib", type=float, default=0.0, help="GPU memory limit per case; 0 = none")
    parser.add_argument("--largest", action="store_true", help="search for the largest model that fits the cap")
    parser.add_argument(
        "--tries", type=one_or_more, default=4, help="maximum number of sizes that --largest tries per case"
    )
    parser.add_argument("--search-seconds", type=float, default=150.0, help="time limit of --largest per case")
    parser.add_argument("--host-gib", type=float, default=100.0, help="host memory limit of --largest")
    parser.add_argument("--case-seconds", type=float, default=300.0, help="time limit per case")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--one", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--shape", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    check_device(parser, arguments.device)
    if arguments.one:
        try:
            shape = Shape(**arguments.shape)
            row = measure(arguments.one, shape, arguments.device, steps=arguments.steps, cap_gib=arguments.cap_gib)
        except (OutOfMemory, torch.OutOfMemoryError):
            sys.exit(OUT_OF_MEMORY)
        print(json.dumps(row))
        return
    arguments.steps = arguments.steps or (1 if arguments.largest else 5)
    shape = TINY if arguments.tiny else SEARCHED if arguments.largest else Shape()
    if arguments.micro_batch is not None:
        shape = replace(shape, micro_batch=arguments.micro_batch)
    if arguments.largest:
        if not arguments.cap_gib:
            parser.error("--largest needs a cap: give --cap-gib")
        arguments.cases = arguments.cases or ["ddp", "gemini", "gemini-offload"]
        rows = [row for case in arguments.cases for row in find_largest(case, arguments, shape)]
    else:
        arguments.cases = arguments.cases or list(CASES)
        rows = compare(arguments, shape)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""Measure the learner's step with and without padding: tokens/s, MFU and peak memory; and the memory of log-probs.

    python benchmarks/train_step.py                            a 0.5B Qwen2 shape, bfloat16, up to 4,096 tokens a sample
    python benchmarks/train_step.py --cases padded packed packed-compiled --json step.json
    python benchmarks/train_step.py --cases packed --profile   also the kernels that take the most time
    python benchmarks/train_step.py --batches full --lengths 512 1024 2048 4096 8192    peak memory by length
    python benchmarks/train_step.py --batches full --pass-tokens 4096 8192 16384 32768    speed by pass size
    python benchmarks/train_step.py --device cpu --tiny        a smoke test, in seconds

A step is the learner's, of the policy alone: forward and backward in micro-batches, clipping, Adam. The batches
(`--batches`) are seeded: "ragged" has prompts of 64 to 512 tokens and realistic response lengths (log-normal, a few at
the limit); in "full" every sample has the maximum length, so packing saves nothing; "groups" has 8 responses of 256
tokens to each of 8 prompts of 128, which "packed-whole-rows" computes 8 times and the other cases once. `--lengths`
adds batches of one pass, 16,384 tokens, with samples of the given lengths, to show peak memory by length. All cases use
the same batches in one run. Times are medians after a warm-up.

MFU is the required work (real tokens, causal attention, logits of response tokens, three times the forward pass; no
recomputation, no padding) divided by the time and by the rate of a large square matrix product in the same run.

The second table covers the log-prob and loss step alone, from hidden states to gradients, with and without logits: peak
memory on a GPU, and on a CPU, which has no such counter, the largest tensor.
"""

import argparse
import contextlib
import gc
import itertools
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from unittest import mock

import torch
from checked import check_device, one_or_more, zero_or_more
from logprob_memory import logprob_memory, print_memory, timed
from torch import Tensor
from torch.profiler import ProfilerActivity
from transformers import AutoModelForCausalLM, Qwen2Config

from coati.config import TrainSettings
from coati.devices import set_up_cpu
from coati.errors import OutOfMemory
from coati.experience_maker import Experience
from coati.models import Actor
from coati.trainer.ppo import PPOLearner
from coati.trainer.strategies import DDPStrategy


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A Qwen2 model and the samples of a batch."""

    layers: int = 24
    width: int = 896
    heads: int = 14
    kv_heads: int = 2
    intermediate: int = 4864
    vocabulary: int = 151_936
    max_length: int = 4096
    max_positions: int = 4096
    ragged_samples: int = 32
    full_samples: int = 12
    grouped_samples: int = 64
    group_prompt: int = 128
    group_response: int = 256
    micro_batch_tokens: int = 16_384

    def config(self) -> Qwen2Config:
        return Qwen2Config(
            num_hidden_layers=self.layers,
            hidden_size=self.width,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            intermediate_size=self.intermediate,
            vocab_size=self.vocabulary,
            max_position_embeddings=self.max_positions,
            tie_word_embeddings=True,
        )

    def step_flops(self, lengths: list[int], num_scored: int) -> float:
        """Return the FLOPs that a step over samples of these lengths requires."""
        kv_width = self.kv_heads * (self.width // self.heads)
        weights = self.layers * (2 * self.width**2 + 2 * self.width * kv_width + 3 * self.width * self.intermediate)
        attention = 2 * self.width * self.layers * sum(length**2 for length in lengths)  # half of all pairs
        head = 2 * self.vocabulary * self.width * num_scored
        return 3.0 * (2 * weights * sum(lengths) + attention + head)


TINY = Shape(
    layers=2,
    width=32,
    heads=4,
    kv_heads=2,
    intermediate=64,
    vocabulary=501,
    max_length=96,
    ragged_samples=8,
    full_samples=4,
    grouped_samples=16,
    group_prompt=40,
    group_response=10,
    micro_batch_tokens=256,
)
SAMPLES_PER_PROMPT = 8


@dataclass(frozen=True, kw_only=True)
class Case:
    """One configuration of the step."""

    is_packed: bool = True
    shares_prompts: bool = True
    is_mixed: bool = False
    compile: bool = False
    activation_checkpointing: bool = False


CASES = {
    "padded": Case(is_packed=False),
    "packed": Case(),
    "packed-whole-rows": Case(shares_prompts=False),
    "packed-compiled": Case(compile=True),
    "packed-whole-rows-compiled": Case(shares_prompts=False, compile=True),
    "packed-checkpointed": Case(activation_checkpointing=True),
    "packed-mixed": Case(is_mixed=True),
    "packed-mixed-compiled": Case(is_mixed=True, compile=True),
}


def sample_lengths(shape: Shape, kind: str, generator: torch.Generator) -> tuple[list[int], list[int]]:
    """Return the prompt and response lengths of a batch."""
    if kind == "groups":
        return [shape.group_prompt] * shape.grouped_samples, [shape.group_response] * shape.grouped_samples
    if kind.isdigit():
        count = max(1, shape.micro_batch_tokens // int(kind))
        prompt = int(kind) // 8
        return [prompt] * count, [int(kind) - prompt] * count
    count = shape.ragged_samples if kind == "ragged" else shape.full_samples
    longest = shape.max_length
    prompts = torch.randint(max(1, longest // 64), longest // 8 + 1, (count,), generator=generator)
    if kind == "full":
        return prompts.tolist(), (longest - prompts).tolist()
    drawn = torch.exp(torch.randn(count, generator=generator) * 0.9) * (longest / 5)
    responses = torch.minimum(drawn.long().clamp_min(1), longest - prompts)
    responses[0] = longest - prompts[0]  # always include one at the limit
    return prompts.tolist(), responses.tolist()


def make_batch(shape: Shape, kind: str, seed: int) -> tuple[Experience, list[int], int]:
    """Return a random batch, the lengths of its samples, and its number of scored tokens."""
    generator = torch.Generator().manual_seed(seed)
    prompts, responses = sample_lengths(shape, kind, generator)
    width, actions = max(prompts), max(responses)
    columns = torch.arange(width + actions)
    starts, ends = width - torch.tensor(prompts).unsqueeze(1), width + torch.tensor(responses).unsqueeze(1)
    mask = ((columns >= starts) & (columns < ends)).long()
    action_mask = mask[:, width:].bool()

    def noise(scale: float) -> Tensor:
        return (torch.randn(action_mask.shape, generator=generator) * scale).masked_fill(~action_mask, 0.0)

    sequences = torch.randint(3, shape.vocabulary, mask.shape, generator=generator) * mask
    if kind == "groups":
        firsts = torch.arange(len(prompts)) // SAMPLES_PER_PROMPT * SAMPLES_PER_PROMPT
        sequences[:, :width] = sequences[firsts, :width]
    experience = Experience(
        sequences=sequences,
        action_log_probs=noise(0.1) - 11.0 * action_mask,
        values=torch.zeros(action_mask.shape),
        reward=torch.zeros(len(prompts)),
        kl=torch.zeros(action_mask.shape),
        advantages=noise(1.0),
        attention_mask=mask,
        action_mask=action_mask,
    )
    return experience, [one + other for one, other in zip(prompts, responses, strict=True)], sum(responses)


@contextlib.contextmanager
def padded() -> Iterator[None]:
    """Train with padding, as with models that cannot be packed."""
    with mock.patch("coati.models.actor.scoring_problem", return_value="it is the baseline"):
        yield


@contextlib.contextmanager
def whole_rows() -> Iterator[None]:
    """Compute the prompt of every row separately, without sharing."""
    with mock.patch("coati.models.packing.SharedPrefixes.of", return_value=None):
        yield


def make_learner(case: Case, shape: Shape, device: str) -> PPOLearner:
    torch.manual_seed(0)
    is_cuda = device == "cuda"
    dtype = torch.bfloat16 if is_cuda and not case.is_mixed else torch.float32
    with torch.device(device):  # initializing on a CPU takes minutes
        model = AutoModelForCausalLM.from_config(shape.config(), dtype=dtype)
    strategy = DDPStrategy(seed=0, device=device, compute_dtype=torch.bfloat16 if case.is_mixed else None)
    settings = TrainSettings(
        actor_lr=1e-6,
        micro_batch_tokens=shape.micro_batch_tokens,
        compile=case.compile,
        activation_checkpointing=case.activation_checkpointing,
    )
    return PPOLearner(Actor(model), None, strategy, settings, optimizer_class=strategy.optimizer_class)


def measure_step(name: str, kind: str, learner: PPOLearner, arguments: argparse.Namespace) -> dict[str, object]:
    shape, device = arguments.shape, arguments.device
    is_cuda = device == "cuda"
    seconds, metrics = [], {}
    experience, lengths, num_scored = make_batch(shape, kind, seed=0)
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    for step in range(arguments.warm_up + arguments.steps):
        batch = experience.select(slice(None))  # the learner moves its batch and may write to it
        taken = timed(lambda batch=batch: metrics.update(learner.step(batch)), device)
        if step >= arguments.warm_up:
            seconds.append(taken)
    median = statistics.median(seconds)
    flops = shape.step_flops(lengths, num_scored)
    return {
        "case": name,
        "batch": kind,
        "pass_tokens": shape.micro_batch_tokens,
        "samples": len(lengths),
        "tokens": sum(lengths),
        "padded_tokens": experience.sequences.numel(),
        "scored_tokens": num_scored,
        "step_seconds": median,
        "all_seconds": seconds,
        "tokens_per_second": sum(lengths) / median,
        "tflops": flops / median / 1e12,
        "mfu": flops / median / arguments.matrix_rate,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if is_cuda else None,
        "loss": metrics["policy/loss"],
        "grad_norm": metrics["policy/grad_norm"],
    }


def profile_step(kind: str, learner: PPOLearner, arguments: argparse.Namespace) -> list[dict[str, object]]:
    """Profile one more step; return and print the kernels (on a CPU, operations) that take the most time."""
    is_cuda = arguments.device == "cuda"
    batch, _, _ = make_batch(arguments.shape, kind, seed=0)
    with torch.profiler.profile(activities=[getattr(ProfilerActivity, arguments.device.upper())]) as profiler:
        learner.step(batch)
    spent = "self_device_time_total" if is_cuda else "self_cpu_time_total"
    events = [event for event in profiler.key_averages() if getattr(event, spent) > 0]
    total = sum(getattr(event, spent) for event in events)
    events.sort(key=lambda event: -getattr(event, spent))
    rows: list[dict[str, object]] = [
        {"name": event.key[:90], "calls": event.count, "ms": getattr(event, spent) / 1e3} for event in events[:15]
    ]
    for row in rows:
        print(
            f"    {row['ms']:>9.1f} ms {1e5 * row['ms'] / total:>5.1f} % {row['calls']:>6} x {row['name']}", flush=True
        )
    return rows


def measure_case(name: str, arguments: argparse.Namespace) -> list[dict[str, object]]:
    """Measure one learner on all batches. If memory runs out, the row has an error instead of numbers."""
    case = CASES[name]
    rows: list[dict[str, object]] = []
    with contextlib.ExitStack() as stack:
        if not case.is_packed:
            stack.enter_context(padded())
        if not case.shares_prompts:
            stack.enter_context(whole_rows())
        learner = make_learner(case, arguments.shape, arguments.device)
        for kind in arguments.batches:
            try:
                rows.append(measure_step(name, kind, learner, arguments))
            except OutOfMemory:
                rows.append({"case": name, "batch": kind, "error": "out of memory"})
            print_step(rows[-1])
        if arguments.profile:
            rows[-1]["profile"] = profile_step(arguments.batches[-1], learner, arguments)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    del learner
    gc.collect()
    if arguments.device == "cuda":
        torch.cuda.empty_cache()
    return rows


def matrix_rate(device: str, size: int) -> float:
    """Return the FLOP/s of a square matrix product in the dtype of the steps."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    times = [timed(lambda: left @ right, device) for _ in range(13)]
    return 2 * size**3 / statistics.median(times[3:])


def print_step(row: dict[str, object]) -> None:
    if "error" in row:
        print(f"{row['case']:<27} {row['batch']:<7} {row['error']}", flush=True)
        return
    peak = "" if row["peak_gib"] is None else f"{row['peak_gib']:>8.2f} GiB"
    print(
        f"{row['case']:<27} {row['batch']:<7} {row['pass_tokens']:>6} per pass "
        f"{row['tokens']:>8} of {row['padded_tokens']:>8} tokens {row['step_seconds']:>8.3f} s "
        f"{row['tokens_per_second']:>10.0f} tok/s {row['tflops']:>7.1f} TFLOP/s "
        f"{100 * row['mfu']:>5.1f} % {peak}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["padded", "packed", "packed-compiled"])
    parser.add_argument("--batches", nargs="+", choices=["ragged", "full", "groups"], default=["ragged", "full"])
    parser.add_argument(
        "--lengths", nargs="*", type=one_or_more, default=[], help="sample lengths of additional batches"
    )
    parser.add_argument("--pass-tokens", nargs="+", type=one_or_more, help="values of train.micro_batch_tokens")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="use a tiny model and tiny batches")
    parser.add_argument("--steps", type=one_or_more, default=3, help="timed steps")
    parser.add_argument("--warm-up", type=zero_or_more, default=1, help="warm-up steps")
    parser.add_argument("--profile", action="store_true", help="also profile a step")
    parser.add_argument("--memory-tokens", type=one_or_more, nargs="*", help="token counts of the second table")
    parser.add_argument("--limit-seconds", type=float, default=0.0, help="start no case after this; 0 = no limit")
    parser.add_argument("--json", type=Path, help="also write all numbers to this file")
    arguments = parser.parse_args()
    check_device(parser, arguments.device)
    began = time.perf_counter()
    is_cuda = arguments.device == "cuda"
    if not is_cuda:
        set_up_cpu()
    arguments.shape = TINY if arguments.tiny else Shape()
    arguments.pass_tokens = arguments.pass_tokens or [arguments.shape.micro_batch_tokens]
    if arguments.lengths:
        longest = max(*arguments.lengths, arguments.shape.max_length)
        arguments.shape = replace(arguments.shape, max_positions=longest)
        arguments.batches = [*arguments.batches, *map(str, arguments.lengths)]
    if arguments.memory_tokens is None:
        arguments.memory_tokens = [1024, 4096, 16384, 65536] if is_cuda else [256, 1024, 4096]
    arguments.matrix_rate = matrix_rate(arguments.device, 8192 if is_cuda else 1024)
    print(f"matrix product: {arguments.matrix_rate / 1e12:.2f} TFLOP/s", flush=True)
    result: dict[str, object] = {
        "device": torch.cuda.get_device_name() if is_cuda else "cpu",
        "torch": torch.__version__,
        "shape": asdict(arguments.shape),
        "matrix_tflops": arguments.matrix_rate / 1e12,
        "memory": logprob_memory(arguments),
    }
    print_memory(result["memory"])
    steps: list[dict[str, object]] = []
    for name, tokens in itertools.product(arguments.cases, arguments.pass_tokens):
        arguments.shape = replace(arguments.shape, micro_batch_tokens=tokens)
        if arguments.limit_seconds and time.perf_counter() - began > arguments.limit_seconds:
            print(f"{name:<22} skipped: --limit-seconds {arguments.limit_seconds:g} reached", flush=True)
            continue
        steps += measure_case(name, arguments)
        result["steps"] = steps
        if arguments.json:  # after every case, so that an interrupted run keeps its results
            arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()

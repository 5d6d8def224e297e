"""The second table of `train_step.py`: memory of log-probs and their gradients, with and without logits."""

import argparse
import gc
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from coati.algos.logprobs import head_logprobs_and_entropy, logprobs_and_entropy


def timed(call: Callable[[], object], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


class LargestTensor(TorchDispatchMode):
    """Records the bytes of the largest result of any operation."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self.num_bytes = max(self.num_bytes, tensor.nbytes)
        return result


def logprob_memory(arguments: argparse.Namespace) -> list[dict[str, object]]:
    """Measure the peak memory from hidden states to gradients of log-probs, for growing numbers of tokens."""
    shape, device = arguments.shape, arguments.device
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    weight = torch.randn(shape.vocabulary, shape.width, device=device, dtype=dtype, requires_grad=True)

    def with_logits(hidden: Tensor, tokens: Tensor) -> Tensor:
        return logprobs_and_entropy(F.linear(hidden, weight), tokens)[0]

    def without_logits(hidden: Tensor, tokens: Tensor) -> Tensor:
        # A tiny vocabulary would fit into one chunk.
        return head_logprobs_and_entropy(hidden, weight, tokens, chunk_tokens=128 if arguments.tiny else 0)[0]

    rows = []
    for num_tokens in arguments.memory_tokens:
        for name, score in (("with logits", with_logits), ("without logits", without_logits)):
            hidden = torch.randn(num_tokens, shape.width, device=device, dtype=dtype, requires_grad=True)
            tokens = torch.randint(shape.vocabulary, (num_tokens,), device=device)
            row: dict[str, object] = {"way": name, "tokens": num_tokens}
            try:
                row |= _memory_of(lambda hidden=hidden, tokens=tokens, score=score: score(hidden, tokens), device)
            except torch.cuda.OutOfMemoryError:
                row["error"] = "out of memory"
            rows.append(row)
            weight.grad = None
            del hidden, tokens
            gc.collect()
    return rows


def _memory_of(score: Callable[[], Tensor], device: str) -> dict[str, object]:
    if device != "cuda":
        with LargestTensor() as seen:
            score().sum().backward()
        return {"largest_tensor_mib": seen.num_bytes / 2**20}
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    seconds = timed(lambda: score().sum().backward(), device)
    return {"peak_mib": (torch.cuda.max_memory_allocated() - before) / 2**20, "seconds": seconds}


def print_memory(rows: list[dict[str, object]]) -> None:
    for row in rows:
        sizes = ", ".join(f"{key} {value:.1f}" for key, value in row.items() if isinstance(value, float))
        print(f"{row['way']:<16} {row['tokens']:>8} tokens  {sizes or row['error']}", flush=True)

"""Tokens per second of the native engine and of others, all with log-probs, all in one run.

    python benchmarks/rollout.py                                          the demo's model on the CPU
    python benchmarks/rollout.py --device cuda --batches 64 256 1024      0.5B parameters (Qwen2's shape) in bfloat16
    python benchmarks/rollout.py --device cuda --engines native vllm --batches 2048 --slots 256 --prompt-tokens 512
        --new-tokens 2048 --mean-tokens 500                               ragged lengths, through fewer slots

The others: `reference`, transformers' models with our keyed draws; on a CPU also `stock`, the same with torch as it
comes (all cores, oneDNN on), where the rest has `--threads` and what `set_up_cpu` sets; on a GPU `static`,
transformers' `generate` with a static cache and a compiled step, and `vllm`, in a separate process (`--vllm-site`: the
folder it is installed in, if that is not torch's). One that cannot run here is left out, and the table says why.

Every engine continues the same prompts at temperature 1 with no token cut, after one warm-up that is not counted;
medians of `--repeats`. Responses have the full length; with `--mean-tokens` so many tokens of the vocabulary end one
that, with random weights, lengths are geometric. On a GPU the limit for equal lengths is the memory's: one pass over
the weights and over the cache for each token, at the bandwidth that a plain copy reaches in the same run. The gap is
the mean and largest absolute difference between the log-probs of the engine and those of the learner's forward pass.
"""

import argparse
import contextlib
import dataclasses
import functools
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from checked import check_device, one_or_more
from rollout_peers import WARMUP_TOKENS, StaticEngine, run_vllm

ENGINES = ["stock", "reference", "static", "vllm", "native"]
"""In the order of the rows: the native engine's comes last."""
ON = {"cpu": ["stock", "reference", "native"], "cuda": ["reference", "static", "vllm", "native"]}
QWEN2 = {
    "0.5B": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
             "num_key_value_heads": 2, "vocab_size": 151_936, "tie_word_embeddings": True},
    "1.5B": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
             "num_key_value_heads": 2, "vocab_size": 151_936, "tie_word_embeddings": True},
    "7B": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
           "num_key_value_heads": 4, "vocab_size": 152_064, "tie_word_embeddings": False},
}  # fmt: skip
GAP_TOKENS = 8192
"""The gap is measured over so many tokens, because the learner's pass holds the logits of all of them."""


def make_model(device: str, size: str):
    from transformers import AutoModelForCausalLM, Qwen2Config

    if device == "cpu":
        from coati.demo.base_model import pretrain

        with tempfile.TemporaryDirectory() as folder:
            pretrain(Path(folder))
            return AutoModelForCausalLM.from_pretrained(folder).eval()
    torch.manual_seed(0)
    config = Qwen2Config(**QWEN2[size], max_position_embeddings=16384)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def make_request(model, batch: int, arguments, seed: int):
    from coati.experience import Sample
    from coati.rollout import GenerateOptions

    generator = torch.Generator().manual_seed(seed)
    shape = (-(-batch // arguments.samples_per_prompt), arguments.prompt_tokens)
    ids = torch.randint(3, model.config.vocab_size, shape, generator=generator)
    ids = ids.repeat_interleave(arguments.samples_per_prompt, dim=0)[:batch]
    options = GenerateOptions.parse(eos_token_id=end_tokens(model, arguments.mean_tokens), pad_token_id=0)
    return [
        Sample(row + 10_000 * seed, prompt, arguments.new_tokens, 0, options) for row, prompt in enumerate(ids.tolist())
    ]


def end_tokens(model, mean_tokens: int | None) -> list[int]:
    """So many that each token ends a response with probability 1 / mean, if all are about equally likely."""
    vocabulary = model.config.vocab_size
    order = torch.randperm(vocabulary, generator=torch.Generator().manual_seed(0)).tolist()
    return sorted(order[: round(vocabulary / mean_tokens)]) if mean_tokens else []


def make_engine(name: str, model, num_slots: int):
    from coati.rollout import NativeEngine, ReferenceEngine

    if name == "native":
        return NativeEngine(model, num_slots=num_slots)
    return StaticEngine(model) if name == "static" else ReferenceEngine(model)


def timed(name: str, engine, requests) -> tuple[float, object]:
    """Median tokens per second of all requests but the first, and the last rollout.

    Warm-up is the first request: in full where graphs and compiled steps depend on the length, else a few tokens of it.
    """
    from coati.rollout import generate

    warmup_tokens = min(WARMUP_TOKENS, requests[0][0].limit)
    is_short = name in ("stock", "reference")
    run = engine.generate if isinstance(engine, StaticEngine) else functools.partial(generate, engine)
    run([dataclasses.replace(one, limit=warmup_tokens) for one in requests[0]] if is_short else requests[0])
    rates = []
    for request in requests[1:]:
        _synchronize()
        started = time.perf_counter()
        rollout = run(request)
        _synchronize()
        rates.append(int(rollout.action_mask.sum()) / (time.perf_counter() - started))
    return statistics.median(rates), rollout


def gap(model, rollout) -> tuple[float, float]:
    """Mean and largest |log-prob of the engine - log-prob of the learner's forward| over the first rows, at most 16."""
    from coati.models import action_logprobs

    rows = slice(0, min(16, max(1, GAP_TOKENS // rollout.action_mask.shape[1])))
    with torch.no_grad():
        forward, _ = action_logprobs(
            model, rollout.sequences[rows], rollout.attention_mask[rows], rollout.action_mask.shape[1]
        )
    difference = (forward.float() - rollout.action_log_probs[rows])[rollout.action_mask[rows]].abs()
    return float(difference.mean()), float(difference.max())


def memory_limit(model, batch: int, prompt_tokens: int, new_tokens: int) -> float:
    """Tokens per second if only the memory's bandwidth counted."""
    config = model.config
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    head_dim = config.hidden_size // config.num_attention_heads
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * 2
    cache = batch * (prompt_tokens + new_tokens / 2) * per_token
    source = torch.empty(2**30, dtype=torch.uint8, device=model.device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(6):
        _synchronize()
        started = time.perf_counter()
        target.copy_(source)
        _synchronize()
        seconds.append(time.perf_counter() - started)
    bandwidth = 2 * 2**30 / statistics.median(seconds[1:])
    return batch * bandwidth / (weights + cache)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def release_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


@contextlib.contextmanager
def stock_torch() -> Iterator[None]:
    """torch on a CPU as it comes."""
    threads, has_onednn = torch.get_num_threads(), torch.backends.mkldnn.enabled
    torch.set_num_threads(os.cpu_count() or 1)
    torch.backends.mkldnn.enabled = True
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.backends.mkldnn.enabled = has_onednn


class Table:
    """Rows, printed as they come and written to the JSON file each time: a run that is cut short leaves what it had."""

    def __init__(self, model, num_slots: int, json_path: Path | None) -> None:
        self._model = model
        self._num_slots = num_slots
        self._json_path = json_path
        self._rows: list[dict] = []
        print(
            f"{'batch':>6} {'engine':>10} {'tokens/s':>10} {'ms/token':>9} {'× stock':>8} {'× reference':>12} "
            f"{'× static':>9} {'× vllm':>7} {'gap mean':>9} {'max':>8}",
            flush=True,
        )

    def add(self, batch: int, name: str, rate: float, rollout, **more) -> None:
        mean, largest = gap(self._model, rollout)
        row = {
            "batch": batch,
            "engine": name,
            "tokens_per_second": rate,
            "ms_per_token": min(batch, self._num_slots) / rate * 1e3,
            "mean_tokens": float(rollout.action_mask.sum(dim=1).float().mean()),
            **times_others(rate, self._rates(batch)),
            "gap_mean": mean,
            "gap_max": largest,
            **more,
        }
        times = {peer: row[f"times_{peer}"] for peer in ENGINES[:-1]}
        text = {peer: "-" if value is None else f"{value:.1f}" for peer, value in times.items()}
        print(
            f"{batch:>6} {name:>10} {rate:>10,.0f} {row['ms_per_token']:>9.2f} {text['stock']:>8} "
            f"{text['reference']:>12} {text['static']:>9} {text['vllm']:>7} {mean:>9.1e} {largest:>8.1e}",
            flush=True,
        )
        self._keep(row)

    def add_limit(self, batch: int, limit: float) -> None:
        print(f"{batch:>6} {'limit':>10} {limit:>10,.0f}", flush=True)
        self._keep({"batch": batch, "engine": "memory limit", "tokens_per_second": limit})

    def leave_out(self, batch: int, name: str, reason: str) -> None:
        print(f"{batch:>6} {name:>10} left out: {reason}", flush=True)
        self._keep({"batch": batch, "engine": name, "left_out": reason})

    def _rates(self, batch: int) -> dict[str, float]:
        rows = [row for row in self._rows if row["batch"] == batch and "tokens_per_second" in row]
        return {row["engine"]: row["tokens_per_second"] for row in rows}

    def _keep(self, row: dict) -> None:
        self._rows.append(row)
        if self._json_path is not None:
            self._json_path.write_text(json.dumps(self._rows, indent=2) + "\n")


def times_others(rate: float, rates: dict[str, float]) -> dict[str, float | None]:
    """How many times as fast as each engine that was measured before; None where one was not."""
    return {f"times_{peer}": rate / rates[peer] if peer in rates else None for peer in ENGINES[:-1]}


def measure(arguments, model, requests_by_batch: dict, table: Table) -> None:
    # vLLM goes first, while this process holds a model and nothing else on the device.
    vllm_results, vllm_reason = {}, ""
    if "vllm" in arguments.engines:
        release_memory()
        vllm_results, vllm_reason = run_vllm(model, requests_by_batch, arguments.slots, arguments.vllm_site)
    for batch, requests in requests_by_batch.items():
        for name in sorted(arguments.engines, key=ENGINES.index):
            if name == "vllm":
                if batch in vllm_results:
                    rate, rollout, start = vllm_results[batch]
                    table.add(batch, name, rate, rollout, **start)
                else:
                    table.leave_out(batch, name, vllm_reason)
                continue
            measure_here(name, model, batch, requests, arguments.slots, table)
        if model.device.type == "cuda" and not arguments.mean_tokens and batch <= arguments.slots:
            prompt_tokens, new_tokens = len(requests[0][0].tokens), requests[0][0].limit
            table.add_limit(batch, memory_limit(model, batch, prompt_tokens, new_tokens))


def measure_here(name: str, model, batch: int, requests, num_slots: int, table: Table) -> None:
    """An engine that runs in this process. A compiler or memory that fails `static` does not end the run."""
    release_memory()
    engine = make_engine(name, model, num_slots)
    try:
        with stock_torch() if name == "stock" else contextlib.nullcontext():
            rate, rollout = timed(name, engine, requests)
    except RuntimeError as error:
        if name != "static":
            raise
        table.leave_out(batch, name, f"{type(error).__name__}: {str(error).strip().splitlines()[0]}")
    else:
        more = {"peak_gib": torch.cuda.max_memory_allocated() / 2**30} if model.device.type == "cuda" else {}
        table.add(batch, name, rate, rollout, **more)
    if name == "static":
        engine.close()


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--batches", type=one_or_more, nargs="+", default=[64])
    parser.add_argument("--model", choices=list(QWEN2), default="0.5B", help="on cuda: a shape of Qwen2's")
    parser.add_argument("--slots", type=one_or_more, help="samples at the same time; default: the largest batch")
    parser.add_argument("--samples-per-prompt", type=one_or_more, default=1)
    parser.add_argument("--mean-tokens", type=one_or_more, help="about so many in a response, at most --new-tokens")
    parser.add_argument("--prompt-tokens", type=one_or_more)
    parser.add_argument("--new-tokens", type=one_or_more)
    parser.add_argument(
        "--engines", nargs="+", choices=ENGINES, help="default: all but stock on cuda; stock, reference, native on cpu"
    )
    parser.add_argument("--vllm-site", type=Path, help="a folder for the PYTHONPATH of vLLM's process")
    parser.add_argument("--repeats", type=one_or_more, default=3)
    parser.add_argument("--threads", type=one_or_more, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    check_device(parser, arguments.device)
    is_gpu = arguments.device == "cuda"
    arguments.engines = arguments.engines or ON[arguments.device]
    arguments.prompt_tokens = arguments.prompt_tokens or (128 if is_gpu else 4)
    arguments.new_tokens = arguments.new_tokens or (256 if is_gpu else 16)
    arguments.slots = arguments.slots or max(arguments.batches)
    if arguments.mean_tokens and {"static", "stock"} & {*arguments.engines}:
        parser.error("--mean-tokens goes with --engines native, vllm and reference")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    from transformers.utils import logging as transformers_logging

    from coati.devices import set_up_cpu

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    if arguments.device == "cpu":
        set_up_cpu(arguments.threads)
    model = make_model(arguments.device, arguments.model)
    requests_by_batch = {
        batch: [make_request(model, batch, arguments, seed) for seed in range(arguments.repeats + 1)]
        for batch in arguments.batches
    }
    table = Table(model, arguments.slots, arguments.json)
    measure(arguments, model, requests_by_batch, table)
    unused = [name for name in ENGINES if name not in arguments.engines]
    if unused:
        why = "asked for by --engines only" if arguments.device == "cpu" else "--engines leaves it out"
        print(f"Not in this run: {', '.join(unused)} ({why}).")


if __name__ == "__main__":
    main()

"""Tokens per second of the native engine and of others, all with log-probs, all in one run.

    python benchmarks/rollout.py                                                    the demo's model on the CPU
    python benchmarks/rollout.py --device cuda --cases 64x128+256 256x128+256       0.5B parameters (Qwen2's shape)
    python benchmarks/rollout.py --device cuda --engines native vllm --cases 2048/256x512+2048~500
                                                                                    ragged lengths, through 256 slots

A case is PROMPTS[/SLOTS]xPROMPT_TOKENS+NEW_TOKENS[~MEAN]. Responses have the full length; with a mean, so many tokens
of the vocabulary end one that, with random weights, lengths are geometric.

The others: `reference`, transformers' models with our keyed draws; on a CPU also `stock`, the same with torch as it
comes (all cores, oneDNN on), where the rest has `--threads` and what `coati.devices.set_up_cpu` sets; `vllm`, in a
separate process (`--vllm-site`: the folder it is installed in, if that is not torch's), which is left out where it
cannot run; `invariant`, the native engine with `rollout.batch_invariant`, for a GPU.

Every engine continues random prompts at temperature 1 with no token cut, after one warm-up that is not counted;
medians of `--repeats`. On a GPU the limit for equal lengths is the memory's: one pass over the weights and over the
cache for each token, at the bandwidth that a plain copy reaches in the same run. The gap is the mean and largest
absolute difference between the log-probs of the engine and those of the learner's forward pass.
"""

import argparse
import contextlib
import dataclasses
import gc
import json
import os
import re
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from checked import check_device, one_or_more
from rollout_vllm import TURN, WARMUP_TOKENS, run_vllm, vllm_job, wait_for_turn

INVARIANT = "invariant"
ENGINES = ["vllm", "stock", "reference", "native", INVARIANT]
"""In the order of the rows."""
ON = {"cpu": ["stock", "reference", "native"], "cuda": ["vllm", "reference", "native"]}
QWEN2 = {
    "0.5B": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
             "num_key_value_heads": 2, "vocab_size": 151_936, "tie_word_embeddings": True},
    "1.5B": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
             "num_key_value_heads": 2, "vocab_size": 151_936, "tie_word_embeddings": True},
    "7B": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
           "num_key_value_heads": 4, "vocab_size": 152_064, "tie_word_embeddings": False},
    "tiny": {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
             "num_key_value_heads": 1, "vocab_size": 1_000, "tie_word_embeddings": True},
}  # fmt: skip
"""`tiny` tries a command out."""
GAP_TOKENS = 8192
"""The gap is measured over so many tokens, because the learner's pass holds the logits of all of them."""


@dataclasses.dataclass(frozen=True)
class Case:
    """What is generated."""

    name: str
    batch: int
    slots: int
    prompt_tokens: int
    new_tokens: int
    mean_tokens: int | None
    samples_per_prompt: int = 1

    def end_tokens(self, vocabulary: int) -> list[int]:
        """So many that each token ends a response with probability 1 / mean, if all are about equally likely."""
        order = torch.randperm(vocabulary, generator=torch.Generator().manual_seed(0)).tolist()
        return sorted(order[: round(vocabulary / self.mean_tokens)]) if self.mean_tokens else []


def case_of(text: str) -> Case:
    """A case, from its text."""
    found = re.fullmatch(r"(\d+)(?:/(\d+))?x(\d+)\+(\d+)(?:~(\d+))?", text)
    numbers = [int(number or 0) for number in found.groups()] if found else []
    if not found or 0 in (numbers[0], numbers[2], numbers[3]):
        raise argparse.ArgumentTypeError(f"must be as 64x128+256 or 2048/256x512+2048~500, got {text!r}")
    batch, slots, prompt_tokens, new_tokens, mean = numbers
    return Case(text, batch, slots or batch, prompt_tokens, new_tokens, mean or None)


def qwen2_config(size: str):
    from transformers import Qwen2Config

    return Qwen2Config(**QWEN2[size], max_position_embeddings=16384, architectures=["Qwen2ForCausalLM"])


def make_model(device: str, size: str | None):
    from transformers import AutoModelForCausalLM

    if size is None:
        from coati.demo.base_model import pretrain

        with tempfile.TemporaryDirectory() as folder:
            pretrain(Path(folder))
            return AutoModelForCausalLM.from_pretrained(folder).eval()
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        return AutoModelForCausalLM.from_config(qwen2_config(size), dtype=dtype).eval()


def job_for_vllm(config, dtype: str, cases: list[Case], repeats: int, seconds: float) -> dict:
    rows = [{**dataclasses.asdict(case), "end_tokens": case.end_tokens(config.vocab_size)} for case in cases]
    return vllm_job(config.to_dict(), dtype, rows, repeats, seconds)


def make_samples(model, case: Case, seed: int):
    from coati.experience import Sample
    from coati.rollout import GenerateOptions

    vocabulary = model.config.vocab_size
    generator = torch.Generator().manual_seed(seed)
    shape = (-(-case.batch // case.samples_per_prompt), case.prompt_tokens)
    ids = torch.randint(3, vocabulary, shape, generator=generator)
    ids = ids.repeat_interleave(case.samples_per_prompt, dim=0)[: case.batch].tolist()
    options = GenerateOptions.parse(eos_token_id=case.end_tokens(vocabulary), pad_token_id=0)
    return [Sample(row + 10_000 * seed, prompt, case.new_tokens, 0, options) for row, prompt in enumerate(ids)]


def make_engine(name: str, model, num_slots: int):
    from coati.models.tiles import set_batch_invariant
    from coati.rollout import NativeEngine, ReferenceEngine

    set_batch_invariant(model, name == INVARIANT)
    return NativeEngine(model, num_slots=num_slots) if name in ("native", INVARIANT) else ReferenceEngine(model)


def timed(name: str, engine, case: Case, repeats: int, seconds: float) -> tuple[list[float], object]:
    """Tokens per second of each repeat, and the last rollout.

    Before them comes a warm-up, as long as the rest where graphs depend on lengths, but of one prompt for each slot.
    """
    from coati.rollout import generate

    new_tokens = case.new_tokens if name in ("native", INVARIANT) else min(WARMUP_TOKENS, case.new_tokens)
    short = dataclasses.replace(case, batch=min(case.batch, case.slots), new_tokens=new_tokens)
    generate(engine, make_samples(engine.model, short, seed=0))
    rates: list[float] = []
    until = time.perf_counter() + seconds
    while not rates or (len(rates) < repeats and time.perf_counter() < until):
        seed = len(rates) + 1
        samples = make_samples(engine.model, case, seed)
        _synchronize()
        started = time.perf_counter()
        rollout = generate(engine, samples)
        _synchronize()
        rates.append(int(rollout.action_mask.sum()) / (time.perf_counter() - started))
    return rates, rollout


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


def memory_limit(model, case: Case) -> float:
    """Tokens per second if only the memory's bandwidth counted."""
    config = model.config
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    head_dim = config.hidden_size // config.num_attention_heads
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * 2
    cache = case.batch * (case.prompt_tokens + case.new_tokens / 2) * per_token
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
    return case.batch * bandwidth / (weights + cache)


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

    def __init__(self, json_path: Path | None) -> None:
        self._json_path = json_path
        self.rows: list[dict] = []
        print(
            f"{'case':>26} {'engine':>10} {'tokens/s':>10} {'ms/token':>9} {'× stock':>8} {'× reference':>12} "
            f"{'× vllm':>7} {'gap mean':>9} {'max':>8}",
            flush=True,
        )

    def add(self, case: Case, name: str, rates: list[float], **more) -> None:
        rate = statistics.median(rates)
        others = {row["engine"]: row.get("tokens_per_second") for row in self.rows if row["case"] == case.name}
        times = {f"times_{peer}": rate / others[peer] if others.get(peer) else None for peer in ENGINES[:3]}
        row = {"case": case.name, "engine": name, "tokens_per_second": rate, "rates": rates, **times, **more}
        text = {peer: f"{value:.1f}" if value else "-" for peer, value in times.items()}
        gaps = f"{row['gap_mean']:>9.1e} {row['gap_max']:>8.1e}" if "gap_mean" in row else ""
        print(
            f"{case.name:>26} {name:>10} {rate:>10,.0f} {min(case.batch, case.slots) / rate * 1e3:>9.2f} "
            f"{text['times_stock']:>8} {text['times_reference']:>12} {text['times_vllm']:>7} {gaps}",
            flush=True,
        )
        self._keep(row)

    def add_limit(self, case: Case, limit: float) -> None:
        print(f"{case.name:>26} {'limit':>10} {limit:>10,.0f}", flush=True)
        self._keep({"case": case.name, "engine": "memory limit", "tokens_per_second": limit})

    def leave_out(self, case: Case, name: str, reason: str) -> None:
        print(f"{case.name:>26} {name:>10} left out: {reason}", flush=True)
        self._keep({"case": case.name, "engine": name, "left_out": reason})

    def _keep(self, row: dict) -> None:
        self.rows.append(row)
        if self._json_path is not None:
            self._json_path.write_text(json.dumps(self.rows, indent=2) + "\n")


def measure_vllm(arguments, config, dtype: str, table: Table) -> None:
    job = job_for_vllm(config, dtype, arguments.cases, arguments.repeats, arguments.case_seconds)
    results, reason = run_vllm(job, arguments.vllm_site)
    for case in arguments.cases:
        if (found := results.get(case.name)) is None:
            table.leave_out(case, "vllm", reason)
        else:
            start = {name: found[name] for name in ("version", "start_seconds", "mean_tokens")}
            table.add(case, "vllm", found["rates"], **start)


def measure_here(name: str, model, case: Case, arguments, table: Table) -> None:
    """An engine that runs in this process."""
    release_memory()
    with stock_torch() if name == "stock" else contextlib.nullcontext():
        engine = make_engine(name, model, case.slots)
        rates, rollout = timed(name, engine, case, arguments.repeats, arguments.case_seconds)
    more = {"peak_gib": torch.cuda.max_memory_allocated() / 2**30} if model.device.type == "cuda" else {}
    mean, largest = gap(model, rollout)
    mean_tokens = float(rollout.action_mask.sum(dim=1).float().mean())
    table.add(case, name, rates, gap_mean=mean, gap_max=largest, mean_tokens=mean_tokens, **more)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--cases", type=case_of, nargs="+", help="default: 64x4+16; on cuda 64x128+256")
    parser.add_argument("--model", choices=list(QWEN2), help="a shape of Qwen2's; default: the demo's, on cuda 0.5B")
    parser.add_argument("--samples-per-prompt", type=one_or_more, default=1)
    parser.add_argument(
        "--engines", nargs="+", choices=ENGINES, help="default: all but stock on cuda; stock, reference, native on cpu"
    )
    parser.add_argument("--vllm-site", type=Path, help="a folder for the PYTHONPATH of vLLM's process")
    parser.add_argument("--repeats", type=one_or_more, default=3)
    parser.add_argument("--case-seconds", type=float, default=3600.0, help="no repeat of a case is begun after these")
    parser.add_argument("--threads", type=one_or_more, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    check_device(parser, arguments.device)
    is_gpu = arguments.device == "cuda"
    arguments.engines = arguments.engines or ON[arguments.device]
    arguments.model = arguments.model or ("0.5B" if is_gpu else None)
    cases = arguments.cases or [case_of("64x128+256" if is_gpu else "64x4+16")]
    arguments.cases = [dataclasses.replace(case, samples_per_prompt=arguments.samples_per_prompt) for case in cases]
    if "stock" in arguments.engines and any(case.mean_tokens for case in arguments.cases):
        parser.error("a case with a mean goes with --engines native, vllm and reference")
    if "vllm" in arguments.engines and arguments.model is None:
        parser.error("--engines vllm needs --model")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    from transformers.utils import logging as transformers_logging

    import coati.rollout  # noqa: F401
    from coati.devices import set_up_cpu

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    if arguments.device == "cpu":
        set_up_cpu(arguments.threads)
    wait_for_turn(os.environ.get(TURN))
    table = Table(arguments.json)
    if "vllm" in arguments.engines:
        dtype = "bfloat16" if arguments.device == "cuda" else "float32"
        measure_vllm(arguments, qwen2_config(arguments.model), dtype, table)
    model = make_model(arguments.device, arguments.model)
    for case in arguments.cases:
        for name in ENGINES[1:]:
            if name in arguments.engines:
                measure_here(name, model, case, arguments, table)
        if arguments.device == "cuda" and not case.mean_tokens and case.batch <= case.slots:
            table.add_limit(case, memory_limit(model, case))


if __name__ == "__main__":
    main()

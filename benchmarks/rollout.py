"""How fast text is written: the native engine beside transformers' `generate`, with log-probs, in one run.

    python benchmarks/rollout.py                                          the demo's model on the CPU
    python benchmarks/rollout.py --device cuda --batches 64 256 1024      0.5B parameters (Qwen2's shape) in bfloat16

Every engine continues the same prompts by the same draws, always to the full length (no end-of-sequence token), after
one warm-up; medians of `--repeats`. On a GPU the limit beside them is the memory's: one pass over the weights and over
the cache for each token, at the bandwidth that a plain copy reaches in the same run. The gap is the mean and largest
absolute difference between the log-probs of the engine and those of the learner's forward pass.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

QWEN2_05B = {
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}


def make_model(device: str):
    from transformers import AutoModelForCausalLM, Qwen2Config

    if device == "cpu":
        from coati.demo.cache import ensure_base_model

        return AutoModelForCausalLM.from_pretrained(ensure_base_model(None)).eval()
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(Qwen2Config(**QWEN2_05B), dtype=torch.bfloat16).eval()


def make_request(model, batch: int, prompt_tokens: int, new_tokens: int, seed: int):
    from coati.rollout import GenerateOptions, RolloutRequest

    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, model.config.vocab_size, (batch, prompt_tokens), generator=generator).to(model.device)
    return RolloutRequest(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        sample_ids=torch.arange(batch) + 1000 * seed,
        seed=0,
        options=GenerateOptions.parse(eos_token_id=[], pad_token_id=0),
        max_new_tokens=new_tokens,
    )


def timed(engine, requests) -> tuple[float, object]:
    engine.generate(requests[0])
    seconds = []
    for request in requests[1:]:
        _synchronize()
        started = time.perf_counter()
        rollout = engine.generate(request)
        _synchronize()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds), rollout


def gap(model, rollout) -> tuple[float, float]:
    """Mean and largest |log-prob of the engine - log-prob of the learner's forward| over the first 16 rows."""
    from coati.models import action_logprobs

    rows = slice(0, 16)
    with torch.no_grad():
        forward, _ = action_logprobs(
            model, rollout.sequences[rows], rollout.attention_mask[rows], rollout.action_mask.shape[1]
        )
    difference = (forward.float() - rollout.rollout_log_probs[rows]).abs()
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--batches", type=int, nargs="+", default=[64])
    parser.add_argument("--prompt-tokens", type=int)
    parser.add_argument("--new-tokens", type=int)
    parser.add_argument("--engines", nargs="+", default=["reference", "native"], choices=["reference", "native"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    from coati.cli.run import quiet_libraries
    from coati.cpu import set_up_cpu
    from coati.rollout import NativeEngine, ReferenceEngine

    quiet_libraries(verbose=False)
    is_gpu = arguments.device == "cuda"
    prompt_tokens = arguments.prompt_tokens or (128 if is_gpu else 4)
    new_tokens = arguments.new_tokens or (256 if is_gpu else 16)
    if not is_gpu:
        set_up_cpu(arguments.threads)
    model = make_model(arguments.device)
    rows = []
    print(
        f"{'batch':>6} {'engine':>10} {'tokens/s':>10} {'ms/token':>9} {'× reference':>12} {'gap mean':>9} {'max':>8}"
    )
    for batch in arguments.batches:
        requests = [
            make_request(model, batch, prompt_tokens, new_tokens, seed) for seed in range(arguments.repeats + 1)
        ]
        base = None
        for name in arguments.engines:
            if name == "reference":
                engine = ReferenceEngine(model)
            else:
                engine = NativeEngine(model, num_slots=max(arguments.batches))
            seconds, rollout = timed(engine, requests)
            rate = batch * new_tokens / seconds
            base = rate if name == "reference" else base
            mean, largest = gap(model, rollout)
            row = {
                "batch": batch,
                "engine": name,
                "tokens_per_second": rate,
                "ms_per_token": seconds / new_tokens * 1e3,
                "times_reference": rate / base if base else None,
                "gap_mean": mean,
                "gap_max": largest,
            }
            if is_gpu:
                row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
                torch.cuda.reset_peak_memory_stats()
            rows.append(row)
            times = f"{row['times_reference']:.1f}" if base else "-"
            print(
                f"{batch:>6} {name:>10} {rate:>10,.0f} {row['ms_per_token']:>9.2f} {times:>12} {mean:>9.1e} "
                f"{largest:>8.1e}",
                flush=True,
            )
            del engine, rollout
        if is_gpu:
            limit = memory_limit(model, batch, prompt_tokens, new_tokens)
            rows.append({"batch": batch, "engine": "memory limit", "tokens_per_second": limit})
            print(f"{batch:>6} {'limit':>10} {limit:>10,.0f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()

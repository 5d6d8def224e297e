"""The vLLM part of `rollout.py` and `table.py`: one engine for all cases, in a separate process without coati.

As a module it describes the job, starts the process and reads its results; as a script it is the process:

    python -P benchmarks/rollout_vllm.py JOB.json

Each result is a line of JSON after `RESULT`, because vLLM logs to the same stream. Weights are vLLM's dummy weights,
prompts and responses are token ids, and no tokenizer is loaded.
"""

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RESULT = "rollout_vllm result: "
TURN = "COATI_BENCHMARK_TURN"
"""Environment variable with a path. A warm process creates PATH.ready and waits for PATH.go (see `table.py`)."""
WARMUP_TOKENS = 16
DEADLINE_SECONDS = 600.0
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "TVM_FFI_DISABLE_TORCH_C_DLPACK": "1",
}
"""Defaults for a machine without a network. Variables that are already set take precedence."""


def wait_for_turn(turn: str | None) -> None:
    """Wait until this process may measure; others on the same machine may still be starting or measuring."""
    if turn is None:
        return
    Path(turn + ".ready").touch()
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not Path(turn + ".go").exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{turn}.go did not appear in {DEADLINE_SECONDS:.0f} s.")
        time.sleep(0.05)


def cache_bytes(config: dict, tokens: int) -> int:
    """Return the bytes of a 16-bit KV cache for `tokens` tokens, plus one eighth."""
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    return round(4.5 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim * tokens)


def vllm_job(config: dict, dtype: str, cases: list[dict], repeats: int, seconds: float) -> dict:
    """Return the job for a transformers `config` with architecture and `cases` of `rollout.Case` with end tokens."""
    rows = [min(case["batch"], case["slots"]) for case in cases]
    # If lengths are random, concurrent responses are never all near the limit.
    lengths = [case["prompt_tokens"] + min(case["new_tokens"], 2 * (case["mean_tokens"] or 10**9)) for case in cases]
    tokens = max(num_rows * length for num_rows, length in zip(rows, lengths, strict=True))
    return {
        "config": config,
        "dtype": dtype,
        "cases": cases,
        "repeats": repeats,
        "seconds": seconds,
        "slots": max(rows),
        "max_tokens": max(case["prompt_tokens"] + case["new_tokens"] for case in cases),
        "cache_bytes": max(2**28, cache_bytes(config, tokens)),
    }


def run_vllm(job: dict, site: Path | None) -> tuple[dict[str, dict], str]:
    """Run the job and return the results by case, and the reason for missing ones."""
    with tempfile.TemporaryDirectory(prefix="coati-vllm-") as folder:
        path, log = Path(folder) / "job.json", Path(folder) / "log.txt"
        path.write_text(json.dumps(job))
        with log.open("w") as stream:
            try:
                code = subprocess.run(
                    vllm_command(path),
                    env=vllm_environment(site),
                    stdin=subprocess.DEVNULL,
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    timeout=DEADLINE_SECONDS,
                    check=False,
                ).returncode
                ended = f"its process ended with status {code}"
            except subprocess.TimeoutExpired:
                ended = f"it did not finish in {DEADLINE_SECONDS:.0f} s"
        text = log.read_text(errors="replace")
    measured, left_out = read_results(text, ended)
    if len(measured) < len(job["cases"]) and "cannot be imported" not in left_out:
        print("\n".join(text.splitlines()[-30:]), file=sys.stderr)
    return measured, left_out


def vllm_command(job: Path) -> list[str]:
    return [sys.executable, "-P", __file__, str(job)]


def vllm_environment(site: Path | None) -> dict[str, str]:
    environment = {**ENVIRONMENT, **os.environ}
    if site is not None:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    return environment


def read_results(log: str, ended: str) -> tuple[dict[str, dict], str]:
    """Return the results by case, each with the engine's start, and the reason for missing ones."""
    lines = [json.loads(line.removeprefix(RESULT)) for line in log.splitlines() if line.startswith(RESULT)]
    if lines and "left_out" in lines[0]:
        return {}, lines[0]["left_out"]
    measured = {line["case"]: {**lines[0], **line} for line in lines[1:]}
    errors = [line.strip() for line in log.splitlines() if re.match(r"\s*[\w.]*(Error|Exception): ", line)]
    return measured, f"{ended}: {errors[-1]}" if errors else ended


# Below: code of the vLLM process.


def make_engine(job: dict, folder: str):
    from vllm import LLM

    (Path(folder) / "config.json").write_text(json.dumps(job["config"]))
    return LLM(
        folder,
        load_format="dummy",
        dtype=job["dtype"],
        skip_tokenizer_init=True,
        generation_config="vllm",
        enable_prefix_caching=any(case["samples_per_prompt"] > 1 for case in job["cases"]),
        max_model_len=job["max_tokens"],
        max_num_seqs=job["slots"],
        kv_cache_memory_bytes=job["cache_bytes"],
        gpu_memory_utilization=0.05,  # unused, but vLLM checks that this share is free
        enforce_eager=job["dtype"] == "float32",  # on a CPU, compiling takes minutes
        # The default limit is 512; larger batches would decode without graphs.
        compilation_config={"max_cudagraph_capture_size": max(512, job["slots"])},
    )


def make_prompts(job: dict, case: dict, seed: int) -> list[dict]:
    import numpy

    shape = (-(-case["batch"] // case["samples_per_prompt"]), case["prompt_tokens"])
    ids = numpy.random.default_rng(seed).integers(3, job["config"]["vocab_size"], shape)
    rows = ids.repeat(case["samples_per_prompt"], axis=0)[: case["batch"]].tolist()
    return [{"prompt_token_ids": row} for row in rows]


def sampling(num_tokens: int, end_tokens: list[int]):
    """Return options with flat log-probs of the sampled tokens only, the cheapest form in vLLM."""
    from vllm import SamplingParams

    return SamplingParams(
        temperature=1.0,
        max_tokens=num_tokens,
        ignore_eos=True,
        stop_token_ids=end_tokens,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
    )


def warm_up(engine, job: dict, case: dict) -> None:
    """Generate a few tokens. Graphs are captured when the engine starts."""
    num_tokens = min(WARMUP_TOKENS, case["new_tokens"])
    prompts = make_prompts(job, case, seed=0)[: case["slots"]]
    engine.generate(prompts, sampling(num_tokens, case["end_tokens"]), use_tqdm=False)


def measure(engine, job: dict, case: dict) -> dict:
    # Limit the engine to the slots of the case, even if it was built for more.
    scheduler = engine.llm_engine.engine_core.engine_core.scheduler
    limit = "max_num_active_reqs" if hasattr(scheduler, "max_num_active_reqs") else "max_num_running_reqs"
    setattr(scheduler, limit, case["slots"])
    warm_up(engine, job, case)
    rates: list[float] = []
    until = time.perf_counter() + job["seconds"]
    while not rates or (len(rates) < job["repeats"] and time.perf_counter() < until):
        prompts = make_prompts(job, case, seed=len(rates) + 1)
        started = time.perf_counter()
        outputs = engine.generate(prompts, sampling(case["new_tokens"], case["end_tokens"]), use_tqdm=False)
        seconds = time.perf_counter() - started
        lengths = [len(output.outputs[0].token_ids) for output in outputs]
        rates.append(sum(lengths) / seconds)
        if not case["end_tokens"] and {*lengths} != {case["new_tokens"]}:
            raise RuntimeError(f"vLLM must generate {case['new_tokens']} tokens each, got {sorted({*lengths})}.")
        if not all(len(output.outputs[0].logprobs) == count for output, count in zip(outputs, lengths, strict=True)):
            raise RuntimeError("vLLM did not return the log-prob of every token.")
    return {
        "case": case["name"],
        "tokens_per_second": statistics.median(rates),
        "rates": rates,
        "mean_tokens": statistics.mean(lengths),
    }


def report(result: dict) -> None:
    print(f"\n{RESULT}{json.dumps(result)}", flush=True)


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    try:
        import vllm
    except ImportError as error:
        report({"left_out": f"vllm cannot be imported ({error})"})
        return
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="coati-vllm-") as folder:
        engine = make_engine(job, folder)
    report({"version": vllm.__version__, "start_seconds": time.perf_counter() - started})
    warm_up(engine, job, job["cases"][0])
    wait_for_turn(os.environ.get(TURN))
    for case in job["cases"]:
        report(measure(engine, job, case))


if __name__ == "__main__":
    main()

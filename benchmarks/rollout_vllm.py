"""vLLM's part of `rollout.py`: one engine for every batch size, in a separate process without coati.

    python -P benchmarks/rollout_vllm.py JOB.json

`rollout_peers.py` writes the job and starts the process. Each result is a line of JSON behind `RESULT`, because vLLM's
own log goes to the same stream. A prompt is a list of token ids, and vLLM returns token ids: no tokenizer is loaded.
"""

import json
import sys
import time
from pathlib import Path

RESULT = "rollout_vllm result: "
ROWS_RETURNED = 16


def make_engine(job):
    from vllm import LLM

    return LLM(
        job["model"],
        dtype=job["dtype"],
        skip_tokenizer_init=True,
        generation_config="vllm",
        enable_prefix_caching=job["has_groups"],
        max_model_len=job["prompt_tokens"] + job["new_tokens"],
        max_num_seqs=job["slots"],
        gpu_memory_utilization=job["memory_share"],
        # Its default stops at 512, and larger batches would decode without graphs.
        compilation_config={"max_cudagraph_capture_size": max(512, job["slots"])},
    )


def sampling(num_tokens: int, end_tokens: list[int]):
    """Log-probs of the drawn token only, in flat lists: the cheapest form that vLLM has for them."""
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


def measure(engine, job, case) -> dict:
    """The first batch of prompts is the warm-up, and a short one: graphs are captured when the engine starts."""
    batches = [[{"prompt_token_ids": ids} for ids in prompts] for prompts in case["prompts"]]
    engine.generate(batches[0], sampling(job["warmup_tokens"], job["end_tokens"]), use_tqdm=False)
    rates = []
    for prompts in batches[1:]:
        started = time.perf_counter()
        outputs = engine.generate(prompts, sampling(job["new_tokens"], job["end_tokens"]), use_tqdm=False)
        seconds = time.perf_counter() - started
        rates.append(sum(len(output.outputs[0].token_ids) for output in outputs) / seconds)
    completions = [output.outputs[0] for output in outputs]
    lengths = {len(completion.token_ids) for completion in completions}
    if not job["end_tokens"] and lengths != {job["new_tokens"]}:
        raise RuntimeError(
            f"vLLM was to write {job['new_tokens']} tokens for every prompt, and wrote {sorted(lengths)}."
        )
    return {
        "batch": case["batch"],
        "rates": rates,
        "tokens": [list(completion.token_ids) for completion in completions[:ROWS_RETURNED]],
        "log_probs": [list(completion.logprobs.logprobs) for completion in completions[:ROWS_RETURNED]],
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
    engine = make_engine(job)
    report({"version": vllm.__version__, "start_seconds": time.perf_counter() - started})
    for case in job["cases"]:
        report(measure(engine, job, case))


if __name__ == "__main__":
    main()

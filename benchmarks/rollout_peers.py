"""The competitors in `rollout.py` that are not ours: transformers' static cache with a compiled step, and vLLM."""

import contextlib
import dataclasses
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from rollout_vllm import RESULT

WARMUP_TOKENS = 16
VLLM_DEADLINE_SECONDS = 300.0
VLLM_MEMORY_SHARE = 0.5
"""Of the GPU. Ours holds a model and no cache while vLLM runs; the largest case needs about 5 GB of cache."""
VLLM_ENVIRONMENT = {
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
"""What a machine without a network needs. A variable that is set already stays as it is."""


class StaticEngine:
    """transformers' `generate` with a static cache, whose decode step it compiles (CUDA graphs on a GPU).

    The draws are torch's, not keyed by sample. Compiled steps are made for the shapes of the first call and dropped
    by `close`, so that every batch size gets what a process of its own would get, and not a step for any shape.
    """

    def __init__(self, model) -> None:
        self._model = model

    @torch.no_grad()
    def generate(self, request):
        from transformers import LogitsProcessorList

        from coati.experience import Experience

        drawn = _DrawnLogProbs()
        input_ids = torch.tensor([sample.tokens for sample in request], device=self._model.device)
        prompt_tokens = input_ids.shape[1]
        with _generation_config(self._model, request[0].limit) as config:
            sequences = self._model.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                generation_config=config,
                logits_processor=LogitsProcessorList([drawn]),
            )
        responses = sequences[:, prompt_tokens:]
        log_probs = drawn.finish(sequences)
        nothing = torch.zeros_like(log_probs)
        return Experience(
            sequences=sequences,
            action_log_probs=log_probs,
            values=nothing,
            reward=nothing[:, 0],
            kl=nothing,
            advantages=nothing,
            attention_mask=torch.ones_like(sequences),
            action_mask=torch.ones_like(responses, dtype=torch.bool),
            is_cut=torch.ones(len(sequences), dtype=torch.bool, device=sequences.device),
            policy_versions=torch.zeros_like(responses),
        )

    def close(self) -> None:
        torch.compiler.reset()


class _DrawnLogProbs:
    """A logits processor that changes nothing and keeps the log-prob of each token that was drawn.

    The token is known one step later, as the last of the ids: until then the step's scores are kept.
    """

    def __init__(self) -> None:
        self._scores = None  # [B, V] float32, of the last step
        self._log_probs: list[torch.Tensor] = []

    def __call__(self, input_ids, scores):
        self._take(input_ids)
        self._scores = scores
        return scores

    def finish(self, sequences):
        """log-probs of all drawn tokens, [B, A]."""
        self._take(sequences)
        return torch.stack(self._log_probs, dim=1)

    def _take(self, input_ids) -> None:
        if self._scores is not None:
            tokens = input_ids[:, -1:]
            drawn = self._scores.gather(1, tokens).squeeze(1)
            self._log_probs.append(drawn - self._scores.logsumexp(dim=1))


@contextlib.contextmanager
def _generation_config(model, new_tokens: int):
    """Temperature 1, nothing cut, no end-of-sequence token. The model's own config would fill in what is left open."""
    from transformers import CompileConfig, GenerationConfig

    config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=new_tokens,
        pad_token_id=0,
        cache_implementation="static",
    )
    if model.device.type == "cpu":
        # `generate` compiles by itself on GPUs only.
        config.compile_config = CompileConfig(mode="default")
        config.compile_config._compile_all_devices = True
    saved = model.generation_config
    model.generation_config = config
    try:
        yield config
    finally:
        model.generation_config = saved


def run_vllm(model, requests_by_batch: dict, slots: int, site: Path | None) -> tuple[dict[int, tuple], str]:
    """vLLM's median rate, rollout (its first rows) and start by batch size; and the reason for those missing."""
    with tempfile.TemporaryDirectory(prefix="coati-vllm-") as folder:
        model.save_pretrained(folder)
        job = Path(folder) / "job.json"
        job.write_text(json.dumps(vllm_job(model, requests_by_batch, slots, folder)))
        log, ended = _run_to_log(job, site)
    measured, left_out = read_results(log, ended)
    if len(measured) < len(requests_by_batch) and "cannot be imported" not in left_out:
        print("\n".join(log.splitlines()[-30:]), file=sys.stderr)
    results = {}
    for batch, result in measured.items():
        start = {name: result[name] for name in ("version", "start_seconds")}
        rollout = vllm_rollout(requests_by_batch[batch][-1], result, model.device)
        results[batch] = (statistics.median(result["rates"]), rollout, start)
    return results, left_out


def vllm_job(model, requests_by_batch: dict, slots: int, folder: str) -> dict:
    requests = next(iter(requests_by_batch.values()))
    first = requests[0][0]
    prompts = [sample.tokens for sample in requests[0]]
    return {
        "model": folder,
        "dtype": str(model.dtype).removeprefix("torch."),
        "prompt_tokens": len(first.tokens),
        "new_tokens": first.limit,
        "warmup_tokens": min(WARMUP_TOKENS, first.limit),
        "end_tokens": list(first.options.eos_token_id),
        "slots": slots,
        "has_groups": len({*map(tuple, prompts)}) < len(prompts),
        "memory_share": VLLM_MEMORY_SHARE,
        "cases": [
            {"batch": batch, "prompts": [[sample.tokens for sample in request] for request in requests]}
            for batch, requests in requests_by_batch.items()
        ],
    }


def vllm_environment(site: Path | None) -> dict[str, str]:
    environment = {**VLLM_ENVIRONMENT, **os.environ}
    if site is not None:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    return environment


def _run_to_log(job: Path, site: Path | None) -> tuple[str, str]:
    """What the process printed, both streams, and how it ended."""
    script = Path(__file__).with_name("rollout_vllm.py")
    command = [sys.executable, "-P", str(script), str(job)]
    path = job.with_name("log.txt")
    with path.open("w") as stream:
        try:
            code = subprocess.run(
                command,
                env=vllm_environment(site),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                timeout=VLLM_DEADLINE_SECONDS,
                check=False,
            ).returncode
            ended = f"its process ended with status {code}"
        except subprocess.TimeoutExpired:
            ended = f"it did not finish in {VLLM_DEADLINE_SECONDS:.0f} s"
    return path.read_text(errors="replace"), ended


def read_results(log: str, ended: str) -> tuple[dict[int, dict], str]:
    """Results by batch size, each with how the engine started; and the reason for those that are missing."""
    lines = [json.loads(line.removeprefix(RESULT)) for line in log.splitlines() if line.startswith(RESULT)]
    if lines and "left_out" in lines[0]:
        return {}, lines[0]["left_out"]
    measured = {line["batch"]: {**lines[0], **line} for line in lines[1:]}
    errors = [line.strip() for line in log.splitlines() if re.match(r"\s*[\w.]*(Error|Exception): ", line)]
    return measured, f"{ended}: {errors[-1]}" if errors else ended


def vllm_rollout(request, result: dict, device):
    """What vLLM wrote, in the form that our engines return."""
    from coati.batching import pad_samples

    rows = zip(request, result["tokens"], result["log_probs"], strict=False)  # of some it has not told
    written = [
        dataclasses.replace(
            sample,
            response=torch.tensor(tokens),
            log_probs=torch.tensor(log_probs),
            versions=torch.zeros(len(tokens), dtype=torch.long),
            is_cut=len(tokens) == sample.limit,
        )
        for sample, tokens, log_probs in rows
    ]
    return pad_samples(written, pad_token=0, device=device)

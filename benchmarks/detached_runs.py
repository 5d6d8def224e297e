"""Shared by benchmarks of whole detached runs: random models of any size, runs with them, and timings from spans."""

import dataclasses
import json
import random
import statistics
import subprocess
import sys
from pathlib import Path

from checked import quiet_libraries

from coati.config import RunSettings, build_config
from coati.demo.grammar import PROMPTS
from coati.monitor import RunLog
from coati.monitor.report import read_run
from coati.monitor.timeline import Span

# A program that reports when it is ready, waits for a line, and then prints how often it loops in the given seconds.
_SPIN = """
import sys, time
print("ready", flush=True)
input()
end, count = time.monotonic() + float(sys.argv[1]), 0
while time.monotonic() < end:
    count += 1
print(count)
"""


def machine_gain(processes: int, *, seconds: float = 1.0, repeats: int = 3) -> float:
    """Measure the speedup of `processes` busy processes over one: at most the number of idle cores."""

    def rounds(count: int) -> int:
        command = [sys.executable, "-c", _SPIN, str(seconds)]
        started = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(count)
        ]
        for process in started:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n", "a busy process did not start"
        for process in started:  # start them together
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        return sum(int(process.communicate(timeout=60 + seconds)[0]) for process in started)

    return statistics.median(rounds(processes) / rounds(1) for _ in range(repeats))


def reward(completions: list[str], **_: object) -> list[float]:
    """Return a reward that costs nothing to compute."""
    return [float(len(text) % 7) for text in completions]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """A model, its batches and its device. Responses always have `new_tokens` tokens."""

    hidden: int = 64
    layers: int = 2
    inner: int = 0
    """Width of the feed-forward layers; 0 = twice `hidden`."""
    kv_heads: int = 0
    """0 = the number of heads."""
    vocabulary: int = 0
    """0 = the tokenizer's vocabulary size. Otherwise input and output embeddings are tied, as in small models."""
    prompt_tokens: int = 8
    new_tokens: int = 16
    batch: int = 64
    """Samples per training step, divided among the makers of a run."""
    micro_batch: int = 0
    """Samples per pass of the learner; 0 = the whole batch."""
    steps: int = 24
    device: str = "cpu"
    dtype: str = "float32"
    trainer_share: float = 0.5
    seed: int = 0

    def save_model(self, folder: Path) -> Path:
        """Save random weights and the demo's tokenizer as a transformers folder."""
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        from coati.demo.base_model import build_tokenizer

        path = folder / f"model-{self.hidden}-{self.layers}-{self.inner}-{self.kv_heads}-{self.vocabulary}"
        if not path.exists():
            torch.manual_seed(self.seed)
            tokenizer = build_tokenizer()
            heads = max(4, self.hidden // 64)
            config = LlamaConfig(
                vocab_size=self.vocabulary or len(tokenizer),
                hidden_size=self.hidden,
                intermediate_size=self.inner or 2 * self.hidden,
                num_hidden_layers=self.layers,
                num_attention_heads=heads,
                num_key_value_heads=self.kv_heads or heads,
                max_position_embeddings=4096,
                tie_word_embeddings=self.vocabulary > 0,
                **{f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")},
            )
            tokenizer.model_max_length = config.max_position_embeddings
            LlamaForCausalLM(config).to(getattr(torch, self.dtype)).save_pretrained(path)
            tokenizer.save_pretrained(path)
        return path

    def prompts(self) -> list[str]:
        """Return one prompt of random words per sample of a batch, so that no two share a prefix."""
        draw = random.Random(self.seed)
        words = sorted({word for prompt in PROMPTS for word in prompt.split()})
        return [" ".join(draw.choices(words, k=max(2, self.prompt_tokens))) for _ in range(self.batch)]

    def config(self, folder: Path, *, makers: int, staleness: int) -> RunSettings:
        """Return the settings of one run. Nothing is meant to be learned."""
        prompts = folder / "prompts.jsonl"
        prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in self.prompts()))
        on_gpu = self.device == "cuda"
        return build_config(
            {
                "run": {"name": "bench", "seed": self.seed, "output": str(folder / "out")},
                "model": {"path": str(self.save_model(folder)), "device": self.device, "dtype": self.dtype},
                "prompts": {"path": str(prompts)},
                "reward": {"function": "detached_runs:reward", "search_paths": [str(Path(__file__).parent)]},
                "rollout": {
                    "prompts_per_batch": self.batch // makers,
                    "max_new_tokens": self.new_tokens,
                    "generate": {"eos_token_id": [], "pad_token_id": 0},
                },
                "train": {
                    "total_steps": self.steps,
                    "batch_size": self.batch,
                    "micro_batch_size": self.micro_batch,
                },
                "topology": {
                    "makers": makers,
                    "max_staleness": staleness,
                    "threads_per_actor": 0 if on_gpu else 1,
                    "gpus_per_maker": (1 - self.trainer_share) / makers if on_gpu else 0.0,
                    "gpus_per_trainer": self.trainer_share if on_gpu else 0.0,
                },
                "logging": {"tensorboard": False, "samples_kept": 0},
            }
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """The steady part of a run: from the end of the last warm-up step to the end of the last step."""

    seconds: float
    steps: int
    samples: int
    spent: dict[str, dict[str, float]]
    """Seconds of each activity in this part, by actor."""

    @property
    def seconds_per_step(self) -> float:
        return self.seconds / self.steps

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.seconds

    def work_per_step(self, actor: str) -> float:
        """Return the seconds per step in which an actor did not wait."""
        return sum(s for what, s in self.spent[actor].items() if not what.startswith("wait_")) / self.steps


def run(workload: Workload, folder: Path, *, makers: int = 1, staleness: int = 1, warmup: int = 4) -> Measured:
    """Train once on a private Ray and measure times from the spans."""
    from coati.ray.launcher import DetachedRun

    quiet_libraries()
    here = folder / f"run-{makers}-{staleness}-{len(list(folder.iterdir()))}"
    here.mkdir()
    log = RunLog(
        here,
        total_steps=workload.steps,
        max_spans=1_000_000,
    )
    DetachedRun(workload.config(folder, makers=makers, staleness=staleness), log).run(str(here / "model"))
    log.flush()
    return measure(read_run(here).spans, batch=workload.batch, warmup=warmup)


def measure(by_actor: dict[str, list[Span]], *, batch: int, warmup: int) -> Measured:
    """Sum up times per activity, without the warm-up."""
    steps = sorted(span.end for span in by_actor["trainer-0"] if span.what == "train")
    start, end = steps[warmup - 1], steps[-1]
    spent = {actor: seconds_spent(spans, start, end) for actor, spans in by_actor.items()}
    num_steps = len(steps) - warmup
    return Measured(seconds=end - start, steps=num_steps, samples=num_steps * batch, spent=spent)


def seconds_spent(spans: list[Span], start: float, end: float) -> dict[str, float]:
    """Return the seconds of each activity between `start` and `end`."""
    spent: dict[str, float] = {}
    for span in spans:
        seconds = min(span.end, end) - max(span.start, start)
        if seconds > 0:
            spent[span.what] = spent.get(span.what, 0.0) + seconds
    return spent

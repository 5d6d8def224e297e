"""Completions per second that are generated, scored and trained on: coati and TRL's GRPO, in one run.

    python benchmarks/end_to_end.py                            the demo's model and reward on the CPU
    python benchmarks/end_to_end.py --device cuda              Qwen2's shape of 0.5B, 128 + 256 tokens, bfloat16
    python benchmarks/end_to_end.py --device cuda --shape 1.5b --prompt-tokens 512 --new-tokens 2048 --mean-length 490
                                                               the same with 1.5B and responses of ragged lengths

Every competitor trains the same model on the same prompts with the same reward, batch, lengths and learning rate, in
separate processes, one after the other, `--rounds` times over; the table has the median. The first `--warmup` steps
are not counted: they start processes, compile and fill caches. coati takes one step more, which is not counted either:
nothing is written beside it, so it is quicker.

    coati-grpo    detached: a maker and a trainer, data at most one version old; KL against the reference in the loss
    coati-ppo     the same with a critic, which TRL's GRPO does not have; on a GPU the score comes from a reward model
    coati-lead2   coati-ppo with data at most 2 versions old, and 2 batches generated at a time
    coati-lead3   coati-ppo with data at most 3 versions old, and 3 batches generated at a time
    coati-grpo-lead3   coati-grpo with the same
    coati-vllm    coati-ppo whose maker generates with vLLM (vLLM must be installed; GPU only)
    trl-vllm      TRL's GRPOTrainer with vLLM in its process, log-probs returned (TRL and vLLM must be; GPU only)
    trl-grpo      TRL's GRPOTrainer with transformers' generate and the same KL term (TRL must be installed)
    trl-tuned     the same after `coati.devices.set_up_cpu`, which helps every torch program on some CPUs (CPU only)

On a GPU hardly any response ends early (the weights are random), unless `--mean-length` makes so many tokens end one
that lengths are geometric: the same for all, in the model's generation config. coati runs with
`train.compile = true` (its warm-up steps include compiling), and the peak memory is what nvidia-smi shows. vLLM gets as
much memory for its cache as the batch needs. With `--lora-rank` coati trains adapters, with a reward function.

Below the table stands what coati's actors spent a counted step on, so a limit can be read off.
"""

import argparse
import functools
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from checked import below_one, check_device, one_or_more, zero_or_more
from rollout_vllm import TURN, cache_bytes, vllm_environment, wait_for_turn

ONLY_ON = {"trl-tuned": "cpu", "coati-vllm": "cuda", "trl-vllm": "cuda"}
LEADS = {"coati-grpo-lead3": 3, "coati-lead2": 2, "coati-lead3": 3}
COMPETITORS = ("coati-grpo", "coati-ppo", *LEADS, "trl-grpo", *ONLY_ON)
SHAPES = ["demo", "0.5b", "1.5b", "7b", "tiny"]
FIRST_END = 2  # 0 is padding, 1 the tokenizer's end
SAMPLES_PER_PROMPT = 8
KL_COEF = 0.05
RESULT = "end_to_end result: "
SPENT = "ms of a step: "


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--competitors", nargs="+", choices=COMPETITORS)
    parser.add_argument("--steps", type=one_or_more, help="default: 120, on a GPU 15")
    parser.add_argument("--warmup", type=one_or_more, help="default: 40, on a GPU 5")
    parser.add_argument(
        "--trl-steps", type=one_or_more, help="default: as many as the others; a step of TRL's takes long"
    )
    parser.add_argument("--trl-warmup", type=one_or_more, help="default: as many as the others")
    parser.add_argument("--batch", type=one_or_more, default=64)
    parser.add_argument("--trl-micro-batch", type=one_or_more, help="samples in a pass of TRL's; default: the batch")
    parser.add_argument(
        "--shape", choices=SHAPES, help="of the model, as Qwen2.5 has it; default: the demo's model, on a GPU 0.5b"
    )
    parser.add_argument("--prompt-tokens", type=one_or_more, default=128, help="not with the demo's model")
    parser.add_argument("--new-tokens", type=one_or_more, help="the longest response; default: 256, on a CPU 16")
    parser.add_argument(
        "--mean-length", type=one_or_more, help="of responses without that limit; default: all reach it"
    )
    parser.add_argument("--rounds", type=one_or_more, default=3)
    parser.add_argument("--threads", type=one_or_more, default=2, help="of TRL on a CPU; coati's actors have one each")
    parser.add_argument("--places", type=one_or_more, default=2, help="batches that coati's maker writes at a time")
    parser.add_argument("--makers", type=one_or_more, default=1, help="of coati")
    parser.add_argument("--trainer-share", type=below_one, default=0.5, help="of a GPU, for coati's trainer")
    parser.add_argument(
        "--mixed-precision",
        choices=["true", "false"],
        default="false",
        help="float32 weights on a GPU, of all competitors",
    )
    parser.add_argument("--lora-rank", type=zero_or_more, default=0, help="of coati's adapters; 0: all weights")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for one run of one competitor")
    parser.add_argument("--vllm-site", type=Path, help="folder with vLLM, if it is not in this environment")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", choices=COMPETITORS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    is_gpu = arguments.device == "cuda"
    arguments.shape = arguments.shape or ("0.5b" if is_gpu else "demo")
    arguments.steps = arguments.steps or (15 if is_gpu else 120)
    arguments.warmup = (5 if is_gpu else 40) if arguments.warmup is None else arguments.warmup
    arguments.new_tokens = arguments.new_tokens or (256 if is_gpu else 16)
    arguments.trl_steps = arguments.trl_steps or arguments.steps
    arguments.trl_warmup = arguments.warmup if arguments.trl_warmup is None else arguments.trl_warmup
    if not (0 < arguments.warmup < arguments.steps and 0 < arguments.trl_warmup < arguments.trl_steps):
        parser.error("--warmup must be 1 or more and below --steps, and so must --trl-warmup and --trl-steps")
    if arguments.only:
        run_one(arguments)
        return
    if arguments.folder:
        prepare(arguments.folder, arguments)
        return
    names = competitors(arguments, parser)
    with tempfile.TemporaryDirectory(prefix="coati-end-to-end-") as folder:
        prepare(Path(folder), arguments)
        results: dict[str, list[dict[str, float]]] = {name: [] for name in names}
        for number in range(arguments.rounds):
            for name in names:
                result = measured(name, Path(folder), arguments)
                results[name].append(result)
                print(f"round {number + 1} {name:>12}: {said(result)}", flush=True)
    report(results, arguments)


def said(result: dict[str, float]) -> str:
    return (
        f"{result['completions_per_second']:,.1f} completions/s, {result['tokens_per_second']:,.0f} tokens/s, "
        f"{result['ms_per_step']:,.0f} ms a step, {result['peak_gib']:.1f} GiB"
    )


def competitors(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> list[str]:
    """Who takes part: those that were asked for, or all that can run here."""
    asked = arguments.competitors or COMPETITORS
    elsewhere = [name for name in asked if ONLY_ON.get(name, arguments.device) != arguments.device]
    if arguments.competitors and elsewhere:
        parser.error(f"{', '.join(elsewhere)} cannot run with --device {arguments.device}")
    check_device(parser, arguments.device)
    names = [name for name in asked if name not in elsewhere]
    if any("vllm" in name for name in names) and not (arguments.vllm_site or importlib.util.find_spec("vllm")):
        print("vLLM is not installed, so rows with it are left out", flush=True)
        names = [name for name in names if "vllm" not in name]
    if importlib.util.find_spec("trl") is None and any(name.startswith("trl") for name in names):
        print("TRL is not installed (pip install trl==1.16), so its rows are left out", flush=True)
        names = [name for name in names if not name.startswith("trl")]
    return names


def report(results: dict[str, list[dict[str, float]]], arguments: argparse.Namespace) -> None:
    medians = {
        name: {key: statistics.median(run.get(key, 0.0) for run in runs) for key in runs[0]}
        for name, runs in results.items()
    }
    peers = [row["completions_per_second"] for name, row in medians.items() if name.startswith("trl")]
    print(f"\n{'':>12} {'completions/s':>14} {'tokens/s':>10} {'ms/step':>8} {'× TRL':>6} {'peak GiB':>9}")
    for name, row in medians.items():
        if peers:
            row["times_trl"] = row["completions_per_second"] / max(peers)
        times = f"{row['times_trl']:.2f}" if peers else "-"
        peak = f"{row['peak_gib']:.1f}" if arguments.device == "cuda" else "-"
        print(
            f"{name:>12} {row['completions_per_second']:>14,.0f} {row['tokens_per_second']:>10,.0f} "
            f"{row['ms_per_step']:>8.1f} {times:>6} {peak:>9}"
        )
    for name, row in medians.items():
        spent = {key.removeprefix(SPENT): value for key, value in row.items() if key.startswith(SPENT) and value >= 0.5}
        if spent:
            print(f"{name}, ms of a step:", ", ".join(f"{what} {value:,.0f}" for what, value in spent.items()))
    print("× TRL: over the faster of TRL's rows")
    if arguments.json:
        arguments.json.write_text(json.dumps({"medians": medians, "rounds": results}, indent=2) + "\n")


def measured(name: str, folder: Path, arguments: argparse.Namespace) -> dict[str, float]:
    """One run of one competitor, in a process of its own."""
    command = [sys.executable, __file__, "--only", name, "--folder", str(folder), "--device", arguments.device]
    passed_on = ("batch", "threads", "trainer_share", "mixed_precision", "shape", "prompt_tokens", "new_tokens")
    options = {option: getattr(arguments, option) for option in (*passed_on, "lora_rank", "places", "makers")}
    if arguments.trl_micro_batch:
        options["trl_micro_batch"] = arguments.trl_micro_batch
    is_trl = name.startswith("trl")
    options["steps"] = arguments.trl_steps if is_trl else arguments.steps
    options["warmup"] = arguments.trl_warmup if is_trl else arguments.warmup
    for option, value in options.items():
        command += [f"--{option.replace('_', '-')}", str(value)]
    environment = vllm_environment(arguments.vllm_site) if "vllm" in name else None
    log = folder / f"{name}.log"
    with PeakMemory(is_gpu=arguments.device == "cuda") as memory, log.open("w") as sink:
        done = subprocess.run(
            command, env=environment, stdout=sink, stderr=subprocess.STDOUT, timeout=arguments.timeout, check=False
        )
    lines = log.read_text(errors="replace").splitlines()
    results = [line for line in lines if line.startswith(RESULT)]
    if done.returncode or not results:
        raise SystemExit(f"{name} failed:\n" + "\n".join(lines[-30:]))
    return {**json.loads(results[-1].removeprefix(RESULT)), "peak_gib": memory.peak_gib}


class PeakMemory:
    """The most memory that the card had in use, by nvidia-smi; 0 without a card."""

    def __init__(self, *, is_gpu: bool) -> None:
        self.peak_gib = 0.0
        self._is_gpu = is_gpu
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "PeakMemory":
        if self._is_gpu:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        if self._is_gpu:
            self._thread.join()

    def _watch(self) -> None:
        command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
        while not self._done.wait(0.25):
            found = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
            self.peak_gib = max(self.peak_gib, float(found.split()[0]) / 1024)


# What all of them train.


def prepare(folder: Path, arguments: argparse.Namespace) -> None:
    """Model, prompts and, unless the model is the demo's, a reward model."""
    if arguments.shape != "demo":
        prepare_large(folder, arguments)
        return
    from coati.demo.base_model import pretrain
    from coati.demo.grammar import PROMPTS

    pretrain(folder / "model")
    write_prompts(folder, PROMPTS)


def prepare_large(folder: Path, arguments: argparse.Namespace) -> None:
    """A model of Qwen2's shape with random weights, a tokenizer of whole words, and prompts of them."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen2Config

    from coati.models import RewardModel

    shape = qwen2_shape(arguments)
    words = {"<pad>": 0, "<end>": 1} | {f"w{index}": index for index in range(FIRST_END, shape["vocab_size"])}
    backend = Tokenizer(models.WordLevel(vocab=words, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<end>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, padding_side="left", **special)
    torch.manual_seed(0)
    # A body each: one that both had would be run once for both.
    for name in ("model",) if arguments.lora_rank else ("model", "reward"):
        with torch.device(arguments.device):
            model = AutoModelForCausalLM.from_config(Qwen2Config(**shape), dtype=torch.bfloat16)
        # Chances are nearly equal, so this many end tokens give that mean.
        num_ends = round(len(words) / arguments.mean_length) if arguments.mean_length else 0
        model.generation_config.eos_token_id = list(range(FIRST_END, FIRST_END + num_ends)) or None
        model.config.eos_token_id = None
        saved = RewardModel(model.model) if name == "reward" else model
        saved.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)  # for vLLM, which is given tokens
    # Beside a model's config, AutoTokenizer would take the words for the pieces of Qwen2's own tokenizer.
    tokenizer.save_pretrained(folder / "tokenizer")
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(FIRST_END, len(words), (256, arguments.prompt_tokens), generator=generator).tolist()
    prompts = [" ".join(f"w{token}" for token in row) for row in ids]
    assert AutoTokenizer.from_pretrained(folder / "tokenizer")(prompts).input_ids == ids
    write_prompts(folder, prompts)


def qwen2_shape(arguments: argparse.Namespace) -> dict:
    from rollout import QWEN2

    return next(shape for name, shape in QWEN2.items() if name.lower() == arguments.shape)


def vllm_cache(arguments: argparse.Namespace) -> dict[str, float]:
    """vLLM's settings for its cache: all that a batch needs, whatever else is on the card."""
    tokens = (arguments.places * arguments.batch + 1) * (arguments.prompt_tokens + arguments.new_tokens + 16)
    size = max(2**30, cache_bytes(qwen2_shape(arguments), tokens))
    return {"kv_cache_memory_bytes": size, "gpu_memory_utilization": 0.05}


def write_prompts(folder: Path, prompts: list[str]) -> None:
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))


def even_share(completions, **_: object) -> list[float]:
    """A reward that costs nothing: the share of words with an even number."""
    return [sum(word[-1] in "02468" for word in text.split()) / max(1, len(text.split())) for text in completions]


# One competitor.


def run_one(arguments: argparse.Namespace) -> None:
    run = run_trl if arguments.only.startswith("trl") else run_coati
    seconds, tokens, spent = run(arguments)
    steps = arguments.steps - arguments.warmup
    result = {
        "completions_per_second": steps * arguments.batch / seconds,
        "tokens_per_second": steps * arguments.batch * tokens / seconds,
        "ms_per_step": seconds / steps * 1e3,
        "tokens_per_completion": tokens,
        **{f"{SPENT}{what}": share / steps * 1e3 for what, share in spent.items()},
    }
    print(f"\n{RESULT}{json.dumps(result)}", flush=True)


def run_coati(arguments: argparse.Namespace) -> tuple[float, float, dict[str, float]]:
    """Seconds of the counted steps, tokens in a completion, and what actors did in these seconds."""
    from detached_runs import seconds_spent

    import coati
    from coati.monitor import read_jsonl
    from coati.monitor.report import read_run

    folder = arguments.folder
    output = folder / arguments.only
    shutil.rmtree(output, ignore_errors=True)
    config = folder / f"{arguments.only}.toml"
    config.write_text(coati_settings(arguments, output))
    coati.train(config, learner=turn_taking_learner(arguments.warmup) if TURN in os.environ else None)
    spans = read_run(output).spans
    # When the trainer was done with each step, by its own clock.
    ends = [span.end for span in spans["trainer-0"] if span.what == "train"]
    counted = slice(arguments.warmup, arguments.steps)
    assert len(ends) == arguments.steps + 1, f"{len(ends)} training steps were recorded, not {arguments.steps + 1}"
    tokens = [row["train/tokens"] / arguments.batch for row in read_jsonl(output / "metrics.jsonl")[counted]]
    start, end = ends[arguments.warmup - 1], ends[arguments.steps - 1]
    spent = {
        f"{actor} {what}": seconds
        for actor, own in spans.items()
        for what, seconds in seconds_spent(own, start, end).items()
    }
    return end - start, statistics.mean(tokens), spent


def turn_taking_learner(warmup: int) -> type:
    """A learner that waits for its turn before the last steps of the warm-up."""
    import coati

    turn = os.environ[TURN]

    class TurnTakingLearner(coati.PPOLearner):
        num_steps = 0

        def step(self, experience):
            self.num_steps += 1
            if self.num_steps == max(1, warmup - 2):
                wait_for_turn(turn)
            return super().step(experience)

    return TurnTakingLearner


def coati_settings(arguments: argparse.Namespace, output: Path) -> str:
    is_gpu, is_large, is_ppo = arguments.device == "cuda", arguments.shape != "demo", "grpo" not in arguments.only
    lead = LEADS.get(arguments.only, 1)
    places = max(arguments.places, lead)
    engine = ""
    if arguments.only == "coati-vllm":
        longest = arguments.prompt_tokens + arguments.new_tokens
        options = {**vllm_cache(arguments), "max_num_seqs": places * arguments.batch, "max_model_len": longest}
        table = ", ".join(f"{name} = {value}" for name, value in options.items())
        engine = f'engine = "vllm"\nvllm = {{ {table} }}'
    reward = '[reward]\nfunction = "coati.demo.reward:film_sentiment"'
    if is_large:
        reward = f'[reward]\nmodel = "{arguments.folder}/reward"'
        if not is_ppo or arguments.lora_rank:
            reward = f'[reward]\nfunction = "end_to_end:even_share"\nsearch_paths = ["{Path(__file__).parent}"]'
    return f"""
[run]
output = "{output}"

[model]
path = "{arguments.folder}/model"
tokenizer = "{arguments.folder}/{"tokenizer" if is_large else "model"}"
device = "{arguments.device}"
dtype = "{"bfloat16" if is_gpu else "float32"}"

[prompts]
path = "{arguments.folder}/prompts.jsonl"

{reward}

[rollout]
prompts_per_batch = {places * arguments.batch // arguments.makers // SAMPLES_PER_PROMPT}
samples_per_prompt = {SAMPLES_PER_PROMPT}
max_new_tokens = {arguments.new_tokens}
{engine}

[algorithm]
name = "{"ppo" if is_ppo else "grpo"}"
kl_coef = {KL_COEF}

[train]
total_steps = {arguments.steps + 1}
batch_size = {arguments.batch}
actor_lr = {1e-6 if is_large else 1e-3}
critic_lr = {1e-6 if is_large else 1e-3}
compile = {"true" if is_gpu and not arguments.lora_rank else "false"}
activation_checkpointing = {"true" if arguments.lora_rank else "false"}
mixed_precision = {arguments.mixed_precision if is_gpu else "false"}

[topology]
makers = {arguments.makers}
lead = {lead}
max_staleness = {lead}
gpus_per_maker = {1 - arguments.trainer_share if is_gpu else 0}
gpus_per_trainer = {arguments.trainer_share if is_gpu else 0}

[lora]
rank = {arguments.lora_rank}

[logging]
tensorboard = false
samples_kept = 0
"""


def run_trl(arguments: argparse.Namespace) -> tuple[float, float, dict[str, float]]:
    """The same for TRL."""
    os.environ.setdefault("WANDB_MODE", "disabled")
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from coati.demo.reward import film_sentiment
    from coati.devices import set_up_cpu

    is_gpu, is_large, uses_vllm = arguments.device == "cuda", arguments.shape != "demo", arguments.only == "trl-vllm"
    if not is_gpu and arguments.only == "trl-tuned":
        set_up_cpu(arguments.threads)
    elif not is_gpu:
        torch.set_num_threads(arguments.threads)
    times: dict[int, float] = {}
    lengths: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, args, state, control, **_: object) -> None:  # noqa: ARG002
            if is_gpu:
                torch.cuda.synchronize()
            times[state.global_step] = time.perf_counter()

    def reward(completions, prompts, completion_ids, **_: object) -> list[float]:
        lengths.append(statistics.mean(len(ids) for ids in completion_ids))
        return even_share(completions) if is_large else film_sentiment(completions, prompts)

    if uses_vllm:
        from trl.generation import vllm_generation

        # Settings that TRL does not pass on.
        vllm_generation.LLM = functools.partial(vllm_generation.LLM, **vllm_cache(arguments))
    folder = arguments.folder
    passes = arguments.batch // (arguments.trl_micro_batch or arguments.batch)
    dtype = torch.bfloat16 if is_gpu and arguments.mixed_precision == "false" else torch.float32
    prompts = [json.loads(line)["prompt"] for line in (folder / "prompts.jsonl").read_text().splitlines()]
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "model", dtype=dtype),
        processing_class=AutoTokenizer.from_pretrained(folder / ("tokenizer" if is_large else "model")),
        reward_funcs=reward,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        args=GRPOConfig(
            output_dir=str(folder / "trl"),
            use_cpu=not is_gpu,
            bf16=is_gpu,
            per_device_train_batch_size=arguments.batch // passes,
            gradient_accumulation_steps=passes,
            num_generations=SAMPLES_PER_PROMPT,
            steps_per_generation=passes,
            max_completion_length=arguments.new_tokens,
            use_vllm=uses_vllm,
            vllm_gpu_memory_utilization=0.05,
            vllm_max_model_length=arguments.prompt_tokens + arguments.new_tokens,
            generation_kwargs={"detokenize": False} if uses_vllm else None,  # TRL takes the tokens, not vLLM's text
            max_steps=arguments.steps,
            learning_rate=1e-6 if is_large else 1e-3,
            lr_scheduler_type="constant",
            beta=KL_COEF,
            gradient_checkpointing=False,
            report_to=[],
            logging_steps=10_000,
            save_strategy="no",
            disable_tqdm=True,
            seed=0,
        ),
        callbacks=[Clock()],
    )
    wait_for_turn(os.environ.get(TURN))
    trainer.train()
    return times[arguments.steps] - times[arguments.warmup], statistics.mean(lengths[arguments.warmup :] or lengths), {}


if __name__ == "__main__":
    main()

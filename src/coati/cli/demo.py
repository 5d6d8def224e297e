"""`coati demo`: the whole system teaches a small language model to write kind film reviews."""

import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from coati.cli.report import write_page
from coati.cli.train import EXIT_STOPPED, Verbose, execute, show_messages
from coati.config import RunSettings, build_config
from coati.demo.grammar import PROMPTS
from coati.demo.reward import sentiment_analyzer
from coati.entry import RunResult
from coati.monitor.report import read_run, sparkline
from coati.run_folder import open_run_folder

SAMPLES_PER_PROMPT = 22  # 264 in total, for a mean reward accurate to about 0.03
NUM_SHOWN = 3


def demo(
    seed: Annotated[int, typer.Option(help="Seed of the run.")] = 0,
    output: Annotated[Path, typer.Option(help="Output folder. An earlier demo there is replaced.")] = Path("runs/demo"),
    sync: Annotated[bool, typer.Option("--sync", help="Run in one process, without Ray.")] = False,
    verbose: Verbose = False,
) -> None:
    """Watch a small language model learn to write kind film reviews, on this machine."""
    console, started = Console(highlight=False), time.monotonic()
    sentiment_analyzer()  # fail now if it is missing, not after training
    show_messages(verbose)
    console.print(
        "[bold]coati demo[/]\nA small Llama that writes kind and unkind film reviews learns to write kind ones. "
        "An experience maker writes and scores sentences in one Ray actor, a PPO trainer learns from them in another, "
        "and new weights flow back while both keep working. The reward is vaderSentiment's score, from -1 to 1.\n"
    )
    base = output / "base"
    config = demo_config(base, seed=seed, output=output)
    with open_run_folder(config, overwrite=True):  # marks it as a run folder, or `execute` would refuse its files
        with console.status("building the base model"):
            from coati.demo.base_model import pretrain

            pretrain(base)
        prompts = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS)
        Path(config.prompts.path).write_text(prompts, encoding="utf-8")
    _show_scores(console, config, base, "untrained")
    result = execute(config, console, overwrite=True, sync=sync, address=None, verbose=verbose)
    if result.was_stopped:
        console.print(f"Stopped. The model so far is in {result.model}.")
        raise SystemExit(EXIT_STOPPED)
    _show_scores(console, config, result.model, "trained")
    _show_files(console, result, seconds=time.monotonic() - started)


def demo_config(base: Path, *, seed: int, output: Path) -> RunSettings:
    """Return the demo's settings. Samples may be one version old, so that sampling and training overlap."""
    prompts = {"path": str(output / "prompts.jsonl")}
    fresh = {"name": "fresh-samples", "prompts": prompts, "rollout": {"samples_per_prompt": SAMPLES_PER_PROMPT}}
    return build_config(
        {
            "run": {"name": "demo", "seed": seed, "output": str(output)},
            "model": {"path": str(base), "device": "cpu"},
            "prompts": prompts,
            "reward": {"function": "coati.demo.reward:film_sentiment"},
            # Two versions' worth, so that a maker takes everything it may work ahead in one batch.
            "rollout": {"prompts_per_batch": 128, "max_new_tokens": 16},
            "algorithm": {"kl_coef": 0.05},
            "train": {"total_steps": 80, "batch_size": 64, "actor_lr": 1e-3, "critic_lr": 1e-3, "warmup_steps": 2},
            "topology": {"makers": 1, "trainers": 1, "max_staleness": 1},
            "eval": [fresh | {"pass_score": 0.5, "before": False, "at_end": False}],  # 0.5: clearly kind
        }
    )


def _show_scores(console: Console, config: RunSettings, model: Path, kind: str) -> None:
    """Evaluate a model, and print its mean score and a few samples."""
    from coati.evaluation.evaluator import evaluate_model

    with console.status(f"sampling the {kind} model"):
        found = evaluate_model(config, str(model))[0]
    size, mean = len(found.samples), found.record[f"avg@{SAMPLES_PER_PROMPT}"]
    console.print(f"Mean score of {size} samples of the {kind} model: [bold]{mean:.3f}[/]. Some of them:")
    for one in found.samples[::SAMPLES_PER_PROMPT][:NUM_SHOWN]:
        console.print(f"{one['score']:8.3f}  {one['prompt']}{one['response']}", markup=False)


def program(name: str) -> str:
    """Return a command that starts a program of this Python environment, even if the environment is not activated."""
    path = Path(sys.executable).with_name(name)
    is_hidden = path.exists() and shutil.which(name) != str(path)
    return min(str(path), os.path.relpath(path), key=len) if is_hidden else name


def _show_files(console: Console, result: RunResult, *, seconds: float) -> None:
    run = read_run(result.folder)
    page, coati = write_page(run, result.folder / "report.html"), program("coati")
    example, base = Path("examples/film"), result.folder / "base"  # the example is not in an installed package
    change = f"  change the reward: {coati} train {example}/run.toml --set model.path={base}  # edit its rewards.py\n"
    console.print(
        f"Reward curve:  {sparkline([reward for _, reward in run.series('reward/mean')])}\n"
        f"Report:        {page}\n"
        f"Model:         {result.model}\n"
        f"Metrics:       {result.folder / 'metrics.jsonl'}\n"
        f"Total time:    {seconds:.0f} s\n"
        "\n[bold]Try next[/]\n"
        f'  use the model:     {program("python")} -c "from transformers import pipeline; '
        f"print(pipeline('text-generation', '{result.model}')('the film', max_new_tokens=16))\"\n"
        f"{change * example.exists()}"
        f"  evaluate it:       {coati} eval {result.folder}\n"
        f"  repeat the run:    {coati} train {result.folder / 'config.toml'} --set run.output=runs/again",
        soft_wrap=True,
    )

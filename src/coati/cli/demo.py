"""`coati demo`: the whole system teaches a small language model to write kind film reviews."""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from coati.cli.eval import show_evaluation
from coati.cli.report import write_page
from coati.cli.train import EXIT_STOPPED, Verbose, execute, show_messages
from coati.config import RunSettings, build_config
from coati.demo.grammar import PROMPTS
from coati.demo.reward import sentiment_analyzer
from coati.entry import RunResult
from coati.monitor.report import read_run, sparkline
from coati.run_folder import open_run_folder

if TYPE_CHECKING:
    from coati.evaluation.evaluator import Evaluation

SAMPLES_PER_PROMPT = 22  # 264 in total, for a mean reward accurate to about 0.03
NUM_SHOWN = 3


def demo(
    seed: Annotated[int, typer.Option(help="Seed of the run.")] = 0,
    output: Annotated[Path, typer.Option(help="Output folder. An earlier demo there is replaced.")] = Path("runs/demo"),
    sync: Annotated[bool, typer.Option("--sync", help="Run in one process, without Ray.")] = False,
    verbose: Verbose = False,
) -> None:
    """Watch a small language model learn to write kind film reviews, on this machine."""
    console = Console()
    started = time.monotonic()
    sentiment_analyzer()  # fail now if it is missing, not after training
    show_messages(verbose)
    console.print(
        "[bold]coati demo[/]\nA small Llama that writes kind and unkind film reviews learns to write kind ones. "
        "An experience maker writes and scores sentences in one Ray actor, a PPO trainer learns from them in another, "
        "and new weights flow back while both keep working. The reward is the sentiment score of vaderSentiment, "
        "from -1 to 1.\n",
        highlight=False,
    )
    base = output / "base"
    config = demo_config(base, seed=seed, output=output)
    with open_run_folder(config, overwrite=True):  # marks it as a run folder, or `execute` would refuse its files
        with console.status("building the base model"):
            from coati.demo.base_model import pretrain

            pretrain(base)
        (output / "summary.json").unlink(missing_ok=True)
        prompts = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS)
        Path(config.prompts.path).write_text(prompts, encoding="utf-8")
    before = _evaluate(console, config, base, "untrained")
    show_evaluation(console, {"before": before}, NUM_SHOWN)
    result = execute(config, console, overwrite=True, sync=sync, address=None, verbose=verbose)
    if result.was_stopped:
        console.print(f"Stopped. The model so far is in {result.model}.", highlight=False)
        raise SystemExit(EXIT_STOPPED)
    after = _evaluate(console, config, result.model, "trained")
    show_evaluation(console, {"after": after, "before": before}, NUM_SHOWN)
    summary = {"seed": seed, "before": before.record, "after": after.record, "seconds": time.monotonic() - started}
    (output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    _show_files(console, result, seconds=time.monotonic() - started)


def demo_config(base: Path, *, seed: int, output: Path) -> RunSettings:
    """Return the demo's settings. Samples may be one version old, so that sampling and training overlap."""
    prompts = {"path": str(output / "prompts.jsonl")}
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
            "eval": [
                {
                    "name": "fresh-samples",
                    "prompts": prompts,
                    "rollout": {"samples_per_prompt": SAMPLES_PER_PROMPT},
                    "pass_score": 0.5,  # clearly kind
                    "before": False,
                    "at_end": False,
                }
            ],
        }
    )


def _evaluate(console: Console, config: RunSettings, model: Path, kind: str) -> "Evaluation":
    from coati.evaluation.evaluator import evaluate_model

    with console.status(f"sampling the {kind} model"):
        return evaluate_model(config, str(model))[0]


def _show_files(console: Console, result: RunResult, *, seconds: float) -> None:
    run = read_run(result.folder)
    rewards = [reward for _, reward in run.series("reward/mean")]
    page = write_page(run, result.folder / "report.html")
    console.print(
        f"Reward curve:  {sparkline(rewards)}\n"
        f"Report:        {page}\n"
        f"Model:         {result.model}\n"
        f"Metrics:       {result.folder / 'metrics.jsonl'}\n"
        f"Total time:    {seconds:.0f} s\n"
        "\n[bold]Try next[/]\n"
        f'  use the model:     python -c "from transformers import pipeline; '
        f"print(pipeline('text-generation', '{result.model}')('the film', max_new_tokens=16))\"\n"
        f"  change the reward: coati train examples/film/run.toml   (edit its rewards.py)\n"
        f"  evaluate it:       coati eval {result.folder}\n"
        f"  repeat the run:    coati train {result.folder / 'config.toml'} --set run.output=runs/again",
        highlight=False,
        soft_wrap=True,
    )

"""`coati eval MODEL_OR_RUN`."""

import json
import os
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from coati.cli.train import Verbose, show_messages
from coati.config import RunSettings, load_config
from coati.errors import ConfigError, counted
from coati.prompts.table import looks_local
from coati.run_folder import MARKER

if TYPE_CHECKING:
    from coati.evaluation.evaluator import Evaluation


def evaluate(
    target: Annotated[
        str,
        typer.Argument(metavar="MODEL_OR_RUN", help="A run folder (its final model), a model folder or a hub name."),
    ],
    settings: Annotated[
        Path | None,
        typer.Option("--config", help="TOML file with evaluation sets. Default: the settings of the model's run."),
    ] = None,
    base: Annotated[str | None, typer.Option(help="Model to compare with, or none. Default: model.path.")] = None,
    show: Annotated[int, typer.Option(help="Number of prompts per set whose samples are printed.")] = 4,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write results and samples to this JSON file.")
    ] = None,
    verbose: Verbose = False,
) -> None:
    """Evaluate a model on evaluation sets, and compare it with the model that its training started from."""
    console = Console()
    path, config = _resolved(target, settings)
    show_messages(verbose)
    from coati.build import check_inputs
    from coati.evaluation.evaluator import evaluate_model

    check_inputs(config)
    base = config.model.path if base is None else base
    found: dict[str, list[Evaluation]] = {}
    is_alone = base == "none" or Path(base).resolve() == Path(path).resolve()  # of hub names, this compares the names
    for model in [path] if is_alone else [path, base]:
        with console.status(f"evaluating {model}"):
            found[model] = evaluate_model(config, model)
    for evaluations in zip(*found.values(), strict=True):
        show_evaluation(console, dict(zip(found, evaluations, strict=True)), show)
    if output is not None:
        rows = [{"model": model, **one.record, "all_samples": one.samples} for model in found for one in found[model]]
        output.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _resolved(target: str, settings: Path | None) -> tuple[str, RunSettings]:
    """Return the path of the model to evaluate, and the settings with its evaluation sets."""
    folder = Path(target)
    if looks_local(target) and not folder.is_dir():
        raise ConfigError(
            f"MODEL_OR_RUN must be the folder of a model or a run, or a hub name, got {target!r}. Check the path."
        )
    run = next((one for one in (folder, *folder.resolve().parents) if (one / MARKER).is_file()), None)
    source = settings or (run and run / "config.toml")
    if source is None:
        raise ConfigError(
            f"{target!r} is not in a run folder, so it has no evaluation sets. Add --config FILE, with [[eval]] sets."
        )
    config = load_config(source)
    if not config.eval:
        raise ConfigError(
            f"{source} has no [[eval]] set. Add one, or use --config with a file that has one; see docs/evaluation.md."
        )
    if run != folder:
        return target, config
    if not (folder / "model").is_dir():
        from coati.trainer.checkpoints import saved_versions

        failed = folder / "model-at-failure"
        saved = [failed] if failed.is_dir() else saved_versions(folder / "checkpoints")
        advice = f"Evaluate {saved[0]}." if saved else "It has no checkpoint either (see train.save_every)."
        raise ConfigError(f"The run in {target!r} has not saved its final model. {advice}")
    return str(folder / "model"), config


def show_evaluation(console: Console, found: "dict[str, Evaluation]", num_shown: int) -> None:
    """Print the results of a set for one model, or for two and their difference, and the samples of some prompts."""
    from coati.evaluation.estimates import paired_difference

    one, *others = found.values()
    size = f"{counted(one.record['prompts'], 'prompt')}, {counted(one.record['samples'], 'sample')}"
    title = f"{one.record['name']}: {size}; mean and 95% interval"
    table = Table("", title=title, title_justify="left", box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    names = [os.path.relpath(name) if Path(name).is_dir() else name for name in found]
    for name in (*names, *["difference"] * len(others)):
        table.add_column("\n".join(textwrap.wrap(name, 20)), no_wrap=True)  # about the width of an interval
    for metric, values in one.values.items():
        differences = (paired_difference(values, other.values[metric]) for other in others)
        cells = [each.estimates.get(metric, "no scores") for each in found.values()]
        table.add_row(metric, *map(str, [*cells, *differences]))
    for label in ("response_length", "cut_fraction", "unscored"):
        table.add_row(label.replace("_", " "), *(f"{each.record[label]:.3g}" for each in found.values()))
    console.print(table)
    rows = Table("model", "score", "prompt and response", show_lines=True)
    firsts = ([sample for sample in each.samples if sample["sample"] == 0] for each in found.values())
    for samples in list(zip(*firsts, strict=False))[:num_shown]:
        for model, sample in zip(names, samples, strict=True):
            score = "none" if sample["score"] is None else f"{sample['score']:.3f}"
            rows.add_row(model, score, Text(sample["prompt"], style="dim") + Text(sample["response"]))
    if num_shown:
        console.print(rows)

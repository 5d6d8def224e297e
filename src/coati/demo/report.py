"""What the demo says at its end: how varied and how grammatical the samples are, and a picture of the run."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from coati.demo.extras import import_extra
from coati.demo.grammar import is_grammatical
from coati.errors import DataError

Points = Sequence[tuple[float, float]]
"""(training step, value) pairs, in the order of the steps."""

_REWARD_COLOUR, _KL_COLOUR, _INK, _GRID = "#1f6f8b", "#c8553d", "#2b2b2b", "#e4e4e4"


def distinct_fraction(texts: Sequence[str]) -> float:
    """Return the share of different texts among `texts`; white space at the ends does not make a difference.

    Example:
        >>> distinct_fraction(["a", "b", "a ", "c"])
        0.75
    """
    _require_texts(texts)
    return len({text.strip() for text in texts}) / len(texts)


def grammatical_fraction(texts: Sequence[str]) -> float:
    """Return the share of `texts` that are complete sentences of the film grammar.

    Example:
        >>> grammatical_fraction(["the film was good .", "the the film"])
        0.5
    """
    _require_texts(texts)
    return sum(is_grammatical(text) for text in texts) / len(texts)


def _require_texts(texts: Sequence[str]) -> None:
    if not texts:
        raise DataError("texts must hold at least one text, got none. Sample from the model first.")


def smooth(values: Sequence[float], *, window: int) -> list[float]:
    """Return the centred moving average of `values`.

    At the start the window shrinks on both sides, so that a steep rise does not lift the point it started
    from; at the end it shrinks on the right only, so that the last average is not one noisy value.

    Example:
        >>> smooth([0.0, 3.0, 6.0], window=3)
        [0.0, 3.0, 4.5]
    """
    averages = []
    for index in range(len(values)):
        reach = min(window // 2, index)
        part = values[index - reach : index + reach + 1]
        averages.append(sum(part) / len(part))
    return averages


def plot_rewards(
    path: str | Path,
    rewards: Points,
    kl: Points = (),
    *,
    title: str = "Film opinions, trained towards praise",
) -> Path:
    """Draw the reward, and below it the KL to the initial model where given, over training steps as a PNG.

    Raw points are faint, their moving average is the line. Points that are not finite are left out.
    Returns the path written.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> plot_rewards(folder / "rewards.png", [(1, 0.1), (2, 0.4), (3, 0.7)]).name
        'rewards.png'
    """
    rewards, kl = _finite(rewards), _finite(kl)
    if not rewards:
        raise DataError("rewards must hold at least one finite point to plot, got none. Train for a step first.")
    # A Figure of our own, not pyplot: no display is looked for and no global state is touched.
    figure = import_extra("matplotlib.figure").Figure(figsize=(8.0, 5.4 if kl else 4.2), dpi=150, layout="constrained")
    if kl:
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
        _draw(bottom, kl, colour=_KL_COLOUR, label="KL to start\n(nats per sample)")
        bottom.set_ylim(bottom=min(0.0, *(value for _, value in kl)))
    else:
        top = bottom = figure.subplots()
    _draw(top, rewards, colour=_REWARD_COLOUR, label="mean reward")
    top.set_title(title, loc="left", fontsize=13, fontweight="bold", color=_INK, pad=10)
    bottom.set_xlabel("training step", color=_INK)
    bottom.xaxis.get_major_locator().set_params(integer=True)
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, format="png", facecolor="white")
    return target


def _finite(points: Points) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in points if math.isfinite(x) and math.isfinite(y)]


def _draw(axes: Any, points: Points, *, colour: str, label: str) -> None:
    steps = [step for step, _ in points]
    values = [value for _, value in points]
    # A window of about a tenth of the run calms the noise of 64 samples and leaves the shape alone.
    averages = smooth(values, window=max(3, len(values) // 10))
    axes.plot(steps, values, "o", color=colour, alpha=0.25, markersize=3.5, markeredgewidth=0)
    axes.plot(steps, averages, color=colour, linewidth=2.2, solid_capstyle="round")
    axes.annotate(
        f"{averages[-1]:.2f}",
        (steps[-1], averages[-1]),
        xytext=(6, 0),
        textcoords="offset points",
        va="center",
        color=colour,
        fontweight="bold",
        annotation_clip=False,
    )
    axes.set_ylabel(label, color=_INK)
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#9a9a9a")
    axes.tick_params(colors=_INK, labelsize=9)
    axes.locator_params(axis="y", nbins=6)

"""A picture of the demo's run."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from coati.demo.reward import import_extra

Points = Sequence[tuple[float, float]]
"""(training step, value) pairs, in the order of the steps."""

_REWARD_COLOUR, _KL_COLOUR = "#1f6f8b", "#c8553d"


def plot_rewards(path: Path, rewards: Points, kl: Points) -> None:
    """Draw the reward, and below it the KL to the initial model, over training steps as a PNG.

    Raw points are faint, their moving average is the line. Points that are not finite are left out.
    """
    # A figure of our own, not pyplot's: no display is looked for and no global state is touched.
    figure = import_extra("matplotlib.figure").Figure(figsize=(8.0, 5.4), dpi=150, layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    _draw(top, rewards, colour=_REWARD_COLOUR, label="mean reward")
    _draw(bottom, kl, colour=_KL_COLOUR, label="KL to start\n(nats per sample)")
    bottom.set_ylim(bottom=min(0.0, bottom.get_ylim()[0]))
    top.set_title("Film opinions, trained towards praise", loc="left", fontsize=13, fontweight="bold", pad=10)
    bottom.set_xlabel("training step")
    bottom.xaxis.get_major_locator().set_params(integer=True)
    figure.savefig(path, format="png", facecolor="white")


def _draw(axes: Any, points: Points, *, colour: str, label: str) -> None:
    axes.set_ylabel(label)
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.locator_params(axis="y", nbins=6)
    points = [(step, value) for step, value in points if math.isfinite(value)]
    if not points:
        return
    steps, values = zip(*points, strict=True)
    averages = _smooth(values, window=max(3, len(values) // 10))
    axes.plot(steps, values, "o", color=colour, alpha=0.25, markersize=3.5, markeredgewidth=0)
    axes.plot(steps, averages, color=colour, linewidth=2.2, solid_capstyle="round")
    last = (steps[-1], averages[-1])
    offset = {"xytext": (6, 0), "textcoords": "offset points", "va": "center", "annotation_clip": False}
    axes.annotate(f"{averages[-1]:.2f}", last, color=colour, fontweight="bold", **offset)


def _smooth(values: Sequence[float], *, window: int) -> list[float]:
    """The centred moving average; at the start the window shrinks on both sides, so that a steep rise stays steep."""
    reaches = [min(window // 2, index) for index in range(len(values))]
    parts = [values[max(0, index - reach) : index + reach + 1] for index, reach in enumerate(reaches)]
    return [sum(part) / len(part) for part in parts]

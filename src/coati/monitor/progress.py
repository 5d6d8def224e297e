"""What a run looks like in the terminal: one live panel, or one plain line every few seconds for a log."""

from __future__ import annotations

import datetime
import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from rich.console import RenderableType

_LEVELS: Final = "▁▂▃▄▅▆▇█"
_MIN_WIDTH: Final = 40


@dataclass(frozen=True, kw_only=True)
class RunSnapshot:
    """A run at one moment, for the person in front of it. What is not known yet is None."""

    step: int
    """Training steps done."""
    total_steps: int
    """Training steps planned; 0 if there is no plan."""
    version: int
    """Version of the policy's weights."""
    reward: float | None = None
    """Mean reward of the newest samples."""
    kl: float | None = None
    """KL to the initial model, in nats per sample."""
    buffer_batches: int | None = None
    """Batches waiting in the replay buffer."""
    samples_per_second: float | None = None
    """In the last minute."""
    seconds_per_step: float | None = None
    """In the last minute; None if no step ended in it."""
    elapsed: float = 0.0
    """Seconds since training began."""
    startup: float = 0.0
    """Seconds before that."""
    message: str = ""
    """What the run is doing, if the numbers do not show it."""
    reward_history: tuple[float, ...] = ()
    """Mean rewards so far, oldest first."""

    @property
    def fraction(self) -> float:
        """The part of the plan that is done, 0 to 1."""
        return min(self.step / self.total_steps, 1.0) if self.total_steps > 0 else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Time to the end at the latest pace; None before the first step, after the last, without a plan."""
        if self.step <= 0 or self.step >= self.total_steps:
            return None
        pace = self.elapsed / self.step if self.seconds_per_step is None else self.seconds_per_step
        return pace * (self.total_steps - self.step)

    @property
    def steps_text(self) -> str:
        """The steps done and planned."""
        if self.total_steps <= 0:
            return f"step {self.step}"
        # Rounded down: 100% is for a run that is done.
        return f"step {self.step}/{self.total_steps} ({math.floor(self.fraction * 100)}%)"

    @property
    def facts_text(self) -> str:
        """The other numbers, as far as they are known."""
        facts = [f"version {self.version}"]
        if self.kl is not None:
            facts.insert(0, f"KL {self.kl:.2f}")
        if self.buffer_batches is not None:
            facts.append(f"buffer {self.buffer_batches}")
        if self.samples_per_second is not None:
            digits = 0 if self.samples_per_second >= 10 else 1
            facts.append(f"{self.samples_per_second:,.{digits}f} samples/s")
        return ", ".join(facts)

    @property
    def times_text(self) -> str:
        """The time so far, and the time to the end."""
        elapsed = f"{_clock(self.startup + self.elapsed)} elapsed"
        return elapsed if self.seconds_left is None else f"{elapsed}, {_clock(self.seconds_left)} left"


def plain_line(snapshot: RunSnapshot) -> str:
    """Return the snapshot as one line, for a log that is not a terminal.

    >>> plain_line(RunSnapshot(step=30, total_steps=60, version=29, reward=0.5, kl=2.0, elapsed=12.0))
    'step 30/60 (50%), reward 0.500, KL 2.00, version 29, 0:00:12 elapsed, 0:00:12 left'
    >>> plain_line(RunSnapshot(step=0, total_steps=60, version=0, message="loading models", elapsed=12.0))
    'loading models, 0:00:12 elapsed'
    """
    message = _one_line(snapshot.message)
    if message and snapshot.step == 0:
        return f"{message}, {snapshot.times_text}"
    reward = [] if snapshot.reward is None else [f"reward {snapshot.reward:.3f}"]
    line = ", ".join([snapshot.steps_text, *reward, snapshot.facts_text, snapshot.times_text])
    return f"{line} - {message}" if message else line


def render_progress(snapshot: RunSnapshot, width: int) -> RenderableType:
    """Return a panel `width` columns wide that shows the snapshot; give it to `rich.live.Live.update`.

    The panel always has the same number of lines, so that a live display does not jump.
    """
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    width = max(width, _MIN_WIDTH)
    inner = width - 4  # the panel's border and padding
    # A length that does not depend on the step, so that the bar keeps its size as the numbers grow.
    room = len(f"step {snapshot.total_steps}/{snapshot.total_steps} (100%)") + 2
    bar = "━" * round(snapshot.fraction * max(inner - room, 1))
    number = "-" if snapshot.reward is None else f"{snapshot.reward:.3f}"
    reward = Text.assemble("reward ", (f"{number:>6}", "bold green"), "  ")
    reward.append(sparkline(snapshot.reward_history, max(inner - len(reward), 1)), style="green")
    lines = (
        Text.assemble(f"{snapshot.steps_text:<{room}}", (bar, "magenta")),
        reward,
        Text(snapshot.facts_text),
        Text(_one_line(snapshot.message), style="dim"),
    )
    for line in lines:
        line.truncate(inner, overflow="ellipsis")
    return Panel(
        Group(*lines),
        title="coati",
        title_align="left",
        subtitle=snapshot.times_text,
        subtitle_align="right",
        width=width,
    )


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw values as one line of at most `width` blocks, from the least to the greatest.

    More values than blocks are averaged in groups. What is not finite is left out; a flat line is drawn low.

    >>> sparkline([0.0, 1.0, 2.0, 7.0], width=10)
    '▁▂▃█'
    """
    finite = [value for value in values if math.isfinite(value)]
    groups = min(len(finite), width)
    if groups <= 0:
        return ""
    edges = [index * len(finite) // groups for index in range(groups + 1)]
    points = [statistics.fmean(finite[start:end]) for start, end in itertools.pairwise(edges)]
    low = min(points)
    # The floor keeps a flat line from dividing by zero, and draws it at the lowest level.
    scale = (len(_LEVELS) - 1) / max(max(points) - low, 1e-12)
    return "".join(_LEVELS[round((point - low) * scale)] for point in points)


def _clock(seconds: float) -> str:
    return str(datetime.timedelta(seconds=round(seconds)))


def _one_line(text: str) -> str:
    return " ".join(text.split())

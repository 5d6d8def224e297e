"""What a run looks like in the terminal: one live panel, or one plain line every few seconds for a log."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

_LEVELS: Final = "▁▂▃▄▅▆▇█"
_UNKNOWN: Final = "-"
_UNITS_WIDTH: Final = 76  # four columns hold their units too
_ONE_ROW_WIDTH: Final = 56  # four columns hold their numbers
_MIN_WIDTH: Final = 40  # narrower, and the numbers themselves no longer fit


@dataclass(frozen=True, kw_only=True)
class RunSnapshot:
    """A run at one moment, as the person in front of it wants to see it. What is not known yet is None."""

    step: int
    """Training steps done."""
    total_steps: int
    """Training steps planned; 0 if there is no plan."""
    version: int
    """Policy version."""
    reward: float | None = None
    """Mean reward of the newest samples."""
    kl: float | None = None
    """KL to the initial model, in nats per sample."""
    buffer_batches: int | None = None
    """Batches waiting in the replay buffer."""
    samples_per_second: float | None = None
    """Samples trained per second, of late."""
    seconds_per_step: float | None = None
    """Of late; None: over all steps so far."""
    elapsed: float = 0.0
    """Seconds since this process began to train."""
    startup: float = 0.0
    """Seconds before that, in which it got ready."""
    first_step: int = 0
    """Steps that were done before `elapsed` began: not 0 in a resumed run."""
    message: str = ""
    """What the run is doing, if that is not plain from the numbers."""
    reward_history: tuple[float, ...] = ()
    """Mean rewards so far, oldest first."""

    @property
    def fraction(self) -> float | None:
        """Part of the plan that is done, 0 to 1; None without a plan."""
        return min(max(self.step / self.total_steps, 0.0), 1.0) if self.total_steps > 0 else None

    @property
    def seconds_left(self) -> float | None:
        """Time to the end at the latest pace; None before the first step, after the last, without a plan."""
        done = self.step - self.first_step
        if done <= 0 or self.step >= self.total_steps:
            return None
        pace = self.elapsed / done if self.seconds_per_step is None else self.seconds_per_step
        return pace * (self.total_steps - self.step)


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw values as one line of blocks, at most `width` of them, from the least to the greatest.

    More values than blocks are averaged in groups. What is not finite leaves a gap; a flat line is drawn low.

    >>> sparkline([0.0, 1.0, 2.0, 7.0], width=10)
    '▁▂▃█'
    """
    points = _shrink(values, width)
    finite = [point for point in points if math.isfinite(point)]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    # The floor keeps a flat line from dividing by zero, and draws it at the lowest level.
    scale = (len(_LEVELS) - 1) / max(high - low, 1e-12)
    return "".join(_LEVELS[round((point - low) * scale)] if math.isfinite(point) else " " for point in points)


def plain_line(snapshot: RunSnapshot) -> str:
    """Return the snapshot as one line of ASCII, for a log that is not a terminal.

    >>> plain_line(RunSnapshot(step=30, total_steps=60, version=29, reward=0.5, kl=2.0, elapsed=12.0))
    'step 30/60 (50%), reward 0.500, KL 2.00, version 29, buffer -, - samples/s, 0:12 elapsed, 0:12 left'
    """
    parts = [
        _steps(snapshot),
        f"reward {_number(snapshot.reward, 3)}",
        f"KL {_number(snapshot.kl, 2)}",
        f"version {snapshot.version}",
        f"buffer {_count(snapshot.buffer_batches)}",
        f"{_rate(snapshot.samples_per_second)} samples/s",
        f"{format_clock(snapshot.startup + snapshot.elapsed)} elapsed",
    ]
    if snapshot.seconds_left is not None:
        parts.append(f"{format_clock(snapshot.seconds_left)} left")
    line = ", ".join(parts)
    return f"{line} - {_one_line(snapshot.message)}" if snapshot.message else line


def render_progress(snapshot: RunSnapshot, width: int) -> RenderableType:
    """Return a panel `width` columns wide that shows the snapshot; give it to `rich.live.Live.update`.

    The panel has the same number of lines whatever it shows, so that a live display does not jump.
    """
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    width = max(width, _MIN_WIDTH)
    inner = width - 4  # the panel's border and padding
    body = Table.grid(padding=0, expand=True)
    body.add_column(no_wrap=True, overflow="ellipsis")
    body.add_row(_bar_row(snapshot, inner))
    body.add_row(_reward_row(snapshot, inner))
    for row in _facts_rows(snapshot, inner):
        body.add_row(row)
    body.add_row(Text(_one_line(snapshot.message), style="dim"))
    return Panel(
        body,
        title="coati",
        title_align="left",
        subtitle=_times(snapshot),
        subtitle_align="right",
        width=width,
    )


def format_clock(seconds: float) -> str:
    """Return a duration as a clock shows it.

    >>> format_clock(9), format_clock(754), format_clock(3_725)
    ('0:09', '12:34', '1:02:05')
    """
    minutes, secs = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{secs:02d}" if hours else f"{minutes}:{secs:02d}"


def _bar_row(snapshot: RunSnapshot, inner: int) -> Table:
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    steps = _steps(snapshot)
    # A length that does not depend on the step, so that the bar keeps its size as the numbers grow.
    room = len(f"step {snapshot.total_steps}/{snapshot.total_steps} (100%)")
    row = Table.grid(padding=(0, 2, 0, 0))
    row.add_row(
        f"{steps:<{room}}",
        ProgressBar(total=1.0, completed=snapshot.fraction or 0.0, width=max(inner - max(room, len(steps)) - 2, 1)),
    )
    return row


def _reward_row(snapshot: RunSnapshot, inner: int) -> Text:
    from rich.text import Text

    row = Text.assemble("reward ", (f"{_number(snapshot.reward, 3):>6}", "bold green"), "  ")
    finite = [value for value in snapshot.reward_history if math.isfinite(value)]
    tail = f"  first {finite[0]:.2f}, best {max(finite):.2f}" if finite and inner >= _ONE_ROW_WIDTH else ""
    row.append(sparkline(snapshot.reward_history, max(inner - len(row) - len(tail), 1)), style="green")
    return row.append(tail, style="dim")


def _facts_rows(snapshot: RunSnapshot, inner: int) -> Iterator[Table]:
    """Yield the facts in columns of fixed width, so that a digit more in one does not shift the others."""
    from rich.table import Table

    kl, batches = f"KL {_number(snapshot.kl, 2)}", f"buffer {_count(snapshot.buffer_batches)}"
    if inner >= _UNITS_WIDTH:
        kl, batches = f"{kl} nats", f"{batches} batches"
    facts = (kl, f"policy v{snapshot.version}", batches, f"{_rate(snapshot.samples_per_second)} samples/s")
    per_row = len(facts) if inner >= _ONE_ROW_WIDTH else 2
    for start in range(0, len(facts), per_row):
        row = Table.grid(padding=0, expand=True)
        for _ in range(per_row):
            row.add_column(ratio=1, no_wrap=True, style="bold")
        row.add_row(*facts[start : start + per_row])
        yield row


def _times(snapshot: RunSnapshot) -> str:
    left = snapshot.seconds_left
    elapsed = f"{format_clock(snapshot.startup + snapshot.elapsed)} elapsed"
    return elapsed if left is None else f"{elapsed}, about {format_clock(left)} left"


def _steps(snapshot: RunSnapshot) -> str:
    if snapshot.fraction is None:
        return f"step {snapshot.step}"
    # Rounded down: 100% is for a run that is done.
    return f"step {snapshot.step}/{snapshot.total_steps} ({math.floor(snapshot.fraction * 100)}%)"


def _shrink(values: Sequence[float], width: int) -> list[float]:
    """Average `values` in at most `width` groups of nearly equal size, non-finite ones left out."""
    groups = min(len(values), max(width, 0))
    edges = [index * len(values) // groups for index in range(groups + 1)] if groups else []
    points = []
    for start, end in itertools.pairwise(edges):
        finite = [value for value in values[start:end] if math.isfinite(value)]
        points.append(sum(finite) / len(finite) if finite else math.nan)
    return points


def _number(value: float | None, digits: int) -> str:
    return _UNKNOWN if value is None else f"{value:.{digits}f}"


def _count(value: int | None) -> str:
    return _UNKNOWN if value is None else str(value)


def _rate(value: float | None) -> str:
    if value is None:
        return _UNKNOWN
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def _one_line(text: str) -> str:
    return " ".join(text.split())

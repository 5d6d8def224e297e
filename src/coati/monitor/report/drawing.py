"""Pictures as SVG text: what actors did when, and curves. No library, no script, nothing to load."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence, Set
from html import escape
from typing import Final

from coati.counting import format_seconds
from coati.monitor.report.time_use import ActorTime, Piece, RunTimes
from coati.monitor.timeline import ACTIVITIES, activity, is_idle

WIDTH: Final = 1080.0
_LEFT: Final = 96.0
_ROW: Final = 30.0
_LANE: Final = 8.0
_GAP: Final = 12.0
_AXIS: Final = 22.0
MAX_ACTORS: Final = 24
_COLUMNS: Final = 60  # of the overview
_MAX_POINTS: Final = 300
_SUPERSCRIPTS: Final = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


def overview(times: RunTimes) -> str:
    """Draw the whole run: for each actor, how its time was divided, in columns from left to right."""
    actors = times.actors[:MAX_ACTORS]
    rows = []
    for index, actor in enumerate(actors):
        top = index * (_ROW + _GAP)
        rows.append(_actor_label(actor.actor, top))
        rows.append(_frame(top))
        rows.extend(_stacked(actor, times, top))
    return _with_axis(rows, len(actors) * (_ROW + _GAP), times.start, times.end, origin=times.start)


def close_up(times: RunTimes, start: float, end: float) -> str:
    """Draw a part of the run, span by span: work at full height, waits low, other threads as a thin line below."""
    actors = times.actors[:MAX_ACTORS]
    rows = []
    top = 0.0
    for actor in actors:
        rows.append(_actor_label(actor.actor, top))
        for piece in _within(actor.pieces, start, end):
            height = _ROW * (0.4 if is_idle(piece.what) else 1.0)
            rows.append(_bar(piece, start, end, top + _ROW - height, height, times.start))
        top += _ROW
        for pieces in actor.other_lanes.values():
            top += 2
            rows.extend(_bar(piece, start, end, top, _LANE, times.start) for piece in _within(pieces, start, end))
            top += _LANE
        top += _GAP
    return _with_axis(rows, top, start, end, origin=times.start)


def typical_window(times: RunTimes, num_steps: int = 6) -> tuple[float, float]:
    """Return the start and end of some steps in the middle of the run."""
    for what in ("train", "generate"):
        for actor in times.actors:
            steps = [piece for piece in actor.pieces if piece.what == what]
            if steps:
                first = max(0, (len(steps) - num_steps) // 2)
                last = min(first + num_steps, len(steps)) - 1
                return steps[first].start, max(steps[last].end, steps[first].start + 1e-3)
    return times.start, max(times.end, times.start + 1e-3)


def legend(activities: Set[str]) -> str:
    """List the colours by name, as HTML."""
    known = [*(what for what in ACTIVITIES if what in activities), *sorted(activities - ACTIVITIES.keys())]
    shown = (activity(what) for what in known)
    entries = (f'<span><i style="background:{it.colour}"></i>{escape(it.label)}</span>' for it in shown)
    return f'<p class="legend">{"".join(entries)}</p>'


def curve(points: Sequence[tuple[float, float]], *, title: str) -> str:
    """Draw one metric over the training steps: its points, faint, and their moving average."""
    width, height, left, right, top, bottom = 340.0, 190.0, 46.0, 12.0, 26.0, 22.0
    points = thinned(points)
    xs, ys = [x for x, _ in points], [y for _, y in points]
    scale, unit = _unit(ys)
    ys = [y * scale for y in ys]
    low, high = min(ys), max(ys)
    if high - low < 1e-9 * max(1.0, abs(high)):
        low, high = (low, low + 1.0) if low == 0 else (low - 0.5, high + 0.5)
    # The axis begins and ends at a tick, so that the labels are round numbers.
    ticks = _round_ticks(low, high, about=3)
    step = ticks[1] - ticks[0] if len(ticks) > 1 else high - low
    ticks = [ticks[0] - step, *ticks] if ticks[0] > low + step / 10 else ticks
    ticks = [*ticks, ticks[-1] + step] if ticks[-1] < high - step / 10 else ticks
    low, high = ticks[0], ticks[-1]

    def across(x: float) -> float:
        share = (x - xs[0]) / (xs[-1] - xs[0]) if xs[-1] > xs[0] else 0.5
        return left + share * (width - left - right)

    def down(y: float) -> float:
        return top + (high - y) / (high - low) * (height - top - bottom)

    def line(values: Sequence[float]) -> str:
        return " ".join(f"{across(x):.1f},{down(y):.1f}" for x, y in zip(xs, values, strict=True))

    parts = [_text(left, 14, title + unit, size=12, weight="bold")]
    for tick in ticks:
        y = down(tick)
        parts.append(_line(left, y, width - right, y))
        parts.append(_text(left - 5, y + 4, _label(tick), anchor="end"))
    for tick in _round_ticks(xs[0], xs[-1], about=4) if xs[-1] > xs[0] else xs[:1]:
        parts.append(_text(across(tick), height - bottom + 15, _label(tick), anchor="middle"))
    parts += [
        f'<polyline points="{line(ys)}" fill="none" stroke="#2f7fc1" stroke-width="1" opacity="0.35"/>',
        f'<polyline points="{line(_smooth(ys))}" fill="none" stroke="#2f7fc1" stroke-width="2"/>',
    ]
    return _svg(parts, width, height)


def thinned(points: Sequence[tuple[float, float]], most: int = _MAX_POINTS) -> list[tuple[float, float]]:
    """Average neighbours, so that at most `most` points are left."""
    groups = min(len(points), most)
    edges = [index * len(points) // groups for index in range(groups + 1)]
    found = []
    for start, end in itertools.pairwise(edges):
        part = points[start:end]
        found.append((sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)))
    return found


def columns_of(pieces: Sequence[Piece], start: float, end: float, count: int) -> list[dict[str, float]]:
    """Divide a period into columns of equal width; for each, return the share of every activity."""
    width = (end - start) / count
    columns: list[dict[str, float]] = [{} for _ in range(count)]
    for piece in pieces:
        first = max(0, int((piece.start - start) / width))
        last = min(count - 1, int((piece.end - start) / width))
        for index in range(first, last + 1):
            inside = min(piece.end, start + (index + 1) * width) - max(piece.start, start + index * width)
            if inside > 0:
                columns[index][piece.what] = columns[index].get(piece.what, 0.0) + inside / width
    return columns


def _stacked(actor: ActorTime, times: RunTimes, top: float) -> Iterable[str]:
    """Work from below, waits on top of it, the rest empty; one path for each activity."""
    columns = columns_of(actor.pieces, times.start, times.end, _COLUMNS)
    width = (WIDTH - _LEFT) / len(columns)
    levels = [0.0] * len(columns)
    for what in sorted(actor.seconds, key=is_idle):
        path = []
        for index, column in enumerate(columns):
            share = min(column.get(what, 0.0), 1.0 - levels[index])
            if share > 0.001:
                y = top + _ROW * (1.0 - levels[index] - share)
                path.append(f"M{_LEFT + index * width:.2f} {y:.2f}h{width:.2f}v{share * _ROW:.2f}h{-width:.2f}z")
                levels[index] += share
        hint = f"{actor.actor}: {activity(what).label}, {actor.share(what):.0%} of the time"
        yield f'<path d="{"".join(path)}" fill="{activity(what).colour}"><title>{escape(hint)}</title></path>'


def _within(pieces: Iterable[Piece], start: float, end: float) -> Iterable[Piece]:
    return (piece for piece in pieces if piece.end > start and piece.start < end)


def _bar(piece: Piece, start: float, end: float, y: float, height: float, origin: float) -> str:
    scale = (WIDTH - _LEFT) / (end - start)
    x = _LEFT + (max(piece.start, start) - start) * scale
    width = max((min(piece.end, end) - max(piece.start, start)) * scale, 0.4)
    hint = (
        f"{activity(piece.what).label}, version {piece.version}: {format_seconds(piece.end - piece.start)}, "
        f"at {piece.start - origin:.3f} s"
    )
    return (
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" fill="{activity(piece.what).colour}">'
        f"<title>{escape(hint)}</title></rect>"
    )


def _with_axis(rows: list[str], height: float, start: float, end: float, *, origin: float) -> str:
    ticks = []
    for seconds in _round_ticks(start - origin, end - origin):
        x = _LEFT + (seconds - (start - origin)) / (end - start) * (WIDTH - _LEFT)
        anchor = "end" if x > WIDTH - 20 else "middle"
        ticks.append(_line(x, 0, x, height) + _text(x, height + 15, f"{_label(seconds)} s", anchor=anchor))
    return _svg(rows + ticks, WIDTH, height + _AXIS)


def _round_ticks(start: float, end: float, about: int = 8) -> list[float]:
    """Round numbers between two times.

    >>> _round_ticks(0.0, 40.0)
    [0.0, 5.0, 10.0, 15.0, 20.0, 25.0, 30.0, 35.0, 40.0]
    """
    rough = (end - start) / about
    scale = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * scale for factor in (1, 2, 5, 10) if factor * scale >= rough * 0.999)
    first = math.ceil(start / step - 1e-9)
    return [round(index * step, 9) for index in range(first, math.floor(end / step + 1e-9) + 1)]


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="currentColor" opacity="0.18"/>'


def _frame(top: float) -> str:
    return (
        f'<rect x="{_LEFT}" y="{top:.1f}" width="{WIDTH - _LEFT}" height="{_ROW}" fill="currentColor" opacity="0.06"/>'
    )


def _actor_label(name: str, top: float) -> str:
    return _text(_LEFT - 8, top + _ROW / 2 + 4, name, anchor="end", size=12)


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 11, weight: str = "normal") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" font-weight="{weight}" '
        f'font-family="sans-serif" fill="currentColor">{escape(text)}</text>'
    )


def _svg(parts: Iterable[str], width: float, height: float) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}">{"".join(parts)}</svg>'
    )


def _smooth(values: Sequence[float]) -> list[float]:
    """A moving average over a tenth of the curve."""
    half = max(1, len(values) // 20)
    return [
        sum(part) / len(part)
        for part in (values[max(0, index - half) : index + half + 1] for index in range(len(values)))
    ]


def _unit(values: Sequence[float]) -> tuple[float, str]:
    """Return a factor that makes small numbers readable, and how to write it in a title.

    >>> _unit([0.0, 5.12e-07])
    (1000000000.0, ' (× 10⁻⁹)')
    """
    largest = max(map(abs, values))
    if largest == 0 or largest >= 0.01:
        return 1.0, ""
    exponent = 3 * math.ceil(-math.log10(largest) / 3)
    return 10.0**exponent, f" (× 10⁻{str(exponent).translate(_SUPERSCRIPTS)})"


def _label(value: float) -> str:
    """Write a tick in full.

    >>> _label(0.25), _label(-0.0), _label(12_500.0)
    ('0.25', '0', '12,500')
    """
    text = f"{value:,.6f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text

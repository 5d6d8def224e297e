"""Pictures as SVG text, for the styles of the page: what actors did when, and curves. No script, nothing to load."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Final

import numpy as np

from coati.counting import format_seconds
from coati.monitor.report.time_use import RunTimes, within
from coati.monitor.timeline import ACTIVITIES, WORK, activity, is_idle

MAX_ACTORS: Final = 24
_WIDTH: Final = 1080.0
_LEFT: Final = 96.0
_ROW: Final = 30.0
_LANE: Final = 8.0
_GAP: Final = 12.0
_MAX_POINTS: Final = 300


def close_up(times: RunTimes, start: float, end: float) -> str:
    """Draw a part of the run, span by span: work at full height, waits low, other threads as a thin line below."""
    parts = []
    top = 0.0
    scale = (_WIDTH - _LEFT) / (end - start)
    for actor in times.actors[:MAX_ACTORS]:
        parts.append(_text(_LEFT - 8, top + _ROW / 2 + 4, actor.actor, anchor="end"))
        for lane, spans in actor.lanes.items():
            top += _ROW if lane == WORK else _LANE + 2
            for span in within(spans, start, end):
                height = _LANE if lane != WORK else _ROW * 0.4 if is_idle(span.what) else _ROW
                place = {"x": _LEFT + (span.start - start) * scale, "y": top - height, "height": height}
                seconds = span.end - span.start
                hint = f"{activity(span.what).label}, version {span.version}: {format_seconds(seconds)}, at "
                title = _tag("title", escape(f"{hint}{span.start - times.start:.3f} s"))
                parts.append(
                    _tag("rect", title, **place, width=max(seconds * scale, 0.4), fill=activity(span.what).colour)
                )
        top += _GAP
    return _with_time_axis(parts, top, start, end, origin=times.start)


def typical_window(times: RunTimes, num_steps: int = 6) -> tuple[float, float]:
    """Return the start and end of some steps in the middle of the run."""
    for what in ("train", "generate"):
        for actor in times.actors:
            if steps := [span for span in actor.lanes[WORK] if span.what == what]:
                first = max(0, (len(steps) - num_steps) // 2)
                return steps[first].start, steps[first : first + num_steps][-1].end
    return times.start, max(times.end, times.start + 1e-3)


def curve(points: Sequence[tuple[float, float]]) -> str:
    """Draw one metric over the training steps: its points, faint, and their moving average."""
    width, height, left, right, top, bottom = 340.0, 172.0, 46.0, 12.0, 8.0, 22.0
    groups = min(len(points), _MAX_POINTS)
    xs, ys = ([float(part.mean()) for part in np.array_split(column, groups)] for column in np.array(points).T)
    low, high = min(ys), max(ys)
    if high - low <= 1e-9 * abs(high):
        low, high = low - abs(low), high + (abs(high) or 1.0)
    # The axis begins and ends at a tick, so that the labels are round numbers.
    step = _round_step(low, high, about=3)
    ticks = [index * step for index in range(math.floor(low / step + 0.1), math.ceil(high / step - 0.1) + 1)]

    def across(x: float) -> float:
        return left + (x - xs[0]) / max(xs[-1] - xs[0], 1e-9) * (width - left - right)

    def down(y: float) -> float:
        return top + (ticks[-1] - y) / (ticks[-1] - ticks[0]) * (height - top - bottom)

    def line(values: Sequence[float], **style: str | float) -> str:
        places = " ".join(f"{across(x):.1f},{down(y):.1f}" for x, y in zip(xs, values, strict=True))
        return _tag("polyline", points=places, fill="none", stroke="#2f7fc1", **style)

    parts = []
    for tick in ticks:
        parts.append(_line(left, width - right, down(tick), down(tick)))
        parts.append(_text(left - 5, down(tick) + 4, f"{tick:,g}", anchor="end"))
    parts += [_text(across(tick), height - 7, f"{tick:,g}") for tick in _round_ticks(xs[0], xs[-1], about=4)]
    half = max(1, len(ys) // 20)
    smooth = [float(np.mean(ys[max(0, index - half) : index + half + 1])) for index in range(len(ys))]
    return _svg([*parts, line(ys, opacity=0.35), line(smooth, stroke_width=2)], width, height)


def legend(activities: Iterable[str]) -> str:
    """List the colours by name, as HTML, in the order of `ACTIVITIES`."""
    order = list(ACTIVITIES)
    known = sorted(activities, key=lambda what: (order.index(what) if what in ACTIVITIES else len(order), what))
    return "".join(
        f'<span><i style="background:{activity(what).colour}"></i>{escape(activity(what).label)}</span>'
        for what in known
    )


def _with_time_axis(parts: list[str], height: float, start: float, end: float, *, origin: float) -> str:
    for seconds in _round_ticks(start - origin, end - origin, about=8):
        x = _LEFT + (seconds - (start - origin)) / (end - start) * (_WIDTH - _LEFT)
        parts.append(_line(x, x, 0, height))
        parts.append(_text(x, height + 15, f"{seconds:,g} s", anchor="end" if x > _WIDTH - 20 else "middle"))
    return _svg(parts, _WIDTH, height + 22)


def _round_ticks(start: float, end: float, *, about: int) -> list[float]:
    """Round numbers from start to end.

    >>> _round_ticks(0.0, 40.0, about=8)
    [0.0, 5.0, 10.0, 15.0, 20.0, 25.0, 30.0, 35.0, 40.0]
    """
    step = _round_step(start, end, about=about)
    return [index * step for index in range(math.ceil(start / step - 1e-9), math.floor(end / step + 1e-9) + 1)]


def _round_step(start: float, end: float, *, about: int) -> float:
    rough = (end - start) / about or 1.0
    scale = 10.0 ** math.floor(math.log10(rough))
    return next(factor * scale for factor in (1, 2, 5, 10) if factor * scale >= rough * 0.999)


def _line(x1: float, x2: float, y1: float, y2: float) -> str:
    return _tag("line", x1=x1, x2=x2, y1=y1, y2=y2, stroke="currentColor", opacity=0.18)


def _text(x: float, y: float, text: str, *, anchor: str = "middle") -> str:
    return _tag("text", escape(text), x=x, y=y, text_anchor=anchor)


def _svg(parts: Iterable[str], width: float, height: float) -> str:
    return _tag("svg", "".join(parts), xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {width:.0f} {height:.0f}")


def _tag(name: str, content: str = "", /, **attributes: str | float) -> str:
    """An SVG element; numbers are written with two digits."""
    pairs = (
        f'{key.replace("_", "-")}="{value if isinstance(value, str) else f"{value:.2f}"}"'
        for key, value in attributes.items()
    )
    return f"<{name} {' '.join(pairs)}>{content}</{name}>"

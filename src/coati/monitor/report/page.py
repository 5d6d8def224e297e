"""The report as one HTML file that stands on its own: styles and pictures inside, nothing fetched, no script."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, Final

from coati import __version__
from coati.monitor.performance import format_seconds
from coati.monitor.report import drawing
from coati.monitor.report.folder import RunFolder
from coati.monitor.report.summary import headline
from coati.monitor.report.time_use import TOTALS, RunTimes, is_idle, label_of

NUM_SAMPLES: Final = 4

_CURVES: Final = (
    ("reward/mean", "mean reward", "step", "step"),
    ("kl/per_sample", "KL to the initial model, nats per sample", "step", "step"),
    ("response/length", "response tokens", "step", "step"),
    ("policy/entropy", "entropy, nats per token", "step", "step"),
    ("value/explained_variance", "explained variance of the critic", "step", "step"),
    ("policy/clip_fraction", "clipped tokens", "step", "step"),
    ("train/age_mean", "age of the data, versions", "step", "step"),
    ("trainer/busy_share", "trainer: share of time training", "step", "step"),
    ("maker/busy_share", "makers: share of time working", "step", "step"),
)

_STYLE: Final = """
:root { color-scheme: light dark; --line: #8884; --soft: #8881; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2rem auto; padding: 0 1rem;
  color: light-dark(#222, #ddd); background: light-dark(#fff, #16181c); }
h1 { font-size: 1.6rem; margin-bottom: 0; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
svg { max-width: 100%; height: auto; display: block; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
td, th { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid var(--line); } th { font-weight: 600; }
td { white-space: nowrap; } td:first-child, th:first-child { text-align: left; }
.idle { background: var(--soft); } .text { text-align: left; white-space: normal; } .prompt { opacity: .6; }
.facts { display: flex; flex-wrap: wrap; gap: .6rem 2.4rem; padding: 0; list-style: none; } .facts b { display: block;
  font-size: 1.25rem; } .curves { display: flex; flex-wrap: wrap; gap: 1rem; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; font-size: .85rem; } .legend i { display: inline-block;
  width: .8em; height: .8em; margin-right: .4em; border-radius: 2px; }
.wide { overflow-x: auto; } footer { margin-top: 3rem; font-size: .8rem; opacity: .7; }
"""


def render_page(run: RunFolder, times: RunTimes | None) -> str:
    """The page; parts that the run has nothing for are left out, and said to be."""
    body = [
        f"<h1>{escape(run.name)}</h1>",
        _facts(headline(run, times)),
        "<h2>Where the time went</h2>",
        _timeline(times),
        "<h2>Learning</h2>",
        _curves(run),
        "<h2>Samples</h2>",
        _samples(run.samples),
        f"<footer>coati {__version__}, from {escape(str(run.path))}</footer>",
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(run.name)}: coati report</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _facts(facts: Sequence[tuple[str, str]]) -> str:
    entries = "".join(f"<li><b>{escape(value)}</b>{escape(name)}</li>" for name, value in facts)
    return f'<ul class="facts">{entries}</ul>'


def _timeline(times: RunTimes | None) -> str:
    if times is None:
        return "<p>The run wrote no spans (logging.spans_kept = 0, or an older version).</p>"
    start, end = drawing.typical_window(times)
    used = {
        piece.what
        for actor in times.actors
        for pieces in (actor.pieces, *actor.other_lanes.values())
        for piece in pieces
    }
    hidden = len(times.actors) - drawing.MAX_ACTORS
    more = f"<p>{hidden} more actors are in the table only.</p>" if hidden > 0 else ""
    return "\n".join(
        [
            f"<p>{escape(times.verdict())}</p>",
            drawing.legend(used),
            "<p>The whole run. Every column is a slice of time: work from below, waits above it.</p>",
            drawing.overview(times),
            f"<p>A close-up of {escape(format_seconds(end - start))} in the middle. Full height is work, low bars are "
            "waits; below each actor, what its other threads did. Point at a bar for its times.</p>",
            drawing.close_up(times, start, end),
            more,
            _time_table(times),
        ]
    )


def _time_table(times: RunTimes) -> str:
    used = [what for what in drawing.COLOURS if any(what in actor.seconds for actor in times.actors)]

    def cells(tag: str, values: Iterable[str]) -> str:
        marks = ["", *[""] * len(TOTALS), *(' class="idle"' if is_idle(what) else "" for what in used)]
        return "<tr>" + "".join(f"<{tag}{m}>{v}</{tag}>" for v, m in zip(values, marks, strict=True)) + "</tr>"

    rows = [cells("th", ["actor", *TOTALS, *(escape(label_of(what)) for what in used)])]
    for actor in times.actors:
        seconds = actor.seconds
        shares = (f"{seconds[what]:.1f} s<br>{actor.share(what):.0%}" if what in seconds else "" for what in used)
        sums = (f"<b>{share(actor):.0%}</b>" for share in TOTALS.values())
        rows.append(cells("td", [escape(actor.actor), *sums, *shares]))
    return f'<div class="wide"><table>{"".join(rows)}</table></div>'


def _curves(run: RunFolder) -> str:
    found = []
    for metric, title, over, x_label in _CURVES:
        points = run.series(metric, over=over)
        if len(points) > 1:
            found.append(drawing.curve(points, title=title, x_label=x_label))
    return f'<div class="curves">{"".join(found)}</div>' if found else "<p>No metric has two points yet.</p>"


def _samples(samples: Sequence[Mapping[str, Any]]) -> str:
    if not samples:
        return "<p>The run kept no samples.</p>"
    rows = "".join(
        f"<tr><td>{_text(sample.get('version'))}</td><td>{_reward(sample.get('reward'))}</td>"
        f'<td class="text"><span class="prompt">{_text(sample.get("prompt"))}</span>{_text(sample.get("response"))}'
        "</td></tr>"
        for sample in chosen_samples(samples)
    )
    return f'<table><tr><th>version</th><th>reward</th><th class="text">prompt and response</th></tr>{rows}</table>'


def chosen_samples(samples: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """A few of the first version, and a few of the last."""
    versions = [sample.get("version") for sample in samples]
    first = [sample for sample in samples if sample.get("version") == versions[0]][:NUM_SAMPLES]
    if versions[-1] == versions[0]:
        return first
    return first + [sample for sample in samples if sample.get("version") == versions[-1]][:NUM_SAMPLES]


def _text(value: Any) -> str:
    return escape("" if value is None else str(value))


def _reward(value: Any) -> str:
    is_number = isinstance(value, int | float) and math.isfinite(value)
    return f"{value:.3f}" if is_number else ""

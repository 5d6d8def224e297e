"""What a run left in its folder, for people: the few facts, and a page with pictures.

The folder may be that of a run that is still writing. The page is one HTML file that stands on its own: styles and
pictures inside, nothing fetched, no script.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np

from coati import __version__
from coati.counting import format_seconds
from coati.errors import ConfigError, DataError
from coati.monitor.metrics import read_jsonl
from coati.monitor.time_use import RunTimes
from coati.monitor.timeline import Span

T = TypeVar("T")

_METRICS: Final = "metrics.jsonl"
_SPANS: Final = "spans.jsonl"
NUM_SAMPLES: Final = 4
_ENDS: Final = 10  # versions at either end over which the mean reward is taken
_TERM: Final = "reward/term_"
_MAX_POINTS: Final = 100

_CURVES: Final = (
    ("reward/mean", "mean reward"),
    ("kl/per_sample", "KL to the initial model, nats per sample"),
    ("response/length", "response tokens"),
    ("response/cut_fraction", "fraction of responses cut at the limit"),
    ("policy/entropy", "entropy, nats per token"),
    ("policy/clip_fraction", "fraction of tokens clipped"),
    ("policy/grad_norm", "norm of the actor's gradient"),
    ("value/explained_variance", "explained variance of the critic"),
    ("optim/actor_lr", "learning rate of the actor"),
    ("train/age_mean", "age of the data, versions"),
    ("trainer/busy_share", "trainer: share of time training"),
    ("maker/busy_share", "makers: share of time working"),
)

_STYLE: Final = """
:root { color-scheme: light dark; --line: #8884; --soft: #8881; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1200px; margin: 2rem auto; padding: 0 1rem;
  color: light-dark(#222, #ddd); background: light-dark(#fff, #16181c); }
h1 { font-size: 1.6rem; margin-bottom: 0; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
svg { width: 100%; height: auto; display: block; } svg text { font: 11px sans-serif; fill: currentColor; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
td { padding: .2rem .7rem; text-align: right; border-bottom: 1px solid var(--line); }
td:first-child { text-align: left; } tr.idle { background: var(--soft); }
tr.head td, tr.total td { font-weight: 600; } td.text { text-align: left; overflow-wrap: anywhere; }
.prompt { opacity: .6; } .facts { display: flex; flex-wrap: wrap; gap: .6rem 2.4rem; padding: 0; list-style: none; }
.facts b { display: block; font-size: 1.25rem; }
.curves { display: grid; grid-template-columns: repeat(auto-fill, minmax(290px, 1fr)); gap: 1rem; }
figure { margin: 0; } figcaption { font-size: .85rem; font-weight: 600; margin-left: 2.6rem; }
pre { columns: 20rem; font-size: .8rem; overflow-wrap: anywhere; white-space: pre-wrap; }
.wide { overflow-x: auto; } footer { margin-top: 3rem; font-size: .8rem; opacity: .7; }
"""


@dataclass(frozen=True, kw_only=True)
class RunFolder:
    """What a run has written so far."""

    path: Path
    settings: str
    """config.toml; empty if the folder has none."""
    state: Mapping[str, Any]
    """state.json, which runs on Ray write."""
    metrics: list[dict[str, Any]]
    """One row of numbers per training step."""
    samples: list[dict[str, Any]]
    spans: dict[str, list[Span]]
    """What each actor did when."""

    @property
    def name(self) -> str:
        """What the folder is called: the name of the run, unless run.output says otherwise."""
        return self.path.resolve().name

    def series(self, metric: str) -> list[tuple[float, float]]:
        """Return the finite values of one metric, with their training steps."""
        points = ((row["step"], row[metric]) for row in self.metrics if metric in row and "step" in row)
        return [(float(x), float(y)) for x, y in points if math.isfinite(x) and math.isfinite(y)]


def read_run(path: Path) -> RunFolder:
    """Read a run's folder; ConfigError if it is none, DataError if a file in it is damaged."""
    rule = f"RUN_FOLDER must be the output folder of a run (its run.output), got {str(path)!r}"
    if not path.is_dir():
        raise ConfigError(f"{rule}, which {'is a file' if path.exists() else 'does not exist'}.")
    if not (path / _METRICS).exists() and not (path / _SPANS).exists():
        raise ConfigError(f"{rule}, which has neither {_METRICS} nor {_SPANS}.")
    run = RunFolder(
        path=path,
        settings=_read(path / "config.toml", lambda file: file.read_text(encoding="utf-8"), ""),
        state=_read(path / "state.json", lambda file: json.loads(file.read_bytes()), {}),
        metrics=_read(path / _METRICS, read_jsonl, []),
        samples=_read(path / "samples.jsonl", read_jsonl, []),
        spans=_read(path / _SPANS, _read_spans, {}),
    )
    if not run.metrics and not run.spans:
        raise ConfigError(f"the run in {str(path)!r} has written nothing yet. Try again after its first step.")
    return run


def _read(path: Path, parse: Callable[[Path], T], default: T) -> T:
    try:
        return parse(path) if path.exists() else default
    except DataError:
        raise
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{path} cannot be read: {error}. Restore the file, or its permissions.") from None


def _read_spans(path: Path) -> dict[str, list[Span]]:
    spans: dict[str, list[Span]] = {}
    for row in read_jsonl(path):
        spans.setdefault(row.pop("actor", ""), []).append(Span(**row))
    return spans


def render_page(run: RunFolder, times: RunTimes | None) -> str:
    """Return the page. Parts for which the run wrote nothing are left out, and the page says so."""
    body = [
        f"<h1>{escape(run.name)}</h1>",
        '<ul class="facts">',
        *(f"<li><b>{escape(value)}</b>{escape(name)}</li>" for name, value in headline(run, times)),
        "</ul>",
        "<h2>Where the time went</h2>",
        _times(times),
        "<h2>Learning</h2>",
        "<p>Over training steps.</p>",
        f'<div class="curves">{_curves(run) or "No metric has two points yet."}</div>',
        "<h2>Samples</h2>",
        _samples(run.samples),
        "<h2>Settings</h2>",
        f"<pre>{escape(run.settings) or 'The folder has no config.toml.'}</pre>",
        f"<footer>coati {__version__}, from {escape(str(run.path))}</footer>",
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(run.name)}: coati report</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def headline(run: RunFolder, times: RunTimes | None) -> list[tuple[str, str]]:
    """Return the few facts at the top of a report as (name, value) pairs, as far as the run has them."""
    state = run.state
    facts = [("status", str(state.get("message") or state["status"]))] if "status" in state else []
    rewards = [reward for _, reward in run.series("reward/mean")]
    if rewards:
        ends = max(1, min(_ENDS, len(rewards) // 4))
        first, last = sum(rewards[:ends]) / ends, sum(rewards[-ends:]) / ends
        versions = "version" if ends == 1 else f"{ends} versions"
        facts.append((f"mean reward, first and last {versions}", f"{first:.3f} → {last:.3f}"))
    if run.metrics:
        facts.append(("training steps", f"{len(run.metrics):,}"))
    samples = sum(value for _, value in run.series("maker/samples"))
    if samples:
        facts.append(("samples", f"{samples:,.0f}"))
    for name in ("maker/dropped", "maker/quarantined"):
        if lost := sum(value for _, value in run.series(name)):
            facts.append((f"samples {name.removeprefix('maker/')}", f"{lost:,.0f}"))
    for name in ("restarts/makers", "restarts/trainers"):
        if number := sum(value for _, value in run.series(name)[-1:]):
            facts.append((name.replace("/", " of "), f"{number:,.0f}"))
    if times is not None:
        facts.append(("time, without start-up", format_seconds(times.elapsed)))
        if samples and times.elapsed > 0:
            facts.append(("samples per second", f"{samples / times.elapsed:,.1f}"))
    return facts


def _times(times: RunTimes | None) -> str:
    if times is None:
        return "<p>The run wrote no spans (logging.spans_kept = 0, or an older version).</p>"
    rows = [
        f'<tr class="{kind}">' + "".join(f"<td>{escape(text)}</td>" for text in cells) + "</tr>"
        for kind, cells in times.table()
    ]
    return f'<p>{escape(times.verdict())}</p>\n<div class="wide"><table>{"".join(rows)}</table></div>'


def _curves(run: RunFolder) -> str:
    terms = sorted({name for row in run.metrics for name in row if name.startswith(_TERM)})
    titles = dict(_CURVES[:1]) | {name: f"reward term: {name.removeprefix(_TERM)}" for name in terms} | dict(_CURVES)
    return "".join(
        f"<figure><figcaption>{escape(title)}</figcaption>{curve(points)}</figure>"
        for name, title in titles.items()
        if len(points := run.series(name)) > 1
    )


def curve(points: Sequence[tuple[float, float]]) -> str:
    """Draw one metric over the training steps as SVG; many points are averaged in groups."""
    groups = min(len(points), _MAX_POINTS)
    xs, ys = ([float(part.mean()) for part in np.array_split(column, groups)] for column in np.array(points).T)
    low, high = min(ys), max(ys)
    left, right, top, bottom = 60, 330, 12, 130
    across, up = (right - left) / ((xs[-1] - xs[0]) or 1.0), (bottom - top) / ((high - low) or 1.0)
    line = " ".join(
        f"{left + (x - xs[0]) * across:.1f},{bottom - (y - low) * up:.1f}" for x, y in zip(xs, ys, strict=True)
    )
    labels = ((left - 5, top + 4, high), (left - 5, bottom + 4, low), (left + 10, 148, xs[0]), (right, 148, xs[-1]))
    return (
        '<svg viewBox="0 0 340 152" text-anchor="end">'
        + "".join(f'<text x="{x}" y="{y}">{value:,.4g}</text>' for x, y, value in labels)
        + f'<path d="M{left} {top}V{bottom}H{right}" fill="none" stroke="currentColor" opacity="0.2"/>'
        + f'<polyline points="{line}" fill="none" stroke="#2f7fc1" stroke-width="1.5"/></svg>'
    )


def _samples(samples: Sequence[Mapping[str, Any]]) -> str:
    if not samples:
        return "<p>The run kept no samples.</p>"
    rows = "".join(
        f"<tr><td>{sample['version']}</td><td>{sample['reward']:.3f}</td>"
        f'<td class="text"><span class="prompt">{escape(sample["prompt"])}</span>{escape(sample["response"])}</td></tr>'
        for sample in chosen_samples(samples)
    )
    head = '<tr class="head"><td>version</td><td>reward</td><td class="text">prompt and response</td></tr>'
    return f"<table>{head}{rows}</table>"


def chosen_samples(samples: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return a few samples of the first version, and a few of the last."""
    ends = sorted({samples[0]["version"], samples[-1]["version"]})
    return [
        sample for end in ends for sample in [sample for sample in samples if sample["version"] == end][:NUM_SAMPLES]
    ]

"""The content of a run's report, for finished and running runs: key figures, metric curves, samples, and times."""

import html
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from coati.config.plan import read_json
from coati.errors import ConfigError, DataError, format_seconds
from coati.monitor.metrics import read_jsonl
from coati.monitor.timeline import ACTIVITIES, Span, is_idle
from coati.run_folder import MARKER

_METRICS: Final = "metrics.jsonl"
_SPANS: Final = "spans.jsonl"
_NUM_SAMPLES: Final = 3
_TERM: Final = "reward/term_"
_BARS: Final = "▁▂▃▄▅▆▇█"
_MAX_BARS: Final = 24  # of a sparkline in a table of 80 columns
_MAX_POINTS: Final = 400  # of a chart
_CHART: Final = """<svg width="470" height="150" viewBox="-10 -26 470 150" font-family="sans-serif" font-size="11">
<text y="-12" font-size="13">{title}</text><rect width="400" height="100" fill="none" stroke="#ddd"/>
<polyline fill="none" stroke="#2458a6" stroke-width="1.5" points="{line}"/>
<text x="404" y="10" fill="#777">{high:,.4g}</text>
<text x="404" y="98" fill="#777">{low:,.4g}</text>
<text y="114" fill="#777">step {first:,.0f}</text><text x="400" y="114" text-anchor="end" fill="#777">{last:,.0f}</text>
</svg>"""

_CURVES: Final = (
    ("reward/mean", "mean reward"),
    ("kl/per_sample", "KL to initial model (nats/sample)"),
    ("response/length", "response length (tokens)"),
    ("response/cut_fraction", "truncated responses (fraction)"),
    ("policy/entropy", "policy entropy (nats/token)"),
    ("policy/clip_fraction", "clipped tokens (fraction)"),
    ("policy/grad_norm", "actor gradient norm"),
    ("value/explained_variance", "critic explained variance"),
    ("optim/actor_lr", "actor learning rate"),
    ("train/age_mean", "data staleness (versions)"),
    ("trainer/busy_share", "trainer busy (fraction of time)"),
    ("maker/busy_share", "makers busy (fraction of time)"),
)

# The first of these activities ends the start-up of a run.
_FIRST_WORK: Final = frozenset({"generate", "train", "wait_data"})
TOTALS: Final = ("worked", "waited", "absent", "other")
_MAKER_WAITS: Final = {
    "wait_rewards": "waited for reward functions",
    "wait_weights": "waited for weights",
    "wait_room": "waited for room in the buffer",
}
_NOTABLE_SHARE: Final = 0.15
_PAUSE_SECONDS: Final = 5.0  # without a span of any actor: the run had ended and was resumed
_MAX_COLUMNS: Final = 6


@dataclass(frozen=True, kw_only=True)
class RunFolder:
    """The files of a run, as far as they are written."""

    path: Path
    metrics: list[dict[str, Any]]  # one row of numbers per training step
    samples: list[dict[str, Any]]
    spans: dict[str, list[Span]]  # by actor
    error: str = ""  # the error that ended the run
    is_sync: bool = False

    def series(self, metric: str) -> list[tuple[float, float]]:
        """Return the finite values of a metric as (step, value) points."""
        points = ((row["step"], row[metric]) for row in self.metrics if metric in row and "step" in row)
        return [(float(x), float(y)) for x, y in points if math.isfinite(x) and math.isfinite(y)]


def read_run(path: Path) -> RunFolder:
    """Read a run's folder. ConfigError if it is not the folder of a run, DataError if a file in it is damaged."""
    rule = f"RUN_FOLDER must be the output folder of a run (its run.output), got {str(path)!r}"
    if not path.is_dir():
        raise ConfigError(f"{rule}, which {'is a file' if path.exists() else 'does not exist'}.")
    cause = file.read_text(encoding="utf-8") if (file := path / "error.txt").is_file() else ""
    if not (path / _METRICS).exists() and not (path / _SPANS).exists() and not cause:
        raise ConfigError(f"{rule}, which has neither {_METRICS} nor {_SPANS}.")
    metrics, samples, rows = map(_rows, (path / _METRICS, path / "samples.jsonl", path / _SPANS))
    spans: dict[str, list[Span]] = {}
    try:
        for row in rows:
            spans.setdefault(row.pop("actor"), []).append(Span(**row))
    except (KeyError, TypeError) as error:
        raise DataError(f"{path / _SPANS} cannot be read: {error}. Restore the file.") from None
    is_sync = bool((read_json(path / MARKER) or {}).get("is_sync"))
    run = RunFolder(path=path, metrics=metrics, samples=samples, spans=spans, error=cause, is_sync=is_sync)
    if not run.metrics and not run.spans and not cause:
        raise ConfigError(f"the run in {str(path)!r} has written nothing yet. Try again after its first step.")
    return run


def _rows(path: Path) -> list[dict[str, Any]]:
    try:
        return read_jsonl(path) if path.exists() else []
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}. Restore the file, or its permissions.") from None


def headline(run: RunFolder, times: "RunTimes | None") -> list[tuple[str, str]]:
    """Return the key figures at the top of a report as (name, value) pairs. Unknown ones are left out."""
    facts: list[tuple[str, str]] = []
    if rewards := [reward for _, reward in run.series("reward/mean")]:
        facts.append(("mean reward, first → last", "{:.3f} → {:.3f}".format(*first_and_last(rewards))))
    if run.metrics:
        facts.append(("training steps", f"{max(row['step'] for row in run.metrics):,}"))
    for kind in ("makers", "trainers"):
        if restarts := run.series(f"restarts/{kind}")[-1:]:
            facts += [(f"{kind[:-1]} restarts", f"{restarts[0][1]:,.0f}")] * bool(restarts[0][1])
    if times is not None:
        facts.append(("time without start-up and pauses", format_seconds(times.elapsed)))
    return facts


def first_and_last(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean of the first and of the last quarter of the values, at most ten values each."""
    ends = max(1, min(10, len(values) // 4))
    return statistics.fmean(values[:ends]), statistics.fmean(values[-ends:])


def held_out_scores(folder: Path) -> list[str]:
    """Return a line per evaluation set of a run, with its first and its last mean score."""
    ends: dict[str, list[tuple[int, float]]] = {}  # the first and the last
    for row in _rows(folder / "evaluations.jsonl"):
        if score := next((name for name in row if name.startswith("avg@")), ""):
            ends.setdefault(f"{row['name']} {score}", [])[1:] = [(row["version"], row[score])]
    names, lines = {0: "before", (read_json(folder / "model/coati.json") or {}).get("version"): "after"}, []
    for title, points in ends.items():
        when = " → ".join(names.get(version, f"version {version}") for version, _ in points)
        values = " → ".join(f"{score:.3f}" for _, score in points)
        lines.append(f"{title}: {values} ({when}{' training' * (points[-1][0] in names)})")
    return lines


def curves(run: RunFolder) -> dict[str, tuple[list[tuple[float, float]], str]]:
    """Return the metrics with at least two points, by title: (step, value) points, and the text "first → last"."""
    terms = sorted({name for row in run.metrics for name in row if name.startswith(_TERM)})
    scores = {name for row in run.metrics for name in row if name.startswith("eval/") and "@" in name}
    shown = [name for name in sorted(scores) if not name.endswith(("_low", "_high"))]
    titles = {name: name.removeprefix("eval/").replace("/", " ") for name in shown} | dict(_CURVES[:1])
    titles |= {name: f"reward term: {name.removeprefix(_TERM)}" for name in terms} | dict(_CURVES)
    found = {}
    for name, title in titles.items():
        if len(points := run.series(name)) > 1:
            values = [value for _, value in points]
            ends = (values[0], values[-1]) if name.startswith("eval/") else first_and_last(values)
            found[title] = (points, "{:,.4g} → {:,.4g}".format(*ends))
    return found


def sparkline(values: Sequence[float]) -> str:
    """Draw values as bars, scaled from the smallest to the largest. Long series are averaged in groups.

    >>> sparkline([0.0, 1.0, 2.0, 7.0])
    '▁▂▃█'
    """
    means = _thinned(values, _MAX_BARS)
    low, height = min(means), (max(means) - min(means)) or 1.0
    return "".join(_BARS[round((mean - low) / height * (len(_BARS) - 1))] for mean in means)


def chart(title: str, points: Sequence[tuple[float, float]]) -> str:
    """Draw a metric over training steps as an SVG chart, with the ends of both axes labelled."""
    steps, values = (_thinned(numbers, _MAX_POINTS) for numbers in zip(*points, strict=True))
    low, high = min(values), max(values)
    width, height = (steps[-1] - steps[0]) or 1.0, (high - low) or 1.0
    line = " ".join(
        f"{400 * (step - steps[0]) / width:.1f},{96 - 92 * (value - low) / height:.1f}"
        for step, value in zip(steps, values, strict=True)
    )
    ends = {"first": points[0][0], "last": points[-1][0]}
    return _CHART.format(title=html.escape(title), line=line, low=low, high=high, **ends)


def _thinned(values: Sequence[float], limit: int) -> list[float]:
    """Return at most `limit` values: means of neighbours."""
    size = -(-len(values) // limit)
    return [statistics.fmean(values[start : start + size]) for start in range(0, len(values), size)]


def chosen_samples(samples: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the first few samples of the first version and of the last."""
    ends = sorted({samples[0]["version"], samples[-1]["version"]})
    return [
        sample for end in ends for sample in [sample for sample in samples if sample["version"] == end][:_NUM_SAMPLES]
    ]


@dataclass(frozen=True)
class RunTimes:
    """How all actors spent one window of time, from the first work to the last span."""

    elapsed: float  # length of the window, seconds
    actors: Mapping[str, Mapping[str, float]]
    """By actor: share of the window by activity, and of `TOTALS`. Absent: before its first and after its last span."""

    def columns(self) -> dict[str, Mapping[str, float]]:
        """Return the shares by actor; of many actors, the means by kind."""
        if len(self.actors) <= _MAX_COLUMNS:
            return dict(self.actors)
        kinds: dict[str, list[Mapping[str, float]]] = {}
        for actor, shares in self.actors.items():
            kinds.setdefault(actor.rstrip("0123456789").rstrip("-"), []).append(shares)
        every = (*ACTIVITIES, *TOTALS)
        return {
            f"{kind}, mean of {len(members)}": {what: _mean(members, what) for what in every}
            for kind, members in kinds.items()
        }

    def verdict(self, *, is_sync: bool = False) -> str:
        """Return a sentence or two on what limits the run; docs/fast.md says what helps."""
        trainers = [shares for shares in self.actors.values() if "train" in shares]
        makers = [shares for shares in self.actors.values() if "generate" in shares]
        name, shares = max(self.actors.items(), key=lambda actor: actor[1]["worked"])
        busiest = f"{name} worked {shares['worked']:.0%} of the time, more than any other actor."
        if not trainers or not makers:
            return busiest
        data = _mean(trainers, "wait_data")
        # A maker that has left, or joined late, does not count while it is absent.
        present = max(1e-9, sum(1.0 - shares["absent"] for shares in makers))
        waits = {what: _mean(makers, cause) * len(makers) / present for cause, what in _MAKER_WAITS.items()}
        waits["had finished or were absent"] = min(shares["absent"] for shares in makers)
        longest = max(waits, key=waits.__getitem__)
        maker_waits = f"makers {longest} ({waits[longest]:.0%})"
        if max(data, waits[longest]) < _NOTABLE_SHARE:
            limit = "No actor waited long: makers and trainers are in balance."
        elif data < _NOTABLE_SHARE:
            limit = f"Training is the bottleneck: {maker_waits}."
        elif waits[longest] < _NOTABLE_SHARE:
            limit = f"Generation is the bottleneck: trainers waited for data ({data:.0%})."
        else:
            turns = "took turns, as always with --sync" if is_sync else "took turns"
            limit = f"Makers and trainers {turns}: trainers waited for data ({data:.0%}), and {maker_waits}."
        return f"{busiest} {limit}"


def run_times(spans: Mapping[str, Sequence[Span]]) -> RunTimes | None:
    """Add up the spans of all actors within the window of the run; None if no actor has started to work."""
    spans = _without_pauses(spans)
    every = [span for own in spans.values() for span in own]
    start = min((span.start for span in every if span.what in _FIRST_WORK), default=None)
    if start is None:
        return None
    end = max(span.end for span in every)
    names = sorted(spans, key=lambda name: (len(name), name))  # maker-2 before maker-10
    return RunTimes(end - start, {name: _shares(spans[name], start, end) for name in names})


def _without_pauses(spans: Mapping[str, Sequence[Span]]) -> dict[str, list[Span]]:
    """Return the spans, shifted so that there is no gap where the run had ended and was resumed."""
    moved: dict[str, list[Span]] = {name: [] for name in spans}
    every = sorted(((name, span) for name, own in spans.items() for span in own), key=lambda one: one[1].start)
    end, pauses = every[0][1].start if every else 0.0, 0.0
    for name, span in every:
        pauses += span.start - end if span.start - end >= _PAUSE_SECONDS else 0.0
        end = max(end, span.end)
        moved[name].append(span._replace(start=span.start - pauses, end=span.end - pauses))
    return moved


def _shares(spans: Sequence[Span], start: float, end: float) -> dict[str, float]:
    elapsed = max(end - start, 1e-9)
    shares: dict[str, float] = {}
    for span in spans:
        if span.end > start:
            shares[span.what] = shares.get(span.what, 0.0) + (span.end - max(span.start, start)) / elapsed
    worked = sum(share for what, share in shares.items() if not is_idle(what))
    waited = sum(share for what, share in shares.items() if is_idle(what))
    first, last = max(start, min(span.start for span in spans)), max(start, max(span.end for span in spans))
    absent = 1.0 - max(0.0, last - first) / elapsed
    totals = (worked, waited, absent, max(0.0, 1.0 - worked - waited - absent))
    return shares | dict(zip(TOTALS, totals, strict=True))


def _mean(actors: Sequence[Mapping[str, float]], what: str) -> float:
    return sum(shares.get(what, 0.0) for shares in actors) / len(actors)

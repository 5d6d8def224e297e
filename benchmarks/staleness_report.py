"""Tables, verdicts and the plot of `benchmarks/staleness.py`: pure functions from results to text.

`results` is the content of results.json: facts about the machine and, for each cell of the grid (setting, method, η),
every measure as a list with one number per seed. The SVG plot is written without a plotting package, so that it stays
small and changes only if numbers change.
"""

import json
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

LABELS = {
    "naive": "naive PPO",
    "decoupled": "decoupled PPO",
    "truncated": "truncated weights",
    "sequence": "truncated, per response",
    "masked": "masked weights",
    "unweighted": "decoupled, no weights",
    "naive_kl_loss": "naive, KL in the loss",
    "truncated_kl_loss": "truncated, KL in the loss",
}
COLOURS = {
    "naive": "#3b3b3b",
    "decoupled": "#d98200",
    "truncated": "#0072b2",
    "sequence": "#009e73",
    "masked": "#56b4e9",
    "unweighted": "#e69f00",
    "naive_kl_loss": "#8c8c8c",
    "truncated_kl_loss": "#7f4fc9",
}

# Measure, label, number format, and whether the range over the seeds is shown.
MEASURES: tuple[tuple[str, str, Callable[[float], str], bool], ...] = (
    ("reward", "reward", lambda value: f"{value:.2f}", True),
    ("objective", "reward − KL penalty", lambda value: f"{value:.2f}", True),
    ("area", "mean reward while training", lambda value: f"{value:.2f}", True),
    ("kl", "KL, nats per sample", lambda value: f"{value:.1f}", False),
    ("age_mean", "mean age", lambda value: f"{value:.2f}", False),
    ("distinct", "distinct samples", lambda value: f"{value:.0%}", False),
    ("clip_fraction", "tokens clipped", lambda value: f"{value:.1%}", False),
    ("effective_samples", "effective sample size", lambda value: f"{value:.0%}", False),
)
PLOTTED = (("reward", "final reward"), ("objective", "final reward − KL penalty"))

_INK, _GRID = "#2b2b2b", "#e4e4e4"
_PANEL_WIDTH, _PANEL_HEIGHT, _LEFT, _TOP, _GAP = 250, 170, 62, 64, 34


class Spread(NamedTuple):
    """Summary of one measure over several seeds."""

    median: float
    low: float
    high: float


Key = tuple[str, str, int]
"""Setting, method and η."""


def spread(values: Sequence[float | None]) -> Spread | None:
    """Return the median and range over seeds, or None if no seed has a value.

    >>> spread([3.0, 1.0, 2.0])
    Spread(median=2.0, low=1.0, high=3.0)
    """
    known = [value for value in values if value is not None]
    return Spread(statistics.median(known), min(known), max(known)) if known else None


def spreads_of(results: Mapping[str, Any], measure: str) -> dict[Key, Spread]:
    """Return the spread of one measure in every cell that has it."""
    found = {
        (cell["setting"], cell["method"], cell["eta"]): spread(cell["measures"][measure]) for cell in results["cells"]
    }
    return {key: value for key, value in found.items() if value is not None}


def table(results: Mapping[str, Any], setting: str) -> str:
    """Return a Markdown table of one setting: measures and methods as rows, η as columns."""
    etas, methods = results["etas"], results["methods"]
    lines = [
        "| | method | " + " | ".join(f"η = {eta}" for eta in etas) + " |",
        "|---|---|" + "---|" * len(etas),
    ]
    for measure, name, written, has_range in MEASURES:
        spreads = spreads_of(results, measure)
        for method in methods:
            row = [_entry(spreads.get((setting, method, eta)), written, has_range=has_range) for eta in etas]
            if any(row):
                lines.append(f"| {name} | {LABELS[method]} | " + " | ".join(entry or "–" for entry in row) + " |")
    return "\n".join(lines)


def _entry(found: Spread | None, written: Callable[[float], str], *, has_range: bool) -> str:
    if found is None:
        return ""
    middle = written(found.median)
    return f"{middle} ({written(found.low)} to {written(found.high)})" if has_range else middle


def verdicts(results: Mapping[str, Any], setting: str, measure: str) -> list[str]:
    """Return, per method, the η at which all its seeds are above, or below, all seeds of naive PPO."""
    spreads = spreads_of(results, measure)
    lines = []
    for method in results["methods"]:
        better, worse = [], []
        for eta in results["etas"]:
            own, naive = spreads.get((setting, method, eta)), spreads.get((setting, "naive", eta))
            if own is None or naive is None:
                continue
            if own.low > naive.high:
                better.append(eta)
            elif own.high < naive.low:
                worse.append(eta)
        if method != "naive":
            parts = [f"above at η = {_listed(better)}"] * bool(better) + [f"below at η = {_listed(worse)}"] * bool(
                worse
            )
            lines.append(f"{LABELS[method]}: {', '.join(parts) or 'overlaps everywhere'}")
    return lines


def cost_of_age(results: Mapping[str, Any], setting: str, measure: str) -> list[str]:
    """Return each method's median at the smallest and the largest η."""
    spreads, first, last = spreads_of(results, measure), min(results["etas"]), max(results["etas"])
    return [
        f"{LABELS[method]} {spreads[setting, method, first].median:.2f} → {spreads[setting, method, last].median:.2f}"
        for method in results["methods"]
        if (setting, method, first) in spreads and (setting, method, last) in spreads
    ]


def noise(results: Mapping[str, Any], setting: str, measure: str) -> list[str]:
    """Return the mean difference of each η from the smallest, over seeds, with standard error; * if beyond two."""
    lines = []
    for method in results["methods"]:
        values = {
            cell["eta"]: cell["measures"][measure]
            for cell in results["cells"]
            if (cell["setting"], cell["method"]) == (setting, method)
        }
        first = values.pop(min(values))
        parts = []
        for eta, others in values.items():
            differences = [other - one for one, other in zip(first, others, strict=True)]
            mean = statistics.fmean(differences)
            error = statistics.stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else math.inf
            parts.append(f"η = {eta}: {mean:+.3f} ± {error:.3f}{'*' if abs(mean) > 2 * error else ''}")
        lines.append(f"{LABELS[method]} {', '.join(parts)}")
    return lines


_WRITTEN = {
    "whole": "by one version each",
    "in-flight": "in equal parts by all versions up to the one that was trained on",
}


# Quantiles of Student's t for 95 % intervals, by number of seeds.
_T = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and the half-width of its 95 % interval.

    >>> [round(number, 2) for number in mean_interval([1.0, 2.0, 3.0])]
    [2.0, 2.48]
    """
    if len(values) < 2:
        return values[0], math.inf
    quantile = _T.get(len(values), 1.96 + 3.0 / (len(values) - 1))  # slightly conservative
    return statistics.fmean(values), quantile * statistics.stdev(values) / math.sqrt(len(values))


def writing_tables(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return tables of the mean of each way of writing and their differences, paired by seed."""
    return "\n\n".join(_writing_table(rows, measure, name) for measure, name in (*PLOTTED, ("area", "mean reward")))


def _writing_table(rows: Sequence[Mapping[str, Any]], measure: str, name: str) -> str:
    found: dict[tuple[str, str, int, str], dict[int, float]] = {}
    for row in rows:
        found.setdefault((row["setting"], row["method"], row["eta"], row["writing"]), {})[row["seed"]] = row[measure]
    heads = ["setting", "method", "η", "seeds", *_WRITTEN, "in-flight − whole"]
    lines = [f"{name}, mean (95 % interval)", "", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for setting, method, eta in sorted({key[:3] for key in found}):
        whole, in_flight = (found.get((setting, method, eta, writing), {}) for writing in _WRITTEN)
        gains = [in_flight[seed] - whole[seed] for seed in whole if seed in in_flight]
        parts = [_with_interval(list(way.values()), sign="") for way in (whole, in_flight)]
        parts.append(_with_interval(gains, sign="+"))
        lines.append(f"| {setting} | {LABELS[method]} | {eta} | {len(whole)} | {' | '.join(parts)} |")
    return "\n".join(lines)


def _with_interval(values: Sequence[float], *, sign: str) -> str:
    if not values:
        return ""
    mean, reach = mean_interval(values)
    return f"{mean:{sign}.3f} ± {reach:.3f}"


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def summary(results: Mapping[str, Any]) -> str:
    """Return the generated part of the docs page."""
    facts, first, last = results["facts"], min(results["etas"]), max(results["etas"])
    lead = results["lead"]
    ages = "min(v, η)" if lead < 0 else f"as the ledger distributes it with lead {lead}"
    base = spread(facts["base_rewards"])
    assert base is not None
    parts = [
        f"Measured on {facts['machine']}, Python {facts['python']}, torch {facts['torch']}, transformers "
        f"{facts['transformers']}: {len(results['seeds'])} seeds, {facts['num_runs']} runs of "
        f"{facts['seconds'] / facts['num_runs']:.0f} s on average, one thread each. Median (lowest to highest seed). "
        f"The untrained model: reward {base.median:.2f} ({base.low:.2f} to {base.high:.2f}). Every batch had the "
        f"expected age, {ages}; responses were generated {_WRITTEN[results.get('writing', 'whole')]}; the largest "
        f"importance weight before truncation was {facts['ratio_max']:.0f}; "
        f"{facts['skipped']} batches were skipped because of non-finite gradients."
    ]
    for setting, about in results["settings"].items():
        lines = [f"### {setting}", about]
        for measure, name in PLOTTED:
            costs = "; ".join(cost_of_age(results, setting, measure))
            agreed = "; ".join(verdicts(results, setting, measure))
            lines.append(
                f"- {name}, median at η = {first} → {last}: {costs}.\n"
                f"- {name}, all seeds against all seeds of naive PPO: {agreed}.\n"
                f"- {name}, mean difference to η = {first}: {'; '.join(noise(results, setting, measure))}."
            )
        parts.append("\n\n".join([*lines[:2], "\n".join(lines[2:]), table(results, setting)]))
    return "\n\n".join(parts)


def with_block(page: str, name: str, text: str) -> str:
    """Return the page with `text` between its `<!-- made: name -->` and `<!-- end: name -->`."""
    pattern = re.compile(rf"(<!-- made: {re.escape(name)} -->\n).*?(<!-- end: {re.escape(name)} -->)", re.DOTALL)
    filled, count = pattern.subn(lambda found: f"{found[1]}{text}\n{found[2]}", page)
    if count != 1:
        raise ValueError(f"the page must have one block <!-- made: {name} --> … <!-- end: {name} -->, got {count}")
    return filled


def write_docs(results_path: Path, docs: Path) -> None:
    """Fill in docs/staleness.md and draw docs/staleness.svg."""
    results = json.loads(results_path.read_text(encoding="utf-8"))
    page = docs / "staleness.md"
    text = f"![Final reward, and final reward minus the KL penalty, against η](staleness.svg)\n\n{summary(results)}"
    page.write_text(with_block(page.read_text(encoding="utf-8"), "results", text), encoding="utf-8")
    (docs / "staleness.svg").write_text(plot(results), encoding="utf-8")


def nice_ticks(low: float, high: float, *, about: int = 5) -> list[float]:
    """Return evenly spaced round numbers that enclose [low, high].

    >>> nice_ticks(0.13, 0.87)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    raw = max(high - low, 1e-6) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 10) for index in range(first, max(last, first + 1) + 1)]


def plot(results: Mapping[str, Any]) -> str:
    """Return an SVG with a column of panels per setting and a row per measure: medians as lines, ranges as bars."""
    settings, methods = list(results["settings"]), results["methods"]
    width = _LEFT + len(settings) * (_PANEL_WIDTH + _GAP)
    height = _TOP + len(PLOTTED) * (_PANEL_HEIGHT + _GAP) + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="11" fill="{_INK}">',
        "<title>Final reward against staleness</title>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for index, method in enumerate(methods):
        x = _LEFT + 150 * index
        parts.append(f'<line x1="{x}" y1="18" x2="{x + 22}" y2="18" stroke="{COLOURS[method]}" stroke-width="2.5"/>')
        parts.append(f'<text x="{x + 28}" y="22" font-size="12">{LABELS[method]}</text>')
    for row, (measure, name) in enumerate(PLOTTED):
        spreads = spreads_of(results, measure)
        ticks = nice_ticks(min(s.low for s in spreads.values()), max(s.high for s in spreads.values()))
        top = _TOP + row * (_PANEL_HEIGHT + _GAP)
        middle = top + _PANEL_HEIGHT / 2
        parts.append(f'<text transform="translate(16 {middle:g}) rotate(-90)" text-anchor="middle">{name}</text>')
        for column, setting in enumerate(settings):
            left = _LEFT + column * (_PANEL_WIDTH + _GAP)
            if row == 0:
                parts.append(f'<text x="{left}" y="{top - 14}" font-size="13" font-weight="bold">{setting}</text>')
            parts += _panel(results, spreads, setting, ticks, left=left, top=top)
    label_y = height - 12
    for column in range(len(settings)):
        x = _LEFT + column * (_PANEL_WIDTH + _GAP) + _PANEL_WIDTH / 2
        parts.append(f'<text x="{x:g}" y="{label_y}" text-anchor="middle">η, versions that the data is old</text>')
    return "\n".join([*parts, "</svg>", ""])


def _panel(
    results: Mapping[str, Any],
    spreads: Mapping[Key, Spread],
    setting: str,
    ticks: Sequence[float],
    *,
    left: float,
    top: float,
) -> list[str]:
    etas, methods = results["etas"], results["methods"]

    def y_of(value: float) -> float:
        return top + _PANEL_HEIGHT * (ticks[-1] - value) / (ticks[-1] - ticks[0])

    def x_of(position: int, index: int) -> float:
        # Each η has a slot and each method its own offset in it, so that bars do not overlap.
        return left + _PANEL_WIDTH * (position + 0.5) / len(etas) + 6 * (index - (len(methods) - 1) / 2)

    parts = []
    for tick in ticks:
        y = y_of(tick)
        parts.append(
            f'<line x1="{left:g}" y1="{y:.1f}" x2="{left + _PANEL_WIDTH:g}" y2="{y:.1f}" stroke="{_GRID}"/>'
            f'<text x="{left - 5:g}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>'
        )
    for position, eta in enumerate(etas):
        x = left + _PANEL_WIDTH * (position + 0.5) / len(etas)
        parts.append(f'<text x="{x:.1f}" y="{top + _PANEL_HEIGHT + 15:g}" text-anchor="middle">{eta}</text>')
    for index, method in enumerate(methods):
        points = [
            (x_of(position, index), spreads[setting, method, eta])
            for position, eta in enumerate(etas)
            if (setting, method, eta) in spreads
        ]
        path = " ".join(f"{x:.1f},{y_of(found.median):.1f}" for x, found in points)
        colour = COLOURS[method]
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
        for x, found in points:
            parts.append(
                f'<line x1="{x:.1f}" y1="{y_of(found.low):.1f}" x2="{x:.1f}" y2="{y_of(found.high):.1f}" '
                f'stroke="{colour}" stroke-opacity="0.55" stroke-width="1.5"/>'
                f'<circle cx="{x:.1f}" cy="{y_of(found.median):.1f}" r="2.8" fill="{colour}"/>'
            )
    return parts

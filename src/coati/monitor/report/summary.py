"""The few facts that stand at the top of a report."""

from __future__ import annotations

from coati.monitor.performance import format_seconds
from coati.monitor.report.folder import RunFolder
from coati.monitor.report.time_use import RunTimes

_ENDS = 10  # versions at either end that the mean reward is taken over


def headline(run: RunFolder, times: RunTimes | None) -> list[tuple[str, str]]:
    """(name, value) pairs, of what the run has."""
    facts = []
    algorithm = run.settings.get("algorithm", {}).get("name")
    if algorithm:
        facts.append(("algorithm", str(algorithm)))
    rewards = [reward for _, reward in run.series("reward/mean")]
    if rewards:
        ends = max(1, min(_ENDS, len(rewards) // 4))
        first, last = sum(rewards[:ends]) / ends, sum(rewards[-ends:]) / ends
        facts.append((f"mean reward, first and last {_versions(ends)}", f"{first:.3f} → {last:.3f}"))
    steps = [step for step, _ in run.series("version")]
    if steps:
        facts.append(("training steps", f"{max(steps):,.0f}"))
    samples = sum(value for _, value in run.series("maker/samples"))
    if samples:
        facts.append(("samples", f"{samples:,.0f}"))
    if times is not None:
        facts.append(("time, without start-up", format_seconds(times.elapsed)))
        if samples and times.elapsed > 0:
            facts.append(("samples per second", f"{samples / times.elapsed:,.1f}"))
        facts.append((f"worked by the busiest actor ({times.busiest.actor})", f"{times.busiest_share:.0%}"))
    return facts


def _versions(count: int) -> str:
    return "version" if count == 1 else f"{count} versions"

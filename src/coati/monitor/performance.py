"""What a loop achieved: samples, tokens and FLOPs, over the time that its timeline says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from coati.experience import Experience
    from coati.monitor.timeline import Timeline


class WorkMeter:
    """Counts what a loop does from now on, and takes the time from the loop's timeline.

    `phases` says which activities of the timeline make up each phase; FLOPs are done in the first. The remaining time
    is the phase "other".
    """

    def __init__(self, title: str, timeline: Timeline, phases: Mapping[str, Sequence[str]]) -> None:
        self.title = title
        self.samples = 0
        self.tokens = 0
        """Of prompts and responses, without padding."""
        self.response_tokens = 0
        self.flops = 0.0
        self._timeline = timeline
        self._phases = phases
        self._began = self._latest = timeline.read()

    def add(self, experience: Experience, *, flops_per_token: float, flops_per_sample: float = 0.0) -> None:
        """Count a batch that is done."""
        samples, width = experience.sequences.shape  # [B, S]
        mask, action_mask = experience.attention_mask, experience.action_mask  # [B, S], [B, A]
        tokens = samples * width if mask is None else int(mask.sum())
        self.samples += samples
        self.tokens += tokens
        # Without an action mask every action is a response token.
        self.response_tokens += experience.action_log_probs.numel() if action_mask is None else int(action_mask.sum())
        self.flops += flops_per_token * tokens + flops_per_sample * samples
        self.mark()

    def mark(self) -> None:
        """Extend the measured period to now."""
        self._latest = self._timeline.read()

    @property
    def seconds(self) -> float:
        """The measured period, from the beginning to the latest mark."""
        return self._latest.after(self._began).elapsed

    @property
    def phase_seconds(self) -> dict[str, float]:
        """The time of each phase; together they make up `seconds`."""
        use = self._latest.after(self._began)
        seconds = {phase: use.spent(*activities) for phase, activities in self._phases.items()}
        return {**seconds, "other": max(use.elapsed - sum(seconds.values()), 0.0)}

    def render(self) -> str:
        """Return throughput, FLOP/s and time per sample by phase as three lines of plain text."""
        if self.samples == 0 or self.seconds == 0:
            return f"{self.title}: {self.samples} samples in {format_seconds(self.seconds)}, so nothing to measure"
        phases = self.phase_seconds
        first, computing = next(iter(phases.items()))
        parts = (
            f"{phase} {format_seconds(spent / self.samples)} ({spent / self.seconds:.0%})"
            for phase, spent in phases.items()
        )
        return (
            f"{self.title}: {self.samples:,} samples ({self.samples / self.seconds:,.2f}/s), {self.tokens:,} tokens "
            f"({self.tokens / self.seconds:,.0f}/s, {self.response_tokens:,} in responses) in "
            f"{format_seconds(self.seconds)}\n"
            f"  {self.flops / max(computing, 1e-9) / 1e9:,.2f} GFLOP/s in {first}, "
            f"{self.flops / self.seconds / 1e9:,.2f} GFLOP/s overall\n"
            f"  per sample {format_seconds(self.seconds / self.samples)}: {', '.join(parts)}"
        )


def format_seconds(seconds: float) -> str:
    """Return a duration with the unit that suits its size.

    >>> format_seconds(0.0123), format_seconds(12.3), format_seconds(754)
    ('12.3 ms', '12.3 s', '12 min 34 s')
    """
    if seconds >= 60:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes:,} min {rest:02d} s"
    unit, scale = ("s", 1.0) if seconds >= 1 or seconds == 0 else ("ms", 1e3) if seconds >= 1e-3 else ("us", 1e6)
    value = seconds * scale
    return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"

"""What a loop achieved: samples, tokens and FLOPs, over the time that its timeline says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from coati.experience_maker.base import Experience
    from coati.monitor.timeline import Timeline

_PREFIXES: Final = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


class WorkMeter:
    """Counts what a loop does from now on, and takes the time from the loop's timeline. Rates of an empty run are 0.

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

    @property
    def samples_per_second(self) -> float:
        """Throughput in samples, over the whole period."""
        return _ratio(self.samples, self.seconds)

    @property
    def flops_per_second(self) -> float:
        """Achieved FLOP/s in the phase that computes."""
        return _ratio(self.flops, next(iter(self.phase_seconds.values())))

    def render(self) -> str:
        """Return a summary as a few lines of plain text for a log."""
        seconds, phases = self.seconds, self.phase_seconds
        if self.samples == 0:
            return f"{self.title}: no samples in {format_seconds(seconds)}, so nothing to measure"
        width = max(map(len, phases))
        return "\n".join(
            [
                f"{self.title}: {self.samples:,} samples, {self.tokens:,} tokens "
                f"({self.response_tokens:,} in responses) in {format_seconds(seconds)}",
                f"  throughput   {_three_digits(self.samples_per_second)} samples/s, "
                f"{_three_digits(_ratio(self.tokens, seconds))} tokens/s "
                f"({_three_digits(_ratio(self.response_tokens, seconds))} in responses)",
                f"  compute      {format_flops(self.flops_per_second)} in {next(iter(phases))}, "
                f"{format_flops(_ratio(self.flops, seconds))} overall",
                f"  per sample   {format_seconds(seconds / self.samples)}",
                *(
                    f"    {phase:<{width}}  {format_seconds(spent / self.samples):>8}  {_ratio(spent, seconds):>4.0%}"
                    for phase, spent in phases.items()
                ),
            ]
        )


def format_flops(flops_per_second: float) -> str:
    """Return a rate with the unit that suits its size.

    >>> format_flops(1.84e9)
    '1.84 GFLOP/s'
    """
    for scale, prefix in _PREFIXES:
        if flops_per_second >= scale:
            return f"{_three_digits(flops_per_second / scale)} {prefix}FLOP/s"
    return f"{_three_digits(flops_per_second)} FLOP/s"


def format_seconds(seconds: float) -> str:
    """Return a duration with the unit that suits its size.

    >>> format_seconds(0.0123), format_seconds(12.3), format_seconds(754)
    ('12.3 ms', '12.3 s', '12 min 34 s')
    """
    if seconds >= 60:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes:,} min {rest:02d} s"
    for scale, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= scale:
            return f"{_three_digits(seconds / scale)} {unit}"
    return f"{_three_digits(seconds * 1e6)} us" if seconds > 0 else "0 s"


def _three_digits(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _ratio(amount: float, per: float) -> float:
    """Return amount / per, and 0 where nothing was measured."""
    return amount / per if per > 0 else 0.0

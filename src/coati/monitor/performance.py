"""The arithmetic of performance: FLOPs of a transformer, a timer of phases, and a summary a person can read.

Nothing here knows about Ray or torch. All times come from a monotonic clock that a test can replace.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from coati.errors import ConfigError

Clock = Callable[[], float]
"""Returns seconds that never run backwards; only differences mean anything."""

_PREFIXES: Final = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def transformer_flops(num_params: int, tokens: int, *, backward: bool, recompute: bool = False) -> float:
    """Estimate the FLOPs of one pass of a transformer over `tokens` tokens.

    With P parameters and N tokens::

        forward    2·P·N    a multiply and an add for each weight
        backward  +4·P·N    the same for the gradient of the inputs and for that of the weights
        recompute +2·P·N    gradient checkpointing runs the forward once more

    Attention scores are left out: at the lengths of RL from feedback they are small beside the weights.

    >>> transformer_flops(1_000, 10, backward=True)
    60000.0
    """
    if num_params < 0 or tokens < 0:
        raise ConfigError(f"num_params and tokens must be 0 or more, got {num_params} and {tokens}. Pass counts.")
    if recompute and not backward:
        raise ConfigError("recompute=True needs backward=True: only a backward pass recomputes. Drop one of them.")
    per_weight = 2 + (4 if backward else 0) + (2 if recompute else 0)
    return float(per_weight) * num_params * tokens


def generation_flops(num_params: int, *, prompt_tokens: int, response_tokens: int, num_sequences: int) -> float:
    """Estimate the FLOPs of sampling responses with a key-value cache.

    Each prompt token and each response token but the last of its sequence goes through the model once::

        2·P·(prompt_tokens + max(response_tokens − num_sequences, 0))

    The token counts are totals over all sequences, without padding.

    >>> generation_flops(1_000, prompt_tokens=8, response_tokens=6, num_sequences=2)
    24000.0
    """
    fed_back = max(response_tokens - num_sequences, 0)
    return transformer_flops(num_params, prompt_tokens + fed_back, backward=False)


class PhaseTimer:
    """Adds up the time spent in named phases.

    A phase opened inside another is booked under both names, `outer/inner`; the outer one's time includes it.
    Time counts even if the body raises. Not for sharing between threads.

    >>> timer = PhaseTimer()
    >>> with timer.phase("make"):
    ...     with timer.phase("generate"):
    ...         pass
    >>> sorted(timer.seconds)
    ['make', 'make/generate']
    """

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self._clock = clock
        self._open: list[tuple[str, float]] = []  # (full name, when it began), outermost first
        self.seconds: dict[str, float] = {}
        """Total time of each phase that has ended, by full name."""
        self.counts: dict[str, int] = {}
        """How often each phase has ended, by full name."""

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the body of a `with` statement."""
        depth = len(self._open)
        self.start(name)
        try:
            yield
        finally:
            self._close_down_to(depth)

    def start(self, name: str) -> None:
        """Open a phase; for hooks, which come in pairs of calls and not as a `with` body."""
        outer = f"{self._open[-1][0]}/" if self._open else ""
        self._open.append((outer + name, self._clock()))

    def stop(self, name: str) -> None:
        """Close the innermost open phase of that name, and whatever was left open inside it.

        Stopping what is not open does nothing: a loop that failed half way may be entered again.
        """
        for depth in range(len(self._open) - 1, -1, -1):
            full_name = self._open[depth][0]
            if full_name == name or full_name.endswith(f"/{name}"):
                self._close_down_to(depth)
                return

    def forget_open(self) -> None:
        """Drop the phases that are open, without booking their time."""
        self._open.clear()

    def _close_down_to(self, depth: int) -> None:
        now = self._clock()
        while len(self._open) > depth:
            full_name, began = self._open.pop()
            self.seconds[full_name] = self.seconds.get(full_name, 0.0) + now - began
            self.counts[full_name] = self.counts.get(full_name, 0) + 1


@dataclass(frozen=True, kw_only=True)
class PerformanceSummary:
    """What one process did, how long it took, and the rates that follow. Rates of an empty run are 0."""

    title: str
    """Whose performance this is."""
    samples: int
    """Sequences handled."""
    tokens: int
    """Tokens of these sequences, prompt and response, without padding."""
    response_tokens: int
    """Response tokens among them."""
    seconds: float
    """Wall time of the whole measured span."""
    phase_seconds: Mapping[str, float]
    """Wall time of each phase; together they make up `seconds`."""
    flops: float
    """Model FLOPs (padding not counted) that the work took."""
    compute_phase: str
    """The phase in which those FLOPs were done."""

    @property
    def samples_per_second(self) -> float:
        """Throughput in samples, over the whole span."""
        return _ratio(self.samples, self.seconds)

    @property
    def tokens_per_second(self) -> float:
        """Throughput in tokens, prompt and response, over the whole span."""
        return _ratio(self.tokens, self.seconds)

    @property
    def response_tokens_per_second(self) -> float:
        """Throughput in response tokens, over the whole span."""
        return _ratio(self.response_tokens, self.seconds)

    @property
    def seconds_per_sample(self) -> dict[str, float]:
        """Wall time per sample, by phase."""
        return {phase: _ratio(seconds, self.samples) for phase, seconds in self.phase_seconds.items()}

    @property
    def flops_per_second(self) -> float:
        """Achieved FLOP/s while computing: `flops` over the time of the compute phase."""
        return _ratio(self.flops, self.phase_seconds.get(self.compute_phase, 0.0))

    @property
    def overall_flops_per_second(self) -> float:
        """Achieved FLOP/s over the whole span, waiting included."""
        return _ratio(self.flops, self.seconds)

    def render(self) -> str:
        """Return the summary as a few lines of plain text for a log."""
        if self.samples == 0:
            return f"{self.title}: no samples in {format_seconds(self.seconds)}, so nothing to measure"
        lines = [
            f"{self.title}: {self.samples:,} samples, {self.tokens:,} tokens "
            f"({self.response_tokens:,} in responses) in {format_seconds(self.seconds)}",
            f"  throughput   {_three_digits(self.samples_per_second)} samples/s, "
            f"{_three_digits(self.tokens_per_second)} tokens/s "
            f"({_three_digits(self.response_tokens_per_second)} in responses)",
            f"  compute      {format_flops(self.flops_per_second)} in {self.compute_phase}, "
            f"{format_flops(self.overall_flops_per_second)} overall",
            f"  per sample   {format_seconds(_ratio(self.seconds, self.samples))}",
        ]
        name_width = max((len(phase) for phase in self.phase_seconds), default=0)
        for phase, seconds in self.seconds_per_sample.items():
            share = _ratio(self.phase_seconds[phase], self.seconds)
            lines.append(f"    {phase:<{name_width}}  {format_seconds(seconds):>8}  {share:>4.0%}")
        return "\n".join(lines)


class WorkMeter:
    """Counts what a loop of several phases does: samples, tokens, FLOPs and the time of each phase.

    The measured span goes from the first call to the latest one. Pickles as long as its clock does.
    """

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self.clock = clock
        self.samples = 0
        self._tokens = 0
        self._response_tokens = 0
        self._flops = 0.0
        self._timer = PhaseTimer(clock)
        self._began: float | None = None
        self._latest = 0.0

    def mark(self) -> None:
        """Extend the measured span to now."""
        self._latest = self.clock()
        if self._began is None:
            self._began = self._latest

    def start(self, phase: str) -> None:
        """Begin a phase. One that is still open was abandoned by an exception: its time is nobody's."""
        self.mark()
        self._timer.forget_open()
        self._timer.start(phase)

    def stop(self, phase: str) -> None:
        """End a phase; one that was not begun is ignored."""
        self._timer.stop(phase)
        self.mark()

    def add(self, *, samples: int, tokens: int, response_tokens: int, flops: float) -> None:
        """Count a piece of work that is done."""
        self.samples += samples
        self._tokens += tokens
        self._response_tokens += response_tokens
        self._flops += flops

    def summary(self, title: str, *, phases: Sequence[str], compute_phase: str, rest: str) -> PerformanceSummary:
        """Sum up; time outside `phases` is booked under the name `rest`."""
        seconds = 0.0 if self._began is None else self._latest - self._began
        phase_seconds = {phase: self._timer.seconds.get(phase, 0.0) for phase in phases}
        phase_seconds[rest] = max(seconds - sum(phase_seconds.values()), 0.0)
        return PerformanceSummary(
            title=title,
            samples=self.samples,
            tokens=self._tokens,
            response_tokens=self._response_tokens,
            seconds=seconds,
            phase_seconds=phase_seconds,
            flops=self._flops,
            compute_phase=compute_phase,
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

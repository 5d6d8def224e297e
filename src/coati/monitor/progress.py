"""What a run looks like in the terminal: a line of numbers."""

from __future__ import annotations

import datetime
from dataclasses import dataclass

from coati.counting import counted


@dataclass(frozen=True, kw_only=True)
class RunSnapshot:
    """A run at one moment, for the person in front of it. What is not known yet is None."""

    step: int
    """Training steps done."""
    total_steps: int
    """Training steps planned; 0 if there is no plan."""
    version: int
    """Version of the policy's weights."""
    reward: float | None = None
    """Mean reward of the newest samples."""
    kl: float | None = None
    """KL to the initial model, in nats per sample."""
    buffer_batches: int | None = None
    """Batches waiting in the replay buffer."""
    num_made: int = 0
    """Samples that makers have made."""
    num_trained: int = 0
    """Samples that were trained on; the later epochs of a version count as a part of them."""
    samples_per_second: float | None = None
    """Made in the last minute."""
    seconds_per_step: float | None = None
    """In the last minute, or since training began if no step ended in it; None before the first step."""
    elapsed: float = 0.0
    """Seconds since training began."""
    startup: float = 0.0
    """Seconds before that."""
    message: str = ""
    """What the run is doing, if the numbers do not show it."""
    restarts: int = 0
    """How often makers and trainers that died were started again."""

    evaluation: str = ""
    """What the last evaluation found."""

    @property
    def seconds_left(self) -> float | None:
        """Time to the end at the latest pace; None before the first step, after the last, without a plan."""
        if self.seconds_per_step is None or self.step >= self.total_steps:
            return None
        return self.seconds_per_step * (self.total_steps - self.step)


def plain_line(snapshot: RunSnapshot) -> str:
    """Return the snapshot as one line, as far as its numbers are known.

    >>> plain_line(RunSnapshot(step=30, total_steps=60, version=29, reward=0.5, seconds_per_step=0.4))
    'step 30/60 (50%), reward 0.500, version 29, 0:00:00 elapsed, 0:00:12 left'
    >>> plain_line(RunSnapshot(step=0, total_steps=60, version=0, message="loading models", elapsed=12.0))
    'loading models, 0:00:12 elapsed'
    """
    message, step, total = " ".join(snapshot.message.split()), snapshot.step, snapshot.total_steps
    times = [f"{_clock(snapshot.startup + snapshot.elapsed)} elapsed"]
    if snapshot.seconds_left is not None:
        times.append(f"{_clock(snapshot.seconds_left)} left")
    if message and step == 0:
        return ", ".join([message, *times])
    # Rounded down: 100% is for a run that is done.
    facts = [f"step {step}/{total} ({min(100 * step // total, 100)}%)" if total > 0 else f"step {step}"]
    if snapshot.reward is not None:
        facts.append(f"reward {snapshot.reward:.3f}")
    if snapshot.kl is not None:
        facts.append(f"KL {snapshot.kl:.2f}")
    facts.append(f"version {snapshot.version}")
    if snapshot.evaluation:
        facts.append(snapshot.evaluation)
    if snapshot.buffer_batches is not None:
        facts.append(f"buffer {snapshot.buffer_batches}")
    if snapshot.num_made and snapshot.samples_per_second is not None:
        digits = 0 if snapshot.samples_per_second >= 10 else 1
        rate = f"{snapshot.samples_per_second:,.{digits}f}/s"
        facts.append(f"{counted(snapshot.num_trained, 'sample')} trained, {snapshot.num_made:,} made ({rate})")
    if snapshot.restarts:
        facts.append(counted(snapshot.restarts, "restart"))
    return ", ".join([*facts, *times]) + (f" - {message}" if message else "")


def _clock(seconds: float) -> str:
    return str(datetime.timedelta(seconds=round(seconds)))

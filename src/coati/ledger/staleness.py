"""Moving the staleness bound η while a run trains, between two fixed ends.

A larger η lets makers run further ahead, so the trainer waits less; the price is older data. Which η is worth it
depends on how fast the policy moves, which nobody knows beforehand and which changes during a run. So the trainer
measures three things while it makes a version, and moves η by one step at most:

* Down, if the data is too old: KL above 2 × `target_kl`, or an effective sample size (ESS) below
  `target_effective_samples`.
* Up, if age is cheap and waiting is not: KL at most `target_kl`, ESS at least half way from its target to 1, and the
  trainer waited for data for `target_idle` of the time or more.
* Else it stays.

The gap between the two rules keeps η from swinging. So does time: a new η shows in the data only when samples
issued under it are trained on, which is as many versions later as the greater of the old and the new η. Until then
every verdict would be about the η before, and none is given.

η starts at its lower end, because a policy moves fastest at the start. Nothing here can break the upper end: admission
with any η up to it keeps ages within it, and a lower η only makes makers wait for weights that the trainer, which has
all the samples it needs for them, is about to send.
"""

import dataclasses
import math
import threading

from coati.config import TopologySettings

# KL may reach this multiple of its target before η is lowered.
_KL_SLACK = 2.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class VersionSignals:
    """What a trainer measured on fresh batches while it made one version."""

    kl: float
    """KL(behaviour || current policy) in nats per token, when a batch was first seen."""

    idle: float
    """Share of its time that the trainer waited for data, 0 to 1."""

    effective_samples: float | None = None
    """Effective share of the data under its importance weights, 0 to 1; None where nobody computes it."""


class StalenessController:
    """Decides after each version which η holds from there on.

    `target_kl` 0.02 is a log-ratio of ±0.2 at a typical token (KL ≈ d² / 2): the edge of PPO's usual clip range, beyond
    which a token teaches nothing. Below `target_effective_samples` 0.5 more than half of a batch is made for nothing.
    `target_idle` 0.1: waiting less than a tenth of the time is not worth older data.

    >>> controller = StalenessController(TopologySettings(staleness_control="adaptive", max_staleness=4))
    >>> controller.max_staleness
    0
    >>> controller.decide(VersionSignals(kl=0.001, idle=0.6, effective_samples=0.99))
    1
    """

    def __init__(
        self,
        topology: TopologySettings,
    ) -> None:
        self._topology = topology
        self._bound = topology.min_staleness
        self._num_unsettled = 0  # versions to come whose data was still issued under the η before

    @property
    def max_staleness(self) -> int:
        """The η that holds now."""
        return self._bound

    def decide(self, signals: VersionSignals) -> int:
        """The η to use from the version on that these signals were measured for."""
        if self._num_unsettled > 0:
            self._num_unsettled -= 1
            return self._bound
        before = self._bound
        if self._is_too_old(signals):
            self._bound = max(self._topology.min_staleness, before - 1)
        elif self._is_worth_more(signals):
            self._bound = min(self._topology.max_staleness, before + 1)
        if self._bound != before:
            self._num_unsettled = max(self._bound, before)
        return self._bound

    def _is_too_old(self, signals: VersionSignals) -> bool:
        """Written so that NaN counts as too old: what cannot be measured cannot be trusted."""
        is_close = signals.kl <= _KL_SLACK * self._topology.target_kl
        ess = signals.effective_samples
        return not (is_close and (ess is None or ess >= self._topology.target_effective_samples))

    def _is_worth_more(self, signals: VersionSignals) -> bool:
        ess = signals.effective_samples
        is_healthy = signals.kl <= self._topology.target_kl and (
            ess is None or ess >= (1 + self._topology.target_effective_samples) / 2
        )
        return is_healthy and signals.idle >= self._topology.target_idle


class SignalMeter:
    """Gathers the signals of one version, then of the next. The caller has the clock.

    >>> meter = SignalMeter()
    >>> meter.begin(now=100.0, waited=0.0)
    >>> meter.add(kl=0.01, effective_samples=0.9)
    >>> meter.add(kl=0.03, effective_samples=0.7)
    >>> signals = meter.take(now=110.0, waited=4.0)
    >>> round(signals.kl, 3), round(signals.effective_samples, 3), signals.idle
    (0.02, 0.8, 0.4)
    """

    def __init__(self) -> None:
        self._since: tuple[float, float] | None = None  # when the version began, and what had been waited by then
        self._kls: list[float] = []
        self._effective_samples: list[float] = []

    def begin(self, *, now: float, waited: float) -> None:
        """Start the clock, if it does not run: what comes before the first batch is asked for is start-up."""
        if self._since is None:
            self._since = (now, waited)

    def add(self, *, kl: float, effective_samples: float | None) -> None:
        """One fresh batch was trained on."""
        self._kls.append(kl)
        if effective_samples is not None:
            self._effective_samples.append(effective_samples)

    def take(self, *, now: float, waited: float) -> VersionSignals:
        """Means over the batches and the share of time waited since the last call; begins the next version."""
        began, waited_before = self._since if self._since is not None else (now, waited)
        elapsed = now - began
        signals = VersionSignals(
            kl=_mean(self._kls) or 0.0,
            idle=min(1.0, (waited - waited_before) / elapsed) if elapsed > 0 else 0.0,
            effective_samples=_mean(self._effective_samples),
        )
        self._since = (now, waited)
        self._kls, self._effective_samples = [], []
        return signals


class BoundSchedule:
    """Which η came with which version, so that each begins when its version serves and not before.

    Updates arrive in one thread of a maker and admission asks in another.

    >>> schedule = BoundSchedule()
    >>> schedule.note(3, 2)
    >>> schedule.at(2), schedule.at(3), schedule.at(9)
    (None, 2, 2)
    """

    def __init__(self) -> None:
        self._bounds: dict[int, int] = {}
        self._lock = threading.Lock()

    def note(self, version: int, max_staleness: int | None) -> None:
        """An update to `version` was accepted; None: it says nothing of η."""
        if max_staleness is not None:
            with self._lock:
                self._bounds[version] = max_staleness

    def at(self, version: int) -> int | None:
        """The η of the newest update up to `version`; None if none brought any. Versions never go back."""
        with self._lock:
            newest = max((known for known in self._bounds if known <= version), default=None)
            if newest is None:
                return None
            self._bounds = {known: bound for known, bound in self._bounds.items() if known >= newest}
            return self._bounds[newest]


def _mean(values: list[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None

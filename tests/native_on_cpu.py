"""Runs the native engine on a CPU as on a GPU, except for graphs and kernels: torch computes every step."""

from types import SimpleNamespace

from coati.rollout import NativeEngine
from coati.rollout.native.cache import PagedCache
from coati.rollout.native.graphs import StepGraphs


def as_on_a_gpu(monkeypatch, *, page_size=4, most_pages=512):
    """Patch in short pages, few of them, and snapshots every few tokens; return the list of captured steps."""
    captured, reset = [], NativeEngine._reset

    def capture(_self, step, _changed):
        captured.append(step)
        return SimpleNamespace(replay=step)

    monkeypatch.setattr(StepGraphs, "capture", capture)
    monkeypatch.setattr("coati.rollout.native.columns.MAX_WEIGHTS", 0)
    monkeypatch.setattr(NativeEngine, "_reset", lambda self: (reset(self), setattr(self, "_is_captured", True)))
    monkeypatch.setattr(
        PagedCache,
        "_affordable",
        lambda self, missing: min(max(2 * self.num_pages, self.num_pages + missing + 1), most_pages),
    )
    monkeypatch.setattr("coati.rollout.native.loop.PAGE_SIZE", page_size)
    monkeypatch.setattr("coati.rollout.native.loop.SHORT_TEXT", 2 * page_size)
    return captured

"""Our engines, held to the protocol of all."""

from types import SimpleNamespace

import pytest
from engine_protocol import *  # noqa: F403
from engine_protocol import PLACES
from tiny import llama

from coati.rollout import NativeEngine, ReferenceEngine
from coati.rollout.native.graphs import StepGraphs


@pytest.fixture
def policy():
    return lambda seed: llama(seed, num_hidden_layers=2, initializer_range=0.3)


@pytest.fixture(params=["reference", "native", "native with few looks"])
def make_engine(request, monkeypatch):
    if request.param == "reference":
        return ReferenceEngine
    if request.param == "native with few looks":
        reset = NativeEngine._reset
        monkeypatch.setattr(StepGraphs, "capture", lambda _self, step, _changed: SimpleNamespace(replay=step))
        monkeypatch.setattr(NativeEngine, "_reset", lambda self: (reset(self), setattr(self, "_is_captured", True)))
        monkeypatch.setattr("coati.rollout.native.loop.STEPS_PER_LOOK", 2)
        monkeypatch.setattr("coati.rollout.native.loop.POSITION_STEP", 3)
    return lambda model, **settings: NativeEngine(model, num_slots=PLACES, **settings)


def test_log_probs_are_those_before_a_cut(make_engine, policy):
    test_log_probs_are_those_of_the_learner(make_engine, policy, {"top_k": 4})  # noqa: F405

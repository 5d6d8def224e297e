"""Our engines, held to the protocol of all."""

import pytest
from engine_protocol import *  # noqa: F403
from engine_protocol import PLACES
from native_on_cpu import as_on_a_gpu
from tiny import llama

from coati.rollout import NativeEngine, ReferenceEngine


@pytest.fixture
def policy():
    return lambda seed: llama(seed, num_hidden_layers=2, initializer_range=0.3)


@pytest.fixture(params=["reference", "native", "native as on a GPU", "native with few pages"])
def make_engine(request, monkeypatch):
    if request.param == "reference":
        return ReferenceEngine
    if request.param != "native":
        as_on_a_gpu(monkeypatch, most_pages=12 if request.param.endswith("few pages") else 64)
        monkeypatch.setattr("coati.rollout.native.loop.STEPS_PER_LOOK", 2)
    return lambda model, **settings: NativeEngine(model, num_slots=PLACES, **settings)


def test_log_probs_are_those_before_a_cut(make_engine, policy):
    test_log_probs_are_those_of_the_learner(make_engine, policy, {"top_k": 4})  # noqa: F405

"""`rollout.batch_invariant`, as far as a CPU can show it; `tests/gpu/test_batch_invariant_on_gpu.py` compares bits."""

import pytest
import tiny
from engine_protocol import finish, request_of, texts
from native_on_cpu import as_on_a_gpu

from coati.config import RolloutSettings
from coati.errors import ConfigError
from coati.models.tiles import active_tile, set_batch_invariant
from coati.rollout import NativeEngine, ReferenceEngine, make_engine
from coati.rollout.native.decoder import Decoder
from coati.rollout.native.loop import PREFILL_TILE, UNBOUNDED

PLACES = 4


@pytest.fixture
def model():
    return tiny.llama(0, num_hidden_layers=2, initializer_range=0.3)


@pytest.fixture
def preempted(monkeypatch):
    ids, give_up = [], NativeEngine._preempt
    monkeypatch.setattr(NativeEngine, "_preempt", lambda self, one: (ids.append(one.id), give_up(self, one)))
    return ids


def generated(engine, count=9):
    engine.submit(request_of(range(count), eos_token_id=[]))
    return texts(finish(engine, count))


def test_pages_for_a_whole_response_are_reserved_so_that_none_is_preempted(model, monkeypatch, preempted):
    as_on_a_gpu(monkeypatch, page_size=2, most_pages=16)
    expected = generated(ReferenceEngine(model))
    assert generated(NativeEngine(model, num_slots=PLACES)) == expected
    assert preempted  # there is too little memory for what is begun
    preempted.clear()
    set_batch_invariant(model)
    assert generated(NativeEngine(model, num_slots=PLACES)) == expected
    assert not preempted


def test_shapes_do_not_depend_on_the_number_of_samples(model, monkeypatch):
    as_on_a_gpu(monkeypatch)
    in_prefill, prefill = set(), Decoder.prefill
    monkeypatch.setattr(
        Decoder, "prefill", lambda self, *args, **more: (in_prefill.add(active_tile()), prefill(self, *args, **more))[1]
    )
    set_batch_invariant(model)
    engine = NativeEngine(model, num_slots=40)
    for count in (1, 3, 9):
        generated(engine, count)
    assert in_prefill == {PREFILL_TILE}
    assert {key[:2] for key in engine._graphs.graphs} == {(len(engine._slots.alive), UNBOUNDED)}
    assert active_tile() == 0


def test_engines_that_cannot_do_it_refuse():
    settings = RolloutSettings(batch_invariant=True)
    with pytest.raises(ConfigError, match=r"rollout\.batch_invariant needs the native engine"):
        make_engine(settings, tiny.llama(0, rope_parameters={"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}))
    engine = make_engine(settings, tiny.llama(0))
    assert isinstance(engine, NativeEngine)
    assert engine._decoder.is_invariant
    with pytest.raises(ValueError, match="batch_invariant"):
        RolloutSettings(batch_invariant=True, engine="vllm")

"""The protocol tests for the native and reference engines."""

import pytest
from engine_protocol import *  # noqa: F403
from engine_protocol import PLACES, finish, request_of, texts
from native_on_cpu import as_on_a_gpu
from tiny import decoder, llama

from coati.models.tiles import set_batch_invariant
from coati.rollout import NativeEngine, ReferenceEngine

ENGINES = [
    "reference",
    "native",
    "native by rows",
    "native as on a GPU, batch-invariant",
    "native with few pages",  # and otherwise as on a GPU
]
DECODERS = ["gpt2", "opt", "gemma3", "phi"]
FOR_ANY_DECODER = (  # of slots, versions, ids, and options that apply to the logits of any model
    "test_waiting_samples_take_slots_as_responses_end",
    "test_every_token_has_the_version_that_generated_it",
    "test_duplicate_sample_ids_are_rejected",
    "test_requests_with_different_options_do_not_mix",
    "test_cancelled_samples_are_not_returned_and_can_be_resubmitted",
    "test_extending_without_new_tokens_continues_the_same_response",
    "test_log_probs_are_those_before_top_k",
)


def pytest_generate_tests(metafunc):
    kinds = [(one, "llama") for one in ENGINES]
    if metafunc.function.__name__ not in FOR_ANY_DECODER:
        kinds += [(ENGINES[-1], one) for one in DECODERS]
    metafunc.parametrize("kind", kinds, ids=" ".join, indirect=True)


@pytest.fixture
def kind(request):
    """The name of an engine, and the architecture of its models."""
    return request.param


@pytest.fixture
def policy(kind):
    if kind[1] == "llama":
        return lambda seed: llama(seed, num_hidden_layers=2, initializer_range=0.3)
    return lambda seed: decoder(kind[1], seed)


@pytest.fixture
def make_engine(kind, monkeypatch):
    engine, _ = kind
    if engine == "reference":
        return ReferenceEngine
    if "by rows" in engine:
        monkeypatch.setattr("coati.rollout.native.columns.MAX_WEIGHTS", 0)
    elif engine != "native":
        as_on_a_gpu(monkeypatch, most_pages=12 if engine.endswith("few pages") else 64)
        monkeypatch.setattr("coati.rollout.native.loop.STEPS_PER_SNAPSHOT", 2)

    def make(model, **settings):
        set_batch_invariant(model, engine.endswith("batch-invariant"))
        return NativeEngine(model, num_slots=PLACES, **settings)

    return make


def test_log_probs_are_those_before_top_k(make_engine, policy):
    test_log_probs_match_the_learner(make_engine, policy, {"top_k": 4})  # noqa: F405


def test_extending_without_new_tokens_continues_the_same_response(make_engine, policy):
    engine = make_engine(policy(0))
    engine.submit(request_of([0, 3], eos_token_id=[]))
    whole = texts(finish(engine, 2))
    engine.submit(request_of([0, 3], eos_token_id=[], is_kept=True, limit=4))
    begun = texts(finish(engine, 2))
    for one in begun:
        engine.extend(one, [], 5)
    rest = texts(finish(engine, 2))
    assert {one: begun[one] + rest[one] for one in begun} == whole

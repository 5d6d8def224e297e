"""vLLM against the protocol of all engines, and its own behaviour. `make test-vllm` installs vLLM."""

import dataclasses

import pytest
import torch
from engine_protocol import *  # noqa: F403
from engine_protocol import PLACES, PROMPTS, assert_exact, finish, load, request_of, texts
from tiny import VOCAB, gpt2, llama

from coati.config import LoRASettings
from coati.errors import ConfigError, GenerateOptionError, WeightUpdateError
from coati.models import Actor
from coati.rollout import ReferenceEngine, VllmEngine

pytest.importorskip("vllm")

WIDE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}  # heads as vLLM has them on a CPU


@pytest.fixture
def policy():
    return lambda seed: llama(seed, num_hidden_layers=2, initializer_range=0.2, max_position_embeddings=512, **WIDE)


@pytest.fixture
def make_engine(vllm_engine):
    return lambda model, **settings: vllm_engine(model, max_num_seqs=PLACES, **settings)


def written(engine, **options):
    """The responses to all prompts."""
    engine.submit(request_of(range(len(PROMPTS)), **options))
    return finish(engine, len(PROMPTS))


def test_greedy_text_is_that_of_the_reference_engine(make_engine, policy):
    model = policy(0)
    ours, theirs = (written(one, do_sample=False) for one in (make_engine(model), ReferenceEngine(model)))
    assert texts(ours) == texts(theirs)
    assert [ours[one].is_cut for one in sorted(ours)] == [theirs[one].is_cut for one in sorted(ours)]


@pytest.mark.parametrize("options", [{"do_sample": False}, {"temperature": 0.5, "top_p": 0.9}], ids=str)
def test_an_evaluation_samples_as_it_likes(make_engine, policy, options):
    engine = make_engine(policy(0))
    engine.submit(request_of([0, 1], needs_log_probs=False, **options))
    assert set(finish(engine, 2)) == {0, 1}


def test_no_prompt_is_continued_from_keys_of_older_weights(make_engine, policy):
    model = policy(0)
    engine = make_engine(model)
    prompt = torch.randint(2, VOCAB, (300,), generator=torch.Generator().manual_seed(0)).tolist()  # whole blocks
    for seed in (0, 1):
        load(model, policy(seed))
        engine.commit(seed)
        engine.submit([dataclasses.replace(request_of([0])[0], tokens=prompt)])
        assert_exact(model, prompt, finish(engine, 1)[0])


def test_weights_that_do_not_arrive_are_noticed(make_engine, policy, monkeypatch):
    model = policy(0)
    engine = make_engine(model)
    written(engine)
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    with monkeypatch.context() as patch:
        rpc = engine._engine.collective_rpc
        patch.setattr(engine._engine, "collective_rpc", lambda what, **k: rpc(what, **k) if callable(what) else None)
        with pytest.raises(WeightUpdateError, match="log-probs"):
            written(engine)
    engine.cancel(range(len(PROMPTS)))
    for one, response in written(engine).items():
        assert_exact(model, PROMPTS[one], response)


def test_what_vllm_cannot_do_is_refused(make_engine, policy):
    engine = make_engine(policy(0))
    with pytest.raises(ConfigError, match="pipeline_parallel_size"):
        VllmEngine(policy(0), pipeline_parallel_size=2)
    with pytest.raises(GenerateOptionError, match="top_k"):
        engine.submit(request_of([0], top_k=3))
    with pytest.raises(GenerateOptionError, match="use_cache"):
        engine.submit(request_of([0], use_cache=True))


def test_adapters_are_merged_into_the_weights_at_each_update(make_engine, policy):
    actor = Actor(policy(0), lora=LoRASettings(rank=4))
    engine = make_engine(actor)
    for version in range(3):
        for one, response in written(engine).items():
            assert_exact(actor, PROMPTS[one], response)
        with torch.no_grad():
            for name, parameter in actor.named_parameters():
                if "lora_" in name:
                    parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.3)
        engine.commit(version + 1)


def test_a_model_that_the_native_engine_does_not_know(make_engine):
    model = gpt2(n_embd=64)
    for one, response in written(make_engine(model)).items():
        assert_exact(model, PROMPTS[one], response)

"""vLLM as an engine, for real: `make test-vllm` installs it into an environment of its own."""

import dataclasses

import pytest
import torch
from tiny import VOCAB, gpt2, llama

from coati.config import LoRASettings
from coati.errors import ConfigError, GenerateOptionError, WeightUpdateError
from coati.models import Actor
from coati.models.actor import action_logprobs
from coati.rollout import GenerateOptions, ReferenceEngine, RolloutRequest, VllmEngine, generate

pytest.importorskip("vllm")

WIDE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}  # heads as vLLM has them on a CPU


@pytest.fixture(scope="module")
def model():
    return llama(seed=0, num_hidden_layers=2, **WIDE)


@pytest.fixture(scope="module")
def engine(model, vllm_engine):
    """The one that tests share; those with an engine of their own come last."""
    return vllm_engine(model)


def request(rows=6, *, first_id=0, limit=12, prompts=None, **options):
    ids = torch.randint(2, VOCAB, (rows, 5), generator=torch.Generator().manual_seed(0)) if prompts is None else prompts
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    return RolloutRequest(
        input_ids=ids,
        attention_mask=mask,
        sample_ids=torch.arange(first_id, first_id + len(ids)),
        seed=1,
        options=GenerateOptions.parse(**options),
        max_new_tokens=limit,
    )


def gap(model, rollout, temperature=1.0):
    temperatures = torch.full((len(rollout.sequences),), temperature)
    forward = (rollout.sequences, rollout.attention_mask, rollout.action_mask.shape[1])
    log_probs, _ = action_logprobs(model, *forward, temperatures=temperatures)
    return float(((log_probs - rollout.rollout_log_probs).abs() * rollout.action_mask).max())


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7}])
def test_log_probs_are_those_of_the_learner(model, engine, options):
    rollout = generate(engine, request(**options), version=3)
    assert gap(model, rollout, options.get("temperature", 1.0)) < 1e-4
    assert bool((rollout.token_versions == 3)[rollout.action_mask].all())


def test_greedy_text_is_that_of_the_reference_engine(model, engine):
    ours, theirs = (generate(one, request(do_sample=False)) for one in (engine, ReferenceEngine(model)))
    for name in ("sequences", "attention_mask", "action_mask", "is_cut", "token_versions"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name


@pytest.mark.parametrize("options", [{"do_sample": False}, {"temperature": 0.5, "top_p": 0.9}])
def test_an_evaluation_with_options_of_its_own_is_written_by_the_same_engine(engine, options):
    generate(engine, request(temperature=0.7))
    vllm = engine._engine
    generate(engine, dataclasses.replace(request(**options), needs_log_probs=False))
    assert engine._engine is vllm


def test_a_sample_id_has_the_same_draws_in_any_company(engine):
    together = generate(engine, request(6))
    prompts = request(6).input_ids
    alone = generate(engine, request(first_id=4, prompts=prompts[[4, 5]]))  # row 0 is padded in both
    length = int(alone.action_mask[1].sum())
    assert int(together.action_mask[5].sum()) == length
    assert torch.equal(together.sequences[5, 5 : 5 + length], alone.sequences[1, 5 : 5 + length])
    other = generate(engine, request(6, first_id=100))
    assert other.sequences.tolist() != together.sequences.tolist()


def test_weights_change_between_tokens_and_each_token_has_its_version(model, engine):
    versions = iter([3, 3, 3])

    def between_tokens():
        version = next(versions, None)
        if version is None and not changed:
            changed.append(True)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.5)
        return 4 if version is None else version

    changed = []
    rollout = generate(engine, request(eos_token_id=[], limit=8), version=3, between_tokens=between_tokens)
    assert rollout.token_versions.diff(dim=1).sum(dim=1).tolist() == [1] * 6
    assert set(rollout.token_versions.flatten().tolist()) == {3, 4}
    assert gap(model, generate(engine, request())) < 1e-4  # no prompt is continued from keys of the old weights


def test_weights_that_do_not_arrive_are_noticed(model, engine, monkeypatch):
    generate(engine, request())
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    with monkeypatch.context() as patch:
        rpc = engine._engine.collective_rpc
        patch.setattr(engine._engine, "collective_rpc", lambda what, **k: None if "reload" in what else rpc(what, **k))
        with pytest.raises(WeightUpdateError, match="log-probs"):
            generate(engine, request())
    assert gap(model, generate(engine, request())) < 1e-4


def test_limits_and_end_tokens(engine):
    cut = generate(engine, request(eos_token_id=[], limit=4))
    assert bool(cut.is_cut.all())
    assert bool(cut.action_mask.all())
    ended = generate(engine, request(eos_token_id=list(range(VOCAB)), limit=4))
    assert ended.action_mask.sum(dim=1).tolist() == [1] * 6
    assert not bool(ended.is_cut.any())


def test_what_vllm_cannot_do_is_refused(model, engine):
    with pytest.raises(ConfigError, match="tensor_parallel_size"):
        VllmEngine(model, tensor_parallel_size=2)
    with pytest.raises(GenerateOptionError, match="temperature"):
        generate(engine, request(top_k=3, temperature=0.5))
    with pytest.raises(GenerateOptionError, match="use_cache"):
        generate(engine, request(use_cache=True))
    generate(engine, request(temperature=0.7))
    with pytest.raises(GenerateOptionError, match="kind"):
        generate(engine, request(top_k=3))


def test_more_prompts_than_slots(model, vllm_engine):
    engine = vllm_engine(model, max_num_seqs=4)
    assert gap(model, generate(engine, request(rows=11))) < 1e-4


def test_a_model_that_the_native_engine_does_not_know(vllm_engine):
    model = gpt2(n_embd=64)
    assert gap(model, generate(vllm_engine(model), request())) < 1e-4


def test_adapters_are_merged_into_the_weights_at_each_update(vllm_engine):
    actor = Actor(llama(seed=0, num_hidden_layers=2, **WIDE), lora=LoRASettings(rank=4))
    engine = vllm_engine(actor)
    before = generate(engine, request())
    for _ in range(2):
        with torch.no_grad():
            for name, parameter in actor.named_parameters():
                if "lora_" in name:
                    parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.3)
        after = generate(engine, request())
        assert gap(actor, after) < 1e-4
        assert gap(actor, before) > 1e-2
        before = after


def test_log_probs_are_those_before_the_cut(model, vllm_engine):
    engine = vllm_engine(model, options=GenerateOptions.parse(top_p=0.5))
    generate(engine, request(do_sample=False))
    for options in ({"top_k": 3}, {"top_p": 0.5}):
        assert gap(model, generate(engine, request(**options))) < 1e-4

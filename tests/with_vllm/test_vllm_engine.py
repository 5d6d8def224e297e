"""vLLM as an engine, for real: `make test-vllm` installs it into an environment of its own."""

import pytest
import torch
from tiny import VOCAB, gpt2, llama

from coati.errors import GenerateOptionError, WeightUpdateError
from coati.models.actor import action_logprobs
from coati.rollout import GenerateOptions, ReferenceEngine, RolloutRequest, VllmEngine, generate

pytest.importorskip("vllm")

WIDE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}  # heads as vLLM has them on a CPU


@pytest.fixture(scope="module")
def model():
    return llama(seed=0, num_hidden_layers=2, **WIDE)


@pytest.fixture(scope="module")
def engine(model):
    return VllmEngine(model)


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


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7}, {"top_k": 3}, {"top_p": 0.5}])
def test_log_probs_are_those_of_the_learner(model, engine, options):
    rollout = generate(engine, request(**options), version=3)
    assert gap(model, rollout, options.get("temperature", 1.0)) < 1e-4
    assert bool((rollout.token_versions == 3)[rollout.action_mask].all())


def test_greedy_text_is_that_of_the_reference_engine(model, engine):
    ours, theirs = (generate(one, request(do_sample=False)) for one in (engine, ReferenceEngine(model)))
    for name in ("sequences", "attention_mask", "action_mask", "is_cut", "token_versions"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name


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
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    with monkeypatch.context() as patch:
        patch.setattr(engine._engine, "collective_rpc", lambda *_, **__: None)
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


def test_more_prompts_than_slots(model):
    engine = VllmEngine(model, max_num_seqs=4)
    assert gap(model, generate(engine, request(rows=11))) < 1e-4


def test_a_model_that_the_native_engine_does_not_know():
    model = gpt2(n_embd=64)
    assert gap(model, generate(VllmEngine(model), request())) < 1e-4


def test_what_vllm_cannot_do_is_refused(engine):
    with pytest.raises(GenerateOptionError, match="temperature"):
        generate(engine, request(top_k=3, temperature=0.5))
    with pytest.raises(GenerateOptionError, match="use_cache"):
        generate(engine, request(use_cache=True))

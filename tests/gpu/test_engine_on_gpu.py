"""The native engine with CUDA graphs: the reference's text and the learner's log-probs, with any number of slots."""

import dataclasses

import pytest
import torch
from tiny import samples_of
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from coati.models import Actor, action_logprobs
from coati.rollout import GenerateOptions, ReferenceEngine, generate
from coati.rollout.native import NativeEngine, decoder, loop
from coati.rollout.native.cache import PagedCache
from coati.rollout.native.loop import STEPS_PER_SNAPSHOT
from coati.rollout.native.operations import TorchOperations, TritonOperations

SHAPE = {
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 2,
}
ENDS = [*range(2, 18)]  # many, so that responses end at all lengths


def make_model(family="qwen2", seed=0, dtype=torch.float32, **changes):
    torch.manual_seed(seed)
    if family == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=32))
    else:
        model = Qwen2ForCausalLM(Qwen2Config(**{**SHAPE, **changes}, tie_word_embeddings=True))
    return model.eval().to("cuda", dtype)


def make_request(rows=35, *, max_new_tokens=40, seed=1, **options):
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(20, 200, (rows, 12), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, : row % 7] = 0
    ids[3:6], mask[3:6] = ids[2], mask[2]  # four samples of one prompt
    return samples_of(
        input_ids=ids.cuda(),
        attention_mask=mask.cuda(),
        sample_ids=torch.arange(rows) + 40,
        seed=seed,
        options=GenerateOptions.parse(**{"eos_token_id": ENDS, "pad_token_id": 0, **options}),
        max_new_tokens=max_new_tokens,
    )


def assert_same(found, expected):
    real, mask = expected.attention_mask.bool(), expected.action_mask
    assert torch.equal(found.action_mask, mask)
    assert torch.equal(found.sequences[real], expected.sequences[real])
    assert torch.equal(found.is_cut, expected.is_cut)
    torch.testing.assert_close(found.action_log_probs[mask], expected.action_log_probs[mask], atol=1e-5, rtol=0)
    assert torch.equal(found.policy_versions[mask], expected.policy_versions[mask])


def learners_log_probs(model, rollout, temperature=1.0):
    count = len(rollout.sequences)
    with torch.no_grad():
        return action_logprobs(
            Actor(model),
            rollout.sequences,
            rollout.attention_mask,
            rollout.action_mask.shape[1],
            temperatures=torch.full((count,), temperature, device="cuda"),
        )[0]


@pytest.mark.parametrize("kernels", [TritonOperations, TorchOperations])
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize("options", [{}, {"do_sample": False}, {"top_k": 9, "top_p": 0.8, "temperature": 0.7}], ids=str)
def test_it_writes_what_the_reference_writes(family, options, kernels, monkeypatch):
    model = make_model(family)
    expected = generate(ReferenceEngine(model), make_request(**options))
    ended = expected.action_mask.sum(dim=1)
    assert len(set(ended.tolist())) > 3  # slots fall free between looks, at looks, and one after the other
    monkeypatch.setattr(decoder, "operations_for", lambda _, geometry: kernels(geometry))
    assert_same(generate(NativeEngine(model), make_request(**options)), expected)  # packed together as they end
    few = NativeEngine(model, num_slots=4)  # used again and again
    assert_same(generate(few, make_request(**options)), expected)
    assert few._is_captured
    assert few._graphs.graphs
    assert_same(generate(few, make_request(**options)), expected)  # by the graphs of the first time


def test_requests_of_all_sizes_share_few_graphs():
    model = make_model()
    engine, reference = NativeEngine(model), ReferenceEngine(model)
    assert_same(generate(engine, make_request(35)), generate(reference, make_request(35)))
    graphs = engine._graphs.graphs
    for rows in (20, 7, 33, 1 + 6):
        assert_same(generate(engine, make_request(rows, seed=rows)), generate(reference, make_request(rows, seed=rows)))
    assert {key[0] for key in graphs} <= {1, 2, 4, 8, 16, 24, 32, 48}


@pytest.mark.parametrize("most_pages", [16, 40])
def test_pages_that_run_out_lose_no_token(most_pages, monkeypatch):
    model, request = make_model(), make_request(max_new_tokens=200, eos_token_id=[2, 3])
    expected = generate(ReferenceEngine(model), request)
    given_up, give_up = [], NativeEngine._preempt
    monkeypatch.setattr(NativeEngine, "_preempt", lambda self, one: (given_up.append(one.id), give_up(self, one)))
    monkeypatch.setattr(PagedCache, "_affordable", lambda *_: most_pages)
    monkeypatch.setattr(loop, "PAGE_SIZE", 16)
    assert_same(generate(NativeEngine(model, num_slots=12), request), expected)
    assert given_up


def test_samples_of_a_long_prompt_share_its_pages():
    model = make_model()
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(20, 200, (2, 300), generator=generator).repeat_interleave(8, dim=0)
    request = [
        dataclasses.replace(one, tokens=tokens, limit=100)
        for one, tokens in zip(make_request(16), ids.tolist(), strict=True)
    ]
    engine = NativeEngine(model)
    assert_same(generate(engine, request), generate(ReferenceEngine(model), request))
    # 4 whole pages of each prompt, and 3 of each sample; as many as there were at the same time at most.
    assert engine._cache.num_pages <= 128


def test_a_text_of_8192_tokens_has_the_learners_log_probs():
    model = make_model(max_position_embeddings=16384)
    ids = torch.randint(20, 200, (3, 8100), generator=torch.Generator().manual_seed(3))
    prompts = [row[start:].tolist() for row, start in zip(ids, (0, 7000, 0), strict=True)]
    request = [
        dataclasses.replace(one, tokens=tokens, limit=92)
        for one, tokens in zip(make_request(3, eos_token_id=[]), prompts, strict=True)
    ]
    rollout = generate(NativeEngine(model), request)
    torch.testing.assert_close(rollout.action_log_probs, learners_log_probs(model, rollout), atol=1e-4, rtol=0)


def test_stop_strings_end_responses_inside_the_graphs():
    pieces = {f"{chr(97 + index % 26)}{index // 26}": index for index in range(200)}
    inner = Tokenizer(WordLevel(pieces, unk_token="a0"))
    inner.decoder = Fuse()
    options = {"tokenizer": PreTrainedTokenizerFast(tokenizer_object=inner), "stop_strings": ["x", "3b"]}
    model = make_model()
    expected = generate(ReferenceEngine(model), make_request(eos_token_id=[], **options))
    assert 0 < int(expected.is_cut.sum()) < 35
    engine = NativeEngine(model, num_slots=8)
    for _ in range(2):
        assert_same(generate(engine, make_request(eos_token_id=[], **options)), expected)


def test_requests_of_other_limits_share_graphs():
    engine = NativeEngine(make_model())
    generate(engine, make_request(max_new_tokens=40, eos_token_id=[]))
    graphs = dict(engine._graphs.graphs)
    for max_new_tokens in (39, 30, 12):
        generate(engine, make_request(max_new_tokens=max_new_tokens, eos_token_id=[]))
    assert engine._graphs.graphs == graphs


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_the_learners(temperature):
    model = make_model()
    rollout = generate(NativeEngine(model, num_slots=8), make_request(temperature=temperature))
    forward, mask = learners_log_probs(model, rollout, temperature), rollout.action_mask
    torch.testing.assert_close(rollout.action_log_probs[mask], forward[mask], atol=1e-5, rtol=0)


def test_log_probs_in_bfloat16_differ_from_the_learners_by_rounding():
    rollout = generate(NativeEngine(model := make_model(dtype=torch.bfloat16)), make_request())
    mask = rollout.action_mask
    gap = (rollout.action_log_probs - learners_log_probs(model, rollout))[mask].abs()
    in_float32 = learners_log_probs(make_model(dtype=torch.bfloat16).float(), rollout)
    rounding = (learners_log_probs(model, rollout) - in_float32)[mask].abs()
    # The same weights in bfloat16: two ways of computing differ by no more than either does from float32.
    assert 0 < gap.mean() < 2 * rounding.mean()
    assert gap.max() < 3 * rounding.max()


def test_weights_committed_in_flight_are_read_by_the_graphs_that_exist():
    model = make_model()
    old = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    new = {name: tensor.clone() for name, tensor in make_model(seed=7).state_dict().items()}
    engine = NativeEngine(model)
    generate(engine, make_request(eos_token_id=[]))  # graphs are there before, and joined weights at their places
    addresses = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    model.load_state_dict(old)
    looks = 0
    num_old = 1 + 3 * STEPS_PER_SNAPSHOT  # the first token comes with the prompt

    def commit():
        nonlocal looks
        looks += 1
        if looks == 3:
            model.load_state_dict(new)
        return 4 if looks < 3 else 5

    rollout = generate(engine, make_request(eos_token_id=[]), version=4, between_tokens=commit)
    assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == addresses
    assert rollout.policy_versions.tolist() == [[4] * num_old + [5] * (40 - num_old)] * 35
    model.load_state_dict(old)
    before = generate(engine, make_request(eos_token_id=[]))
    first = rollout.sequences.shape[1] - 40
    last = first + num_old
    assert torch.equal(rollout.sequences[:, :last], before.sequences[:, :last])
    assert torch.equal(rollout.action_log_probs[:, :num_old], before.action_log_probs[:, :num_old])
    # From there on the new weights draw, over a cache of the old ones: neither model writes that.
    assert not torch.equal(rollout.sequences[:, last:], before.sequences[:, last:])
    model.load_state_dict(new)
    after = generate(engine, make_request(eos_token_id=[]))
    assert not torch.equal(rollout.sequences[:, first:], after.sequences[:, first:])
    assert_same(after, generate(ReferenceEngine(model), make_request(eos_token_id=[])))

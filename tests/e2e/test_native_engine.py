"""The native engine matches the reference engine: same draws, text and log-probs, with any number of slots."""

import dataclasses
import itertools
import logging

import pytest
import tiny
import torch
from native_on_cpu import as_on_a_gpu
from peft import LoraConfig, get_peft_model
from tiny import samples_of
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from coati.config import RolloutSettings
from coati.errors import ConfigError, GenerateOptionError, OutOfMemory
from coati.experience import Sample
from coati.models import Actor, LoRASettings, action_logprobs
from coati.rollout import GenerateOptions, ReferenceEngine, generate, make_engine
from coati.rollout.native import NativeEngine
from coati.rollout.native.blocks import FusedLinear, product
from coati.rollout.native.cache import PagedCache
from coati.rollout.native.decoder import Decoder
from coati.rollout.native.graphs import graph_size
from coati.rollout.native.operations import TorchOperations

SHAPE = {
    "vocab_size": 29,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.4,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 2,
}


def make_model(name, seed=0):
    torch.manual_seed(seed)
    if name == "llama":
        from transformers import LlamaConfig

        return LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()
    if name == "llama3-rope":
        from transformers import LlamaConfig

        rope = {
            "rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }  # fmt: skip
        return LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=rope)).eval()
    if name == "qwen2":  # biases in the projections, tied embeddings
        return Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=True)).eval()
    if name == "gemma3-capped":
        return tiny.decoder("gemma3", seed, vocab_size=29, eos_token_id=2, final_logit_softcapping=2.0)
    if name in tiny.ARCHITECTURES:
        return tiny.decoder(name, seed, vocab_size=29, eos_token_id=2)
    if name == "qwen3":  # normalised heads, of another size than hidden / heads
        return Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=8)).eval()
    return MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=None)).eval()


def make_request(*, rows=9, max_new_tokens=7, **options):
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 29, (rows, 5), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, : row % 4] = 0
    ids[5], mask[5] = ids[1], mask[1]  # the same prompt twice, as in a group
    return samples_of(
        input_ids=ids,
        attention_mask=mask,
        sample_ids=torch.arange(rows) + 40,
        seed=1,
        options=GenerateOptions.parse(**{"eos_token_id": [2, 5, 8, 11], **options}),
        max_new_tokens=max_new_tokens,
    )


def rows_of(samples, rows):
    return [samples[row] for row in rows]


def with_limits(samples, *limits):
    """The samples with limits of their own, one after the other."""
    return [
        dataclasses.replace(sample, limit=limit)
        for sample, limit in zip(samples, itertools.cycle(limits), strict=False)
    ]


def assert_same(found, expected):
    assert torch.equal(found.action_mask, expected.action_mask)
    real = expected.attention_mask.bool()
    assert torch.equal(found.attention_mask, expected.attention_mask)
    assert torch.equal(found.sequences[real], expected.sequences[real])
    assert torch.equal(found.is_cut, expected.is_cut)
    mask = expected.action_mask
    torch.testing.assert_close(found.action_log_probs[mask], expected.action_log_probs[mask], atol=1e-5, rtol=0)
    assert not found.action_log_probs[~mask].any()
    assert torch.equal(found.policy_versions[mask], expected.policy_versions[mask])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *itertools.product(
            ["llama", "llama3-rope", "qwen2", "qwen3", "mistral"],
            [{}, {"do_sample": False}, {"top_k": 4, "temperature": 0.7}, {"top_p": 0.6}],
        ),
        *itertools.product(tiny.ARCHITECTURES, [{}, {"do_sample": False}]),
        ("gemma3-capped", {}),
    ],
    ids=str,
)
def test_it_writes_what_the_reference_writes(name, options):
    model = make_model(name)
    expected = generate(ReferenceEngine(model), make_request(**options))
    if options != {"do_sample": False}:
        assert 0 < int(expected.is_cut.sum()) < 9  # some end by themselves, some are cut
    for num_slots in (64, 2):  # all at once, and two at a time with the others waiting
        assert_same(generate(NativeEngine(model, num_slots=num_slots), make_request(**options)), expected)


def test_each_row_is_cut_at_its_own_limit():
    model, request = make_model("llama"), with_limits(make_request(), *range(1, 8))
    expected = generate(ReferenceEngine(model), request)
    lengths = expected.action_mask.sum(dim=1)
    limits = torch.tensor([sample.limit for sample in request])
    assert bool((lengths <= limits).all())
    assert torch.equal(lengths[expected.is_cut], limits[expected.is_cut])
    assert 0 < int(expected.is_cut.sum()) < 9
    for num_slots in (64, 2):
        assert_same(generate(NativeEngine(model, num_slots=num_slots), request), expected)


def test_rows_do_not_depend_on_slots_or_neighbours():
    model = make_model("qwen3")
    whole = generate(NativeEngine(model), make_request())
    engine = NativeEngine(model, num_slots=3)
    for _ in range(2):  # the second time over a cache that is full of the first
        assert_same(generate(engine, make_request()), whole)


def test_log_probs_are_the_learners():
    model = make_model("qwen2")
    rollout = generate(NativeEngine(model), make_request(temperature=0.8))
    forward = action_logprobs(
        Actor(model),
        rollout.sequences,
        rollout.attention_mask,
        rollout.action_mask.shape[1],
        temperatures=torch.full((9,), 0.8),
    )[0]
    mask = rollout.action_mask
    torch.testing.assert_close(rollout.action_log_probs[mask], forward[mask], atol=1e-5, rtol=0)


def test_weights_that_are_written_into_the_model_count_from_the_next_token():
    new = {name: tensor.clone() for name, tensor in make_model("qwen2", seed=7).state_dict().items()}

    def written_by(engine_class, **settings):
        model, calls = make_model("qwen2"), []

        def between_tokens():
            calls.append(None)
            if len(calls) == 3:
                for name, tensor in model.state_dict().items():
                    tensor.copy_(new[name])
            return 5 if len(calls) >= 3 else 4

        engine, request = engine_class(model, **settings), make_request(eos_token_id=[])
        return generate(engine, request, version=4, between_tokens=between_tokens)

    expected = written_by(ReferenceEngine)
    assert expected.policy_versions[0].tolist() == [4, 4, 4, 5, 5, 5, 5]
    assert_same(written_by(NativeEngine), expected)


@pytest.mark.parametrize("name", ["llama", "gpt2", "phi3"])
def test_adapters_count(name):
    torch.manual_seed(0)
    actor = Actor(make_model(name), lora=LoRASettings(rank=2))
    with torch.no_grad():
        for name, parameter in actor.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)  # much more, and float32 is further from float64 than what is compared
    assert_same(generate(NativeEngine(actor), make_request()), generate(ReferenceEngine(actor), make_request()))


@pytest.mark.parametrize(("name", "norm"), [("gpt2", "ln_1"), ("phi", "input_layernorm"), ("gemma3", "q_norm")])
def test_norms_that_are_trained_beside_adapters_count(name, norm):
    model = make_model(name)
    targets = ["c_attn" if name == "gpt2" else "q_proj"]
    adapters = LoraConfig(r=2, target_modules=targets, modules_to_save=[norm], fan_in_fan_out=name == "gpt2")
    model = get_peft_model(model, adapters).eval()
    with torch.no_grad():
        for parameter in (one for one in model.parameters() if one.requires_grad):
            parameter.add_(0.1 * torch.randn_like(parameter))
    assert_same(generate(NativeEngine(model), make_request()), generate(ReferenceEngine(model), make_request()))


def test_a_model_may_change_its_dtype_between_requests():
    model = make_model("llama")
    engine = NativeEngine(model)
    generate(engine, make_request())
    model.bfloat16()
    assert_same(generate(engine, make_request()), generate(NativeEngine(model), make_request()))


def test_loading_a_model_anew_is_noticed():
    model = make_model("llama")
    engine = NativeEngine(model)
    generate(engine, make_request())
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.1  # other memory than the engine saw
    assert_same(generate(engine, make_request()), generate(ReferenceEngine(model), make_request()))


def test_other_activations_are_the_models_own():
    from transformers import LlamaConfig

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, hidden_act="gelu")).eval()
    assert_same(generate(NativeEngine(model), make_request()), generate(ReferenceEngine(model), make_request()))


def test_what_it_writes_can_be_trained_on():
    model = make_model("llama")
    rollout = generate(NativeEngine(model), make_request())
    assert not any(tensor.is_inference() for _, tensor in rollout.tensors())
    assert not any(parameter.is_inference() for parameter in model.parameters())


def test_a_row_of_nan_stays_a_row_of_nan():
    model = make_model("llama")
    with torch.no_grad():
        model.lm_head.weight[3] = torch.nan
    rollout = generate(NativeEngine(model), make_request(eos_token_id=[]))
    assert rollout.action_log_probs.isnan().all()
    assert int(rollout.sequences.max()) < 29


def test_joined_layers_share_the_models_memory():
    layers = [torch.nn.Linear(3, 2), torch.nn.Linear(3, 4)]
    before = [layer.weight.clone() for layer in layers]
    fused, inputs = FusedLinear(layers), torch.randn(5, 3)
    torch.testing.assert_close(product(fused, inputs), torch.cat([layer(inputs) for layer in layers], dim=-1))
    assert all(torch.equal(layer.weight, old) for layer, old in zip(layers, before, strict=True))
    with torch.no_grad():
        layers[1].weight.fill_(1.0)
        layers[1].bias.zero_()
    torch.testing.assert_close(product(fused, inputs)[:, 2:], inputs.sum(dim=1, keepdim=True).expand(5, 4))


@pytest.mark.parametrize("biases", [(False, True), (True, False)])
def test_layers_of_which_only_some_have_a_bias_are_not_joined(biases):
    layers = [torch.nn.Linear(3, 2, bias=bias) for bias in biases]
    inputs = torch.randn(5, 3)
    torch.testing.assert_close(
        product(FusedLinear(layers), inputs), torch.cat([layer(inputs) for layer in layers], dim=-1)
    )


@pytest.mark.parametrize(
    ("model", "options", "reason"),
    [
        (lambda: tiny.gpt2(add_cross_attention=True), {}, "add_cross_attention"),
        (lambda: make_model("llama"), {"use_cache": False}, "use_cache"),
        (lambda: AutoModelForCausalLM.from_config(Olmo2Config(**SHAPE)), {}, "Olmo2"),
    ],
)
def test_what_it_cannot_do_goes_to_the_reference_and_the_log_says_so(model, options, reason, caplog):
    settings = RolloutSettings(generate=options)
    with caplog.at_level(logging.WARNING):
        engine = make_engine(settings, model().eval())
    assert isinstance(engine, ReferenceEngine)
    (said,) = [record.getMessage() for record in caplog.records if record.name.startswith("coati")]
    assert reason in said


def test_what_it_cannot_do_is_refused_where_it_is_asked_for():
    with pytest.raises(GenerateOptionError, match="use_cache"):
        generate(NativeEngine(make_model("llama")), make_request(use_cache=False))
    with pytest.raises(ConfigError, match="word_embed_proj_dim"):
        NativeEngine(tiny.decoder("opt", word_embed_proj_dim=8))
    for name in ("gpt2", "opt"):  # OPT has learned two more, which it does not count by
        with pytest.raises(GenerateOptionError, match="64 positions"):
            generate(NativeEngine(make_model(name)), make_request(max_new_tokens=60))


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_what_broken_weights_left_behind_is_not_seen_by_the_next_request(is_cancelled):
    """Masked places of the cache are computed with: they must be numbers again."""
    model = make_model("llama").eval()
    engine = NativeEngine(model, num_slots=2)
    ids = torch.randint(3, 29, (4, 30), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[:2, :28] = 0  # short prompts first, so that the long ones look at places that were not written before
    # Some end early, so that a long prompt comes in beside a short text, which must not see the places before its own.
    options = GenerateOptions.parse(eos_token_id=[5, 8, 11, 14, 17, 20], pad_token_id=0)
    request = samples_of(
        input_ids=ids, attention_mask=mask, sample_ids=torch.arange(4), seed=0, options=options, max_new_tokens=16
    )
    weight = model.model.layers[0].self_attn.v_proj.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(float("nan"))
    if is_cancelled:
        engine.submit(request)
        engine.advance()
        engine.advance()
        engine.cancel(range(4))
    else:
        assert generate(engine, request).action_log_probs.isnan().any()
    with torch.no_grad():
        weight.copy_(kept)
    found = generate(engine, request)
    assert found.action_log_probs.isfinite().all()


def test_a_sample_that_has_ended_makes_room_at_once_and_a_shared_prompt_is_read_once(monkeypatch):
    calls = {"prompts": [], "steps": 0}
    prefill, decode = Decoder.prefill, Decoder.decode_columns

    def counted_prefill(self, reading, *arguments, **kwargs):
        calls["prompts"].append(len(reading.lengths))
        return prefill(self, reading, *arguments, **kwargs)

    def counted_decode(*arguments, **kwargs):
        calls["steps"] += 1
        return decode(*arguments, **kwargs)

    monkeypatch.setattr(Decoder, "prefill", counted_prefill)
    monkeypatch.setattr(Decoder, "decode_columns", counted_decode)
    model = make_model("llama")

    # Two at a time: while the first writes 14 tokens, the other slot has room for all the others. With a low limit, the
    # engine would wait until it can start several together.
    samples = rows_of(make_request(rows=12, max_new_tokens=32), [4, 0, 2, 9, 10, 11])
    rollout = generate(NativeEngine(model, num_slots=2), samples)
    assert rollout.action_mask.sum(dim=1).tolist() == [14, 3, 1, 3, 1, 1]
    assert calls["steps"] == 13  # and one token of each by reading its prompt
    calls["prompts"].clear()

    group = [dataclasses.replace(make_request()[0], id=one) for one in range(8)]
    generate(NativeEngine(model), group)
    assert calls["prompts"] == [1]


def test_a_sample_with_little_room_does_not_wait_until_all_others_have_ended():
    samples = make_request(rows=9, max_new_tokens=40, eos_token_id=None)
    engine = NativeEngine(make_model("llama"), num_slots=4)
    engine.submit(samples[:4])
    assert not engine.advance()
    engine.cancel([samples[0].id, samples[1].id])
    engine.submit(with_limits(samples[4:7], 1, 40, 40))
    assert [sample.id for _ in range(2) for sample in engine.advance()] == [samples[4].id]
    assert engine.room == 0  # two that started first, and two after them


@pytest.fixture
def replayed(monkeypatch):
    """The loop as on a GPU, but for its graphs, which compute their step anew; returns those that were captured."""
    monkeypatch.setattr("coati.rollout.native.loop.STEPS_PER_SNAPSHOT", 3)
    return as_on_a_gpu(monkeypatch)


@pytest.mark.parametrize("max_snapshots", [1, 2, 3])
def test_with_a_look_every_few_tokens_it_writes_the_same(replayed, max_snapshots, monkeypatch):
    monkeypatch.setattr("coati.rollout.native.loop.MAX_SNAPSHOTS", max_snapshots)
    model = make_model("llama")
    for request in (make_request(rows=12), with_limits(make_request(rows=12), *range(1, 8))):
        expected = generate(ReferenceEngine(model), request)
        for num_slots in (2, 4, 8):
            assert_same(generate(NativeEngine(model, num_slots=num_slots), request), expected)


def test_responses_of_one_token_need_no_step(monkeypatch):
    steps = []
    monkeypatch.setattr(NativeEngine, "_step", lambda *arguments: steps.append(arguments))
    request = make_request(rows=12, eos_token_id=list(range(make_model("llama").config.vocab_size)))
    rollout = generate(NativeEngine(make_model("llama"), num_slots=4), request)
    assert (rollout.action_mask.shape, bool(rollout.is_cut.any()), steps) == ((12, 1), False, [])


def test_weights_that_come_with_looks_under_way_count_from_the_steps_after(replayed):
    answers = iter([4, 5, 5, 5, 5])
    old, new = make_model("llama"), make_model("llama", seed=7).state_dict()
    request = make_request(eos_token_id=[], max_new_tokens=11)
    before = generate(NativeEngine(old), request)

    def commit():
        if (version := next(answers)) == 5:
            old.load_state_dict(new)
        return version

    rollout = generate(NativeEngine(old), request, version=4, between_tokens=commit)
    assert rollout.policy_versions.tolist() == [[4] * 7 + [5] * 4] * len(
        rollout.is_cut
    )  # one with the prompt, and two looks of three
    at = rollout.sequences.shape[1] - 4
    assert torch.equal(rollout.sequences[:, :at], before.sequences[:, :at])
    assert not torch.equal(rollout.action_log_probs[:, 7:], before.action_log_probs[:, 7:])


@pytest.mark.parametrize("num_slots", [4, 12])
def test_responses_of_full_length_waste_no_step_whenever_the_host_looks(replayed, num_slots, monkeypatch):
    steps, step = [], NativeEngine._step
    monkeypatch.setattr(
        NativeEngine, "_step", lambda self, count, *rest: (steps.append(count), step(self, count, *rest))
    )
    request = make_request(rows=12, eos_token_id=[], max_new_tokens=8)
    rollout = generate(NativeEngine(make_model("llama"), num_slots=num_slots), request)
    assert bool(rollout.action_mask.all())
    assert steps == [graph_size(num_slots)] * (12 // num_slots * 7)  # the first token comes with the prompt


def test_there_are_few_graphs_whatever_the_sizes_of_requests(replayed, monkeypatch):
    monkeypatch.setattr("coati.rollout.native.loop.MAX_SNAPSHOTS", 1)  # so that some end before the last look
    model = make_model("llama")
    engine = NativeEngine(model, num_slots=11)
    for count in (11, 7, 5):
        request = rows_of(make_request(rows=12), range(count))
        assert_same(generate(engine, request), generate(ReferenceEngine(model), request))
    sizes, lengths, *_ = map(set, zip(*engine._graphs.graphs, strict=True))
    assert {8, 16} < sizes <= {1, 2, 4, 8, 16}
    assert lengths == {8, 16}


def test_limits_and_prompts_of_other_lengths_need_no_other_graphs(replayed, monkeypatch):
    monkeypatch.setattr("coati.rollout.native.loop.SHORT_TEXT", 16)
    engine = NativeEngine(model := make_model("llama"), num_slots=4)
    for max_new_tokens in (9, 8, 7, 6, 5):
        request = make_request(rows=12, max_new_tokens=max_new_tokens, eos_token_id=[])
        assert_same(generate(engine, request), generate(ReferenceEngine(model), request))
    assert len(replayed) == 1


def test_the_number_of_graphs_is_bounded_and_the_least_used_go_first(replayed, monkeypatch):
    monkeypatch.setattr("coati.rollout.native.graphs.MAX_GRAPHS", 2)
    monkeypatch.setattr("coati.rollout.native.loop.SHORT_TEXT", 16)
    engine = NativeEngine(make_model("llama"), num_slots=4)
    for temperature, captures in ((1.0, 1), (2.0, 2), (1.0, 2), (3.0, 3), (1.0, 3), (2.0, 4)):
        generate(engine, make_request(rows=8, temperature=temperature, eos_token_id=[]))
        assert len(replayed) == captures


def test_graphs_of_kernels_are_for_short_texts_or_for_all(replayed, monkeypatch):
    # Of kernels the loop needs to know only that they do without.
    monkeypatch.setattr("coati.rollout.native.loop.TritonOperations", TorchOperations)
    engine = NativeEngine(make_model("llama"), num_slots=4)
    generate(engine, make_request(max_new_tokens=40, eos_token_id=[]))
    assert {length for _, length, *_ in engine._graphs.graphs} == {8, 64}


def test_biases_of_every_product_count():
    from transformers import LlamaConfig

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.5)
    expected = generate(ReferenceEngine(model), make_request())
    assert_same(generate(NativeEngine(model), make_request()), expected)


def test_a_request_larger_than_those_before_gets_more_room():
    model = make_model("llama")
    small, many_rows, long = (make_request(max_new_tokens=num_tokens) for num_tokens in (2, 2, 4))
    more_tokens = rows_of(make_request(max_new_tokens=3), [1, 2, 3])  # of shorter prompts, so in no more positions
    engine = NativeEngine(model, num_slots=3)
    for request in (rows_of(small, range(4)), many_rows, more_tokens, long):
        assert_same(generate(engine, request), generate(NativeEngine(model), request))


@pytest.mark.parametrize(("owner", "failing"), [(PagedCache, "enlarge"), (Decoder, "prefill")])
def test_an_engine_that_ran_out_of_memory_writes_what_fits_afterwards(owner, failing, monkeypatch):
    model, whole = make_model("llama"), getattr(owner, failing)
    engine = NativeEngine(model)
    generate(engine, make_request(rows=6, max_new_tokens=2))

    def out_of_memory(*_arguments, **_options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(owner, failing, out_of_memory)
    request = make_request(rows=40, max_new_tokens=40)
    engine.submit(request)  # takes no memory: callers expect it to run out in `advance`
    with pytest.raises(torch.OutOfMemoryError):
        engine.advance()
    engine.cancel([sample.id for sample in request])
    monkeypatch.setattr(owner, failing, whole)
    assert_same(generate(engine, make_request(rows=6)), generate(ReferenceEngine(model), make_request(rows=6)))
    assert_same(generate(engine, make_request()), generate(ReferenceEngine(model), make_request()))


@pytest.mark.parametrize("most_pages", [5, 7])
def test_pages_that_run_out_lose_no_token(most_pages, monkeypatch):
    given_up, give_up = [], NativeEngine._preempt
    monkeypatch.setattr(NativeEngine, "_preempt", lambda self, one: (given_up.append(one.id), give_up(self, one)))
    as_on_a_gpu(monkeypatch, most_pages=most_pages)  # of 4 tokens; a text has 12 at most
    model = make_model("llama")
    for options in ({}, {"eos_token_id": []}):
        request = make_request(rows=12, **options)
        engine = NativeEngine(model, num_slots=8)
        assert_same(generate(engine, request), generate(ReferenceEngine(model), request))
        assert len(engine._cache._free) == engine._cache.num_pages - 1
        assert engine.room == 8
    assert given_up


@pytest.mark.parametrize("length", range(1, 9))
def test_a_sample_that_ends_with_its_first_token_does_not_give_its_pages_up(length, monkeypatch):
    as_on_a_gpu(monkeypatch, most_pages=6)
    model = make_model("llama")

    def request(number, tokens, limit, **options):
        return [Sample(number, tokens, limit, 1, GenerateOptions.parse(**options))]

    first = generate(ReferenceEngine(model), request(1, [7] * length, 1, eos_token_id=[])).sequences[0, -1].item()
    for others in (1, 2, 3):
        engine, found = NativeEngine(model, num_slots=2), {}
        engine.submit(request(0, [5] * others, 16, eos_token_id=[first]))
        found.update((one.id, one) for one in engine.advance())
        engine.submit(request(1, [7] * length, 6, eos_token_id=[first]))  # pages run out in the pass that begins it
        while engine.room < 2:
            found.update((one.id, one) for one in engine.advance())
        assert found[1].response.tolist() == [first]
        assert not found[1].is_cut


def test_stop_strings_are_found_across_a_time_without_pages(monkeypatch):
    as_on_a_gpu(monkeypatch, most_pages=6)
    inner = Tokenizer(WordLevel({chr(97 + index): index for index in range(29)}, unk_token="a"))
    inner.decoder = Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    model = make_model("llama")
    written = generate(ReferenceEngine(model), make_request(rows=12, eos_token_id=[]))
    pairs = [tokenizer.decode(row[-7:][at : at + 2]) for row in written.sequences.tolist() for at in (1, 3, 4)]
    request = make_request(rows=12, eos_token_id=[], stop_strings=pairs[::5], tokenizer=tokenizer)
    expected = generate(ReferenceEngine(model), request)
    assert 0 < int(expected.is_cut.sum()) < 12
    assert_same(generate(NativeEngine(model, num_slots=8), request), expected)


def test_a_sample_that_no_page_is_left_for_is_an_error(monkeypatch):
    as_on_a_gpu(monkeypatch, most_pages=3)
    with pytest.raises(OutOfMemory, match=r"rollout\.max_new_tokens"):
        generate(NativeEngine(make_model("llama")), make_request(eos_token_id=[]))


def test_samples_of_a_prompt_share_the_pages_that_it_fills(monkeypatch):
    as_on_a_gpu(monkeypatch, page_size=2)
    model, engine = make_model("llama"), None
    prompt = make_request(eos_token_id=[], max_new_tokens=30)[0]  # none ends here
    group = [dataclasses.replace(prompt, id=one) for one in range(6)]
    engine = NativeEngine(model, num_slots=8)
    engine.submit(rows_of(group, range(4)))
    engine.advance()
    engine.submit(rows_of(group, [4]))  # finds them filled
    engine.advance()
    places = [sample.place for sample in engine._held]
    assert len({tuple(place.pages[:2]) for place in places}) == 1  # of 5 tokens
    own = [page for place in places for page in place.pages[2:]]
    assert len({*own}) == len(own)
    engine.commit(1)
    engine.submit(rows_of(group, [5]))  # by other weights
    engine.advance()
    assert places[0].pages
    assert not {*engine._held[-1].place.pages} & {*places[0].pages}
    engine.cancel(range(6))
    assert len(engine._cache._free) == engine._cache.num_pages - 1


def test_texts_are_read_in_passes_of_bounded_size(monkeypatch):
    monkeypatch.setattr("coati.rollout.native.prefill.PASS_TOKENS", 8)
    read, prefill = [], Decoder.prefill
    monkeypatch.setattr(
        Decoder,
        "prefill",
        lambda self, reading, *a, **k: (read.append(reading.lengths), prefill(self, reading, *a, **k))[1],
    )
    model = make_model("llama")
    assert_same(generate(NativeEngine(model), make_request()), generate(ReferenceEngine(model), make_request()))
    assert [sum(lengths) for lengths in read] == [5, 4 + 3, 2 + 5, 4 + 3, 2 + 5]

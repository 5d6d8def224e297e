"""The reference engine: the text of transformers, with keyed draws."""

import itertools
import math

import pytest
import torch
from tiny import samples_of
from transformers import StoppingCriteria

from coati.models import Actor, action_logprobs
from coati.models.lora import LoRASettings
from coati.randomness import keyed_uniforms
from coati.rollout import GenerateOptions, ReferenceEngine
from coati.rollout import generate as generate_with
from coati.rollout.sampling import inverse_cdf

PROMPTS = [[3, 4, 5], [6], [7, 8], [9, 10, 3, 4]]
INF, NAN = float("inf"), float("nan")


def padded(prompts):
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return ids, mask


def generate(model, prompts=PROMPTS, *, sample_ids=None, seed=0, max_new_tokens=8, **options):
    input_ids, attention_mask = padded(prompts)
    return generate_with(
        ReferenceEngine(model),
        samples_of(
            input_ids=input_ids,
            attention_mask=attention_mask,
            sample_ids=torch.tensor(sample_ids if sample_ids is not None else list(range(len(prompts)))),
            seed=seed,
            options=GenerateOptions.parse(**options),
            max_new_tokens=max_new_tokens,
        ),
    )


def responses(rollout):
    """Return the response tokens of each row, without padding."""
    num_actions = rollout.action_mask.shape[1]
    return [
        row[mask].tolist() for row, mask in zip(rollout.sequences[:, -num_actions:], rollout.action_mask, strict=True)
    ]


def first_tokens(model, count=400, **options):
    """Return the first token of `count` samples of one prompt."""
    rollout = generate(model, [PROMPTS[0]] * count, max_new_tokens=1, **options)
    return rollout.sequences[:, -1]


def first_probabilities(model, temperature=1.0):
    with torch.no_grad():
        logits = model(torch.tensor([PROMPTS[0]])).logits[0, -1]
    return torch.softmax(logits.double() / temperature, dim=-1)


# Keyed draws


def test_responses_do_not_depend_on_batch_and_row(llama):
    model = llama(num_hidden_layers=2)
    together = responses(generate(model, sample_ids=[10, 11, 12, 13], eos_token_id=[]))
    assert len(set(map(tuple, together))) == 4
    backwards = responses(generate(model, PROMPTS[::-1], sample_ids=[13, 12, 11, 10], eos_token_id=[]))
    assert backwards[::-1] == together
    for index, prompt in enumerate(PROMPTS):
        alone = generate(model, [prompt], sample_ids=[10 + index], eos_token_id=[])
        assert responses(alone) == [together[index]]


def test_a_longer_limit_continues_the_same_text(llama):
    model = llama()
    short, long = (generate(model, eos_token_id=[], max_new_tokens=count) for count in (4, 9))
    assert [row[:4] for row in responses(long)] == responses(short)


def test_different_ids_and_seeds_give_different_text(llama):
    model = llama()
    same_prompt = responses(generate(model, [PROMPTS[0]] * 6, eos_token_id=[]))
    assert len(set(map(tuple, same_prompt))) == 6
    other_seed = responses(generate(model, [PROMPTS[0]] * 6, eos_token_id=[], seed=1))
    assert not set(map(tuple, same_prompt)) & set(map(tuple, other_seed))


def test_the_global_torch_generator_is_not_used(llama):
    model = llama()
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = responses(generate(model))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert responses(generate(model)) == one


def test_draws_are_the_inverse_cdf_of_keyed_uniforms(llama):
    # The definition in plain Python: the first token with cumulative probability above u.
    model = llama()
    probabilities = first_probabilities(model).tolist()
    expected = []
    for uniform in keyed_uniforms(5, range(50), 1)[:, 0]:
        total = 0.0
        for token, probability in enumerate(probabilities):
            total += probability
            if total > uniform:
                expected.append(token)
                break
    assert first_tokens(model, 50, seed=5).tolist() == expected


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_samples_follow_the_distribution_at_the_temperature(llama, temperature):
    # 10 degrees of freedom: chi-square is below 29.6 in 99.9 % of cases, and the seed is fixed. The wrong temperature
    # gives hundreds.
    model = llama(initializer_range=0.2)
    probabilities = first_probabilities(model, temperature)
    counts = torch.bincount(first_tokens(model, 1000, temperature=temperature), minlength=11)
    assert ((counts - 1000 * probabilities) ** 2 / (1000 * probabilities)).sum() < 29.6


# Inverse CDF by hand


@pytest.mark.parametrize(
    ("uniform", "token"), [(0.0, 1), (0.2499, 1), (0.25, 3), (0.74, 3), (0.7501, 4), (1 - 2**-53, 4)]
)
def test_inverse_cdf_by_hand(uniform, token):
    # cumulative: 0, 0.25, 0.25, 0.75, 1, 1; tokens 0, 2 and 5 have no mass
    probabilities = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]], dtype=torch.float64)
    assert inverse_cdf(probabilities.log(), torch.tensor([uniform])).tolist() == [token]


def test_inverse_cdf_renormalises_after_a_cut():
    # masses 0.1 and 0.3 are left, so the first has a share of 0.25
    log_probs = torch.tensor([[0.1, 0.0, 0.3]]).log().expand(3, 3)
    assert inverse_cdf(log_probs, torch.tensor([0.0, 0.24, 0.26])).tolist() == [0, 0, 2]


def test_inverse_cdf_never_rounds_past_the_last_token_with_mass():
    log_probs = torch.tensor([[0.3, 0.3, 0.4, 0.0]]).log()
    assert inverse_cdf(log_probs, torch.tensor([1.0])).tolist() == [2]


def test_inverse_cdf_of_nan_is_a_valid_token():
    # Non-finite weights give nan log-probs, which the learner skips and reports; a bad index would crash the maker.
    tokens = inverse_cdf(torch.tensor([[NAN, NAN], [0.0, NAN]]), torch.tensor([0.1, 0.9]))
    assert tokens.max() <= 1


# Cutting the distribution


def test_top_k_draws_exactly_the_k_likeliest(llama):
    model = llama(initializer_range=0.2)
    kept = set(first_probabilities(model).topk(3).indices.tolist())
    assert set(first_tokens(model, top_k=3).tolist()) == kept


def test_top_p_draws_exactly_the_nucleus(llama):
    model = llama(initializer_range=0.2)
    probabilities, order = first_probabilities(model).sort(descending=True)
    # A token is kept if all likelier ones together have less than 0.6.
    kept = set(order[probabilities.cumsum(0) - probabilities < 0.6].tolist())
    assert 1 < len(kept) < 11
    assert set(first_tokens(model, top_p=0.6).tolist()) == kept


def test_min_p_draws_exactly_the_likely_tokens(llama):
    model = llama(initializer_range=0.2)
    probabilities = first_probabilities(model)
    kept = set((probabilities >= 0.5 * probabilities.max()).nonzero().flatten().tolist())
    assert 1 < len(kept) < 11
    assert set(first_tokens(model, min_p=0.5).tolist()) == kept


def test_log_probs_are_those_before_the_cut(llama):
    model = llama()
    rollout = generate(model, [PROMPTS[0]], max_new_tokens=1, top_k=1)
    expected = first_probabilities(model).max().log()
    assert rollout.action_log_probs.item() == pytest.approx(expected.item(), abs=1e-6)
    assert expected < -0.1  # after the cut it would be log 1


# Log-probs


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.6}, {"temperature": 1.5, "top_k": 4}, {"do_sample": False}])
def test_action_log_probs_match_scoring(request, family, options):
    model = request.getfixturevalue(family)(num_hidden_layers=2)
    rollout = generate(model, **options)
    temperature = options.get("temperature", 1.0)
    num_actions = rollout.action_mask.shape[1]
    scored, _ = action_logprobs(
        model,
        rollout.sequences,
        rollout.attention_mask,
        num_actions,
        temperatures=torch.full((4,), temperature),
    )
    torch.testing.assert_close(
        rollout.action_log_probs, scored.detach().masked_fill(~rollout.action_mask, 0.0), atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_greedy_decoding_matches_transformers(request, family):
    model = request.getfixturevalue(family)(num_hidden_layers=2)
    input_ids, attention_mask = padded(PROMPTS)
    expected = model.generate(input_ids, attention_mask=attention_mask, do_sample=False, max_new_tokens=8)
    rollout = generate(model, do_sample=False)
    assert torch.equal(rollout.sequences, expected)


# Ends


def long_rollout(model, **options):
    """Generate enough text for every row to end, at different lengths."""
    return generate(model, [PROMPTS[0]] * 12, max_new_tokens=40, **options)


@pytest.mark.parametrize("pad", [0, 2], ids=["pad", "pad is eos"])
def test_a_response_ends_with_its_first_eos_token(llama, pad):
    rollout = long_rollout(llama(), eos_token_id=2, pad_token_id=pad)
    texts = responses(rollout)
    assert len(set(map(len, texts))) > 1
    assert not rollout.is_cut.any()
    assert all(text.index(2) == len(text) - 1 for text in texts)
    assert torch.equal(rollout.attention_mask[:, 3:], rollout.action_mask.long())
    assert (rollout.sequences[:, 3:][~rollout.action_mask] == pad).all()
    assert (rollout.action_log_probs[~rollout.action_mask] == 0).all()
    assert (rollout.action_log_probs[rollout.action_mask] < 0).all()


def test_the_padding_token_does_not_change_the_text(llama):
    model = llama()
    one, other = (responses(long_rollout(model, eos_token_id=2, pad_token_id=pad)) for pad in (0, 2))
    assert one == other


def test_any_of_several_end_tokens_ends_a_response(llama):
    texts = responses(long_rollout(llama(), eos_token_id=[2, 4]))
    assert {text[-1] for text in texts} == {2, 4}
    assert not any({2, 4} & set(text[:-1]) for text in texts)


def test_without_eos_token_every_response_is_cut_at_the_limit(llama):
    rollout = generate(llama(eos_token_id=None), max_new_tokens=5)
    assert rollout.action_mask.shape == (4, 5)
    assert rollout.action_mask.all()
    assert rollout.is_cut.all()


def test_an_eos_token_at_the_limit_is_not_a_cut(llama):
    model = llama()
    text = responses(long_rollout(model))[0]
    exact = generate(model, [PROMPTS[0]], max_new_tokens=len(text))
    shorter = generate(model, [PROMPTS[0]], max_new_tokens=max(1, len(text) - 1))
    assert (responses(exact), exact.is_cut.tolist()) == ([text], [False])
    assert (responses(shorter), shorter.is_cut.tolist()) == ([text[:-1]], [True])


class StopAtFour(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] == 4


@pytest.mark.parametrize("eos", [[], [2]], ids=["no eos", "eos"])
@pytest.mark.parametrize("pad", [0, 2, 9])
def test_tokens_after_a_stopping_criterion_are_dropped(llama, eos, pad):
    # Without an end token transformers keeps generating in finished rows, with one it pads them.
    model = llama()
    rollout = long_rollout(model, eos_token_id=eos, pad_token_id=pad, stopping_criteria=[StopAtFour()])
    texts = responses(rollout)
    unstopped = responses(long_rollout(model, eos_token_id=eos, pad_token_id=pad))
    assert texts == [text[: text.index(4) + 1] if 4 in text else text for text in unstopped]
    assert len(set(map(len, texts))) > 1
    assert not rollout.is_cut.any()


@pytest.mark.parametrize(("eos", "pad"), [([2], 0), ([2], 2), ([], 0)], ids=["pad", "pad is eos", "no eos"])
def test_each_row_has_its_own_limit(llama, eos, pad):
    # A row that would end after its limit is cut.
    model = llama()
    options = {"eos_token_id": eos, "pad_token_id": pad, "stopping_criteria": [StopAtFour()]}
    whole = long_rollout(model, **options)
    limits = torch.arange(12) % 5 + 1
    rollout = generate(model, [PROMPTS[0]] * 12, max_new_tokens=limits, **options)
    texts = responses(whole)
    assert responses(rollout) == [text[:limit] for text, limit in zip(texts, limits.tolist(), strict=True)]
    assert rollout.is_cut.tolist() == [len(text) > limit for text, limit in zip(texts, limits.tolist(), strict=True)]
    assert 0 < rollout.is_cut.sum() < 12


def test_a_row_that_fills_the_context_ends_while_others_continue(gpt2):
    # With a context of 8, the second prompt has room for 2 tokens, the others for more. Every token has a new version.
    model, versions = gpt2(n_positions=8), itertools.count(2)
    input_ids, attention_mask = padded([[4, 5], [3] * 6, [6]])
    rollout = generate_with(
        ReferenceEngine(model),
        samples_of(
            input_ids=input_ids,
            attention_mask=attention_mask,
            sample_ids=torch.arange(3),
            seed=0,
            options=GenerateOptions.parse(eos_token_id=[]),
            max_new_tokens=torch.tensor([4, 2, 3]),
        ),
        version=1,
        between_tokens=lambda: next(versions),
    )
    assert torch.equal(rollout.sequences[:, :6], input_ids)
    assert rollout.action_mask.sum(dim=1).tolist() == [4, 2, 3]
    assert rollout.is_cut.all()
    written_by = [row[mask].tolist() for row, mask in zip(rollout.policy_versions, rollout.action_mask, strict=True)]
    assert written_by == [[1, 2, 3, 4], [1, 2], [1, 2, 3]]


# Options and defaults that reach transformers


def test_saved_generation_defaults_do_not_change_the_policy(llama):
    clean = generate(llama())
    model = llama()
    saved = model.generation_config
    saved.update(
        do_sample=True,
        temperature=0.01,
        top_k=1,
        top_p=0.1,
        min_p=0.9,
        repetition_penalty=50.0,
        no_repeat_ngram_size=1,
        min_new_tokens=6,
        suppress_tokens=[3, 4, 5],
        num_beams=2,
        max_length=1,
        return_dict_in_generate=True,
    )
    rollout = generate(model)
    assert responses(rollout) == responses(clean)
    assert torch.equal(rollout.action_log_probs, clean.action_log_probs)
    assert model.generation_config is saved


def test_the_saved_eos_token_is_used(llama):
    model = llama()
    model.generation_config.eos_token_id = 4
    assert all(text[-1] == 4 for text in responses(long_rollout(model)))


def test_a_failure_restores_the_mode_and_drops_the_samples(llama):
    model = llama()
    model.train()
    engine = ReferenceEngine(model)

    class Broken(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            raise RuntimeError("broken criterion")

    before = engine.room
    request = samples_of(
        input_ids=torch.tensor([[3, 4]]),
        attention_mask=torch.ones(1, 2, dtype=torch.long),
        sample_ids=torch.arange(1),
        seed=0,
        options=GenerateOptions.parse(stopping_criteria=[Broken()]),
        max_new_tokens=4,
    )
    with pytest.raises(RuntimeError, match="broken criterion"):
        generate_with(engine, request)
    assert model.training
    assert engine.room == before


def test_dropout_is_off_while_generating_and_the_mode_is_restored(gpt2):
    model = gpt2(resid_pdrop=0.9, embd_pdrop=0.9, attn_pdrop=0.9)
    expected = responses(generate(model))
    model.train()
    assert responses(generate(model)) == expected
    assert model.training


def test_an_actor_with_zero_adapters_matches_its_model(llama):
    expected = responses(generate(llama()))
    model = llama()
    model.generation_config.repetition_penalty = 50.0
    actor = Actor(model, lora=LoRASettings(rank=2))  # B starts at zero: the same function
    assert responses(generate(actor)) == expected
    assert actor.model.generation_config.repetition_penalty == 50.0
    assert actor.model.get_base_model().generation_config.repetition_penalty == 50.0


def test_generating_in_float64_or_bfloat16_gives_finite_log_probs(llama):
    for dtype in (torch.float64, torch.bfloat16):
        rollout = generate(llama().to(dtype))
        assert rollout.action_log_probs.dtype == torch.float32
        assert math.isfinite(rollout.action_log_probs.sum())

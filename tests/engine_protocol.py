"""Tests of the `RolloutEngine` protocol, which every engine must pass.

A test module of an engine imports everything from here and provides two fixtures: `make_engine(model, **settings)`
returns an engine with `PLACES` slots, unless settings change that, and `policy(seed)` returns a model for it.
"""

import pytest
import torch

from coati.errors import DataError
from coati.experience import Sample
from coati.models.actor import action_logprobs
from coati.rollout import GenerateOptions, generate

PLACES = 3
PROMPTS = [[3, 4, 5], [6], [7, 8], [9, 10, 3, 4, 11], [5, 5], [12, 13, 14]]
ENDS = [2, 5, 8, 11]  # several, so that responses have different lengths


def request_of(ids, *, limit=9, is_kept=False, needs_log_probs=True, **options):
    """Return samples with these ids; sample n continues prompt n modulo the number of prompts."""
    options = GenerateOptions.parse(**{"eos_token_id": ENDS, "pad_token_id": 0, **options})
    return [Sample(one, PROMPTS[one % len(PROMPTS)], limit, 1, options, is_kept, needs_log_probs) for one in ids]


def finish(engine, count, between=lambda: None):
    """Advance until `count` responses have ended, and return them by sample id."""
    found = {}
    for _ in range(200):
        if len(found) == count:
            return found
        for response in engine.advance():
            assert response.id not in found
            found[response.id] = response
        between()
    raise AssertionError(f"{count - len(found)} responses have not ended")


def learners(model, context, num_tokens, temperature=1.0):
    """Compute the log-probs of the last tokens of a text with the learner's code."""
    ids = torch.tensor([context])
    with torch.no_grad():
        scores, _ = action_logprobs(
            model, ids, torch.ones_like(ids), num_tokens, temperatures=torch.tensor([temperature])
        )
    return scores[0]


def assert_exact(model, context, response, temperature=1.0):
    tokens = response.response.tolist()
    expected = learners(model, [*context, *tokens], len(tokens), temperature)
    torch.testing.assert_close(response.log_probs.cpu(), expected, atol=1e-4, rtol=0)


def load(model, other):
    """Copy the weights of another model into the memory of this one's."""
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(other.state_dict()[name])


def texts(responses):
    return {one: response.response.tolist() for one, response in responses.items()}


def test_responses_do_not_depend_on_arrival_or_batch_composition(make_engine, policy):
    model = policy(0)
    together = make_engine(model)
    together.submit(request_of(range(8)))
    expected = finish(together, 8)
    assert len({len(text) for text in texts(expected).values()}) > 2
    engine = make_engine(model)
    engine.submit(request_of([7, 2]))
    found = {response.id: response for _ in range(2) for response in engine.advance()}
    engine.submit(request_of([5, 0, 1, 3, 4, 6]))
    found |= finish(engine, 8 - len(found))
    assert texts(found) == texts(expected)
    for one, response in found.items():
        torch.testing.assert_close(response.log_probs, expected[one].log_probs, atol=1e-5, rtol=0)
        assert response.is_cut == expected[one].is_cut


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7}, {"do_sample": False}], ids=str)
def test_log_probs_match_the_learner(make_engine, policy, options):
    model = policy(0)
    engine = make_engine(model)
    engine.submit(request_of(range(PLACES), **options))
    for one, response in finish(engine, PLACES).items():
        assert_exact(model, PROMPTS[one], response, options.get("temperature", 1.0))
        assert response.is_cut == (response.response[-1].item() not in ENDS)


def test_requests_with_different_options_do_not_mix(make_engine, policy):
    model = policy(0)
    engine = make_engine(model)
    engine.submit(request_of([0, 1, 2, 3], temperature=0.7))
    engine.submit(request_of([4, 5, 6], eos_token_id=[], limit=3))
    found = finish(engine, 7)
    for one, response in found.items():
        assert_exact(model, PROMPTS[one % 6], response, 0.7 if one < 4 else 1.0)
    assert [len(found[one].response) for one in (4, 5, 6)] == [3, 3, 3]


def test_waiting_samples_take_slots_as_responses_end(make_engine, policy):
    engine = make_engine(policy(0))
    before = engine.room
    engine.submit(request_of([0, 1], eos_token_id=[], limit=2))
    assert engine.room == before - 2
    engine.submit(request_of(range(2, 12), eos_token_id=[], limit=7))
    assert engine.room == max(0, before - 12)
    ends = []
    while len(ends) < 12:
        ends += [response.id for response in engine.advance()]
    assert sorted(ends) == list(range(12))
    assert set(ends[:2]) == {0, 1}  # they do not wait for long ones
    assert engine.room == before
    assert engine.advance() == []


def test_every_token_has_the_version_that_generated_it(make_engine, policy):
    engine = make_engine(policy(0))
    versions = iter(range(11, 100))
    engine.commit(10)
    engine.submit(request_of([0, 1], eos_token_id=[], limit=6))
    found = finish(engine, 2, lambda: engine.commit(next(versions)))
    for response in found.values():
        written_by = response.versions.tolist()
        assert written_by[0] == 10
        assert written_by == sorted(written_by)
        assert len(set(written_by)) > 1
    engine.submit(request_of([2], limit=1))
    assert finish(engine, 1)[2].versions.tolist() == [next(versions) - 1]


def test_new_weights_generate_the_next_tokens_with_the_old_cache(make_engine, policy):
    model, old, new = policy(0), policy(0), policy(1)
    engine = make_engine(model)
    engine.submit(request_of([0, 1], eos_token_id=[], limit=8))
    engine.advance()
    engine.advance()
    load(model, new)
    engine.commit(1)
    for one, response in finish(engine, 2).items():
        tokens = response.response.tolist()
        num_old = response.versions.tolist().count(0)
        assert 0 < num_old < 8
        by_old, by_new = (learners(which, [*PROMPTS[one], *tokens], 8) for which in (old, new))
        found = response.log_probs.cpu()
        torch.testing.assert_close(found[:num_old], by_old[:num_old], atol=1e-4, rtol=0)
        for other in (by_old, by_new):
            assert float((found - other)[num_old:].abs().max()) > 1e-4
    engine.submit(request_of([2]))  # a new sample uses nothing from the old weights
    assert_exact(new, PROMPTS[2], finish(engine, 1)[2])


def test_cancelled_samples_are_not_returned_and_can_be_resubmitted(make_engine, policy):
    model = policy(0)
    engine = make_engine(model)
    before = engine.room
    samples = request_of(range(5), eos_token_id=[], limit=6)
    engine.submit(samples)
    engine.advance()
    engine.advance()
    engine.cancel([1, 4, 77])  # one is in flight, one may wait, one is unknown
    assert set(finish(engine, 3)) == {0, 2, 3}
    assert engine.room == before
    engine.submit([samples[1], samples[4]])  # engines do not change submitted samples
    again = finish(engine, 2)
    expected = generate(make_engine(model), request_of([1, 4], eos_token_id=[], limit=6))
    assert [again[one].response.tolist() for one in (1, 4)] == expected.sequences[:, -6:].tolist()
    engine.submit([*again.values()])  # samples that have ended can be resubmitted too
    assert texts(finish(engine, 2)) == texts(again)


def test_a_dialogue_continues_with_its_cache_and_draws(make_engine, policy):
    model = policy(0)
    engine = make_engine(model)
    before = engine.room
    engine.submit(request_of([0, 3], is_kept=True, limit=4))
    first = finish(engine, 2)
    engine.submit(request_of([4, 5], eos_token_id=[], limit=9))
    engine.advance()
    turns = {0: [7, 7, 9], 3: [4]}
    for one, tokens in turns.items():
        engine.extend(one, tokens, 5)
    found = finish(engine, 4)
    for one, tokens in turns.items():
        context = [*PROMPTS[one], *first[one].response.tolist(), *tokens]
        assert_exact(model, context, found[one])
    engine.extend(3, [5, 6], 2)
    assert 0 < len(finish(engine, 1)[3].response) <= 2
    engine.cancel([0, 3])
    assert engine.room == before
    # The second turn uses new random numbers.
    greedy = make_engine(model)
    greedy.submit(request_of([0], is_kept=True, limit=4))
    assert texts(finish(greedy, 1)) == {0: first[0].response.tolist()}
    greedy.extend(0, turns[0], 5)
    assert texts(finish(greedy, 1))[0] == found[0].response.tolist()


def test_a_larger_request_can_join_running_ones(make_engine, policy):
    model = policy(0)
    engine = make_engine(model)
    engine.submit(request_of([0], eos_token_id=[], limit=6))
    engine.advance()
    engine.submit(request_of([3, 9], eos_token_id=[], limit=30))
    for one, response in finish(engine, 3).items():
        assert_exact(model, PROMPTS[one % 6], response)


def test_duplicate_sample_ids_are_rejected(make_engine, policy):
    with pytest.raises(DataError, match="sample_ids"):
        make_engine(policy(0)).submit(request_of([1, 1]))

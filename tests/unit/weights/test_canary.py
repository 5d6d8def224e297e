"""Does a maker compute what its trainer computes? A fixed prompt decides."""

import doctest

import pytest
import tiny
import torch
from torch import nn
from weight_testing import Maker, deliver, header_of, messages_of

import coati.weights.canary
from coati.errors import ConfigError, WeightUpdateError
from coati.models import Actor
from coati.weights.canary import canary_tokens, make_canary


def make_actor(seed, **changes):
    actor = Actor(tiny.llama(seed, vocab_size=50, **changes))
    torch.nn.init.normal_(actor.model.lm_head.weight)  # a fresh model hardly tells tokens apart
    return actor


def update(actor, version, canary):
    return messages_of({"actor": actor}, header=header_of(version), canary=make_canary(canary), max_bytes=500)


@pytest.fixture
def maker():
    return Maker({"actor": make_actor(0)}, name="maker maker-3")


def same_weights(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_docstring_examples_run():
    result = doctest.testmod(coati.weights.canary)
    assert result.attempted > 0
    assert result.failed == 0


def test_the_prompt_is_spread_over_the_vocabulary():
    # 0.381966 · 1000 = 382: 0, 382, 764, then 1146 - 1000 and so on
    assert canary_tokens(1000, length=4).tolist() == [[0, 382, 764, 146]]
    assert canary_tokens(1, length=3).tolist() == [[0, 0, 0]]
    assert len(set(canary_tokens(151_936).flatten().tolist())) == 16


def test_the_canary_is_the_log_softmax_of_the_next_token():
    actor = make_actor(1).eval()
    tokens = canary_tokens(50)
    logprobs = actor(tokens).logits.log_softmax(-1)
    expected = [logprobs[0, at, tokens[0, at + 1]].item() for at in range(15)]
    assert make_canary(actor).logprobs == pytest.approx(expected, abs=1e-5)


def test_every_module_is_left_in_the_mode_it_was_in():
    actor = make_actor(1).eval()
    actor.model.model.layers[0].training = True  # as layers that compute their activations twice believe to be
    modes = [module.training for module in actor.modules()]
    make_canary(actor)
    assert [module.training for module in actor.modules()] == modes
    assert all(parameter.grad is None for parameter in actor.parameters())


def test_sixteen_bit_weights_are_given_room_and_full_precision_ones_are_not():
    assert make_canary(make_actor(1)).tolerance == 1e-4
    assert make_canary(make_actor(1).bfloat16()).tolerance == 0.1


def test_a_model_without_a_vocabulary_is_told_what_to_use_instead():
    with pytest.raises(ConfigError, match='Use verify_updates = "checksum"'):
        make_canary(nn.Linear(2, 2))


def test_an_update_that_computes_the_same_is_served(maker):
    trainer = make_actor(1)
    deliver(update(trainer, 1, trainer), maker)
    with maker.served.use() as version:
        assert version == 1
    assert same_weights(maker.models["actor"], trainer)


def test_an_update_that_computes_otherwise_is_never_served_and_a_full_one_that_passes_heals(maker):
    trainer, other = make_actor(1), make_actor(2)
    with pytest.raises(WeightUpdateError, match=r"maker-3 .*version 1 .* nats .* instead of"):
        deliver(update(trainer, 1, other), maker)
    assert maker.served.version == 0
    with pytest.raises(WeightUpdateError, match="Send a full update"), maker.served.use():
        pass
    deliver(update(trainer, 1, trainer), maker)
    with maker.served.use() as version:
        assert version == 1


def test_an_update_of_some_weights_heals_nothing(maker):
    trainer, other = make_actor(1), make_actor(2)
    with pytest.raises(WeightUpdateError, match="nats"):
        deliver(update(trainer, 1, other), maker)
    trainer.requires_grad_(False).model.lm_head.requires_grad_(True)
    deliver(messages_of({"actor": trainer}, header=header_of(2), is_full=False), maker)
    assert maker.served.version == 2
    with pytest.raises(WeightUpdateError, match="Send a full update"), maker.served.use():
        pass


def test_work_that_was_done_before_a_bad_update_is_not_lost(maker, caplog):
    with maker.served.use() as version:  # generation continues with what serves, while the update waits
        deliver(update(make_actor(1), 1, make_actor(2)), maker)
    assert version == 0
    assert "does not compute" in caplog.text
    with pytest.raises(WeightUpdateError, match="version 1"), maker.served.use():
        pass


def test_nan_on_both_sides_does_not_pass(maker):
    trainer = make_actor(1)
    with torch.no_grad():
        trainer.model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(WeightUpdateError, match="differ by nan"):
        deliver(update(trainer, 1, trainer), maker)


def test_a_commit_in_the_middle_of_a_generation_is_checked_too(maker):
    trainer, other = make_actor(1), make_actor(2)
    with maker.served.use():
        deliver(update(trainer, 1, trainer), maker)
        assert maker.served.commit_point() == 1
        deliver(update(trainer, 2, other), maker)
        with pytest.raises(WeightUpdateError, match="version 2"):
            maker.served.commit_point()
    with pytest.raises(WeightUpdateError, match="version 2"), maker.served.use():
        pass

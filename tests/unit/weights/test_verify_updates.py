"""What a receiver checks beyond names: every byte, what the actor computes, or neither."""

import dataclasses
import doctest

import pytest
import torch
from torch import nn
from transformers import LlamaConfig

import coati.weights.canary
from coati.errors import ConfigError, WeightUpdateError
from coati.models import Actor
from coati.trainer.strategies.state_chunks import iter_state_chunks
from coati.weights import ServedModels, WeightStage, check_verify_updates, make_canary, new_header, weight_messages
from coati.weights import publisher as publisher_module
from coati.weights import stage as stage_module
from coati.weights.canary import canary_logprobs, canary_tokens, tolerance_of

CONFIG = LlamaConfig(
    hidden_size=8,
    intermediate_size=8,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    vocab_size=50,
    max_position_embeddings=32,
)


def make_actor(seed, **kwargs):
    torch.manual_seed(seed)
    actor = Actor.from_config(CONFIG, **kwargs)
    torch.nn.init.normal_(actor.model.lm_head.weight)  # a fresh model hardly tells tokens apart
    return actor


def messages_of(actor, version, **kwargs):
    header = new_header(version=version, source="trainer 0")
    shards = (("actor", chunk) for chunk in iter_state_chunks(actor, max_bytes=500))
    *chunks, manifest = weight_messages(header, shards, **kwargs)
    return header, chunks, manifest


def deliver(stage, header, chunks, manifest):
    stage.begin(header.update_id, version=header.version, source=header.source)
    for chunk in chunks:
        stage.add_chunk(chunk)
    return stage.finish(manifest)


def flipped(chunk):
    """The same chunk with one bit of its first tensor changed."""
    name, wire = next(iter(chunk.tensors.items()))
    array = wire.array.copy()
    array.reshape(-1).view("uint8")[0] ^= 1
    return dataclasses.replace(chunk, tensors={**chunk.tensors, name: wire._replace(array=array)})


@pytest.fixture
def maker():
    actor = make_actor(0)
    served = ServedModels({"actor": actor}, name="maker maker-3")
    return actor, WeightStage({"actor": actor}), served


def same_weights(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_only_the_three_ways_are_known():
    for value in ("checksum", "canary", "off"):
        check_verify_updates(value)
    with pytest.raises(ConfigError, match=r'"checksum", "canary" or "off", got \'crc\''):
        check_verify_updates("crc")


# Off.


def test_off_hashes_nothing_on_either_side(maker, monkeypatch):
    def forbidden(_):
        raise AssertionError("hashed")

    monkeypatch.setattr(publisher_module, "checksum", forbidden)
    monkeypatch.setattr(stage_module, "checksum", forbidden)
    actor, stage, served = maker
    trainer = make_actor(1)
    served.offer(deliver(stage, *messages_of(trainer, 1, has_checksums=False)))
    assert same_weights(actor, trainer)


def test_off_still_checks_names_shapes_and_counts(maker):
    _, stage, _ = maker
    header, chunks, manifest = messages_of(make_actor(1), 1, has_checksums=False)
    with pytest.raises(WeightUpdateError, match="missing 1 of"):
        deliver(stage, header, chunks[1:], manifest)
    names = list(chunks[-1].tensors)
    short = dataclasses.replace(chunks[-1], tensors={name: chunks[-1].tensors[name] for name in names[:-1]})
    with pytest.raises(WeightUpdateError, match="do not hold the tensors"):
        deliver(stage, header, [*chunks[:-1], short], manifest)


def test_a_chunk_cannot_drop_its_checksum_on_the_way(maker):
    _, stage, _ = maker
    header, chunks, manifest = messages_of(make_actor(1), 1)
    bare = dataclasses.replace(flipped(chunks[0]), checksum=None)
    with pytest.raises(WeightUpdateError, match="chunk 0 is not the one the manifest lists"):
        deliver(stage, header, [bare, *chunks[1:]], manifest)


# Hashing one chunk ahead of the one that is sent.


def test_every_chunk_carries_its_own_checksum_in_order():
    _, chunks, manifest = messages_of(make_actor(1), 1)
    assert len(chunks) > 3
    assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
    assert manifest.chunk_checksums == tuple(publisher_module.checksum(chunk.tensors) for chunk in chunks)


def test_at_most_one_chunk_is_drawn_ahead_of_the_one_that_is_sent():
    drawn = []

    def shards():
        for index in range(5):
            drawn.append(index)
            yield "actor", {f"w{index}": torch.zeros(1)}

    sent = [
        len(drawn) - message.index
        for message in weight_messages(new_header(version=1, source="t"), shards())
        if isinstance(message, publisher_module.WeightChunk)
    ]
    assert sent == [2, 2, 2, 2, 1]


# The canary.


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
    assert canary_logprobs(actor) == pytest.approx(expected, abs=1e-5)


def test_every_module_is_left_in_the_mode_it_was_in():
    actor = make_actor(1).eval()
    actor.model.model.layers[0].training = True  # as layers that compute their activations twice believe to be
    modes = [module.training for module in actor.modules()]
    canary_logprobs(actor)
    assert [module.training for module in actor.modules()] == modes
    assert all(parameter.grad is None for parameter in actor.parameters())


def test_sixteen_bit_weights_are_given_room_and_full_precision_ones_are_not():
    assert tolerance_of(make_actor(1)) == 1e-4
    assert tolerance_of(make_actor(1, dtype=torch.bfloat16)) == 0.1


def test_a_model_without_a_vocabulary_is_told_what_to_use_instead():
    with pytest.raises(ConfigError, match='Use verify_updates = "checksum"'):
        make_canary(nn.Linear(2, 2))


def test_an_update_that_computes_the_same_is_served(maker):
    actor, stage, served = maker
    trainer = make_actor(1)
    assert served.offer(deliver(stage, *messages_of(trainer, 1, canary=make_canary(trainer))))
    with served.use() as version:
        assert version == 1
    assert same_weights(actor, trainer)


def test_an_update_that_computes_otherwise_is_never_served_and_a_full_one_that_passes_heals(maker):
    _, stage, served = maker
    trainer, other = make_actor(1), make_actor(2)
    bad = deliver(stage, *messages_of(trainer, 1, canary=make_canary(other)))
    expected = rf"maker maker-3 does not compute.*version 1 does.*expected \[{canary_logprobs(other)[0]:.4f}"
    with pytest.raises(WeightUpdateError, match=expected):
        served.offer(bad)
    assert served.version == 0
    with pytest.raises(WeightUpdateError, match="Send a full update before the models serve again"), served.use():
        pass
    served.offer(deliver(stage, *messages_of(trainer, 1, canary=make_canary(trainer))))
    with served.use() as version:
        assert version == 1


def test_work_that_was_done_before_a_bad_update_is_not_lost(maker, caplog):
    _, stage, served = maker
    with served.use() as version:  # generation goes on with what serves, while the update waits
        served.offer(deliver(stage, *messages_of(make_actor(1), 1, canary=make_canary(make_actor(2)))))
    assert version == 0
    assert "does not compute" in caplog.text
    with pytest.raises(WeightUpdateError, match="version 1"), served.use():
        pass


def test_nan_on_both_sides_does_not_pass(maker):
    _, stage, served = maker
    trainer = make_actor(1)
    with torch.no_grad():
        trainer.model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(WeightUpdateError, match="differ by nan"):
        served.offer(deliver(stage, *messages_of(trainer, 1, canary=make_canary(trainer))))


def test_a_commit_in_the_middle_of_a_generation_is_checked_too(maker):
    _, stage, served = maker
    trainer, other = make_actor(1), make_actor(2)
    with served.use():
        served.offer(deliver(stage, *messages_of(trainer, 1, canary=make_canary(trainer))))
        assert served.commit_point() == 1
        served.offer(deliver(stage, *messages_of(trainer, 2, canary=make_canary(other))))
        with pytest.raises(WeightUpdateError, match="version 2"):
            served.commit_point()
    with pytest.raises(WeightUpdateError, match="version 2"), served.use():
        pass

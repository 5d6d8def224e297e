"""An update arrives whole or not at all: round trips, and every way to damage one on its way."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from coati.errors import WeightUpdateError
from coati.models import Actor, Critic
from coati.weights import PLAIN_UPDATE, ServedModels, WeightStage, new_header, weight_messages
from coati.weights.manifest import make_chunk, specs_of
from coati.weights.stage import MAX_IDLE_SECONDS
from coati.wire import WireTensor, encode


def flipped(chunk, bit):
    """The same chunk with one bit of its payload changed and the checksum it was sent with."""
    tensors = dict(chunk.tensors)
    name = next(name for name, wire in tensors.items() if wire.nbytes)
    array = tensors[name].array.copy()
    raw = array.reshape(-1).view(np.uint8)
    raw[(bit // 8) % raw.size] ^= 1 << (bit % 8)
    tensors[name] = WireTensor(array, tensors[name].dtype)
    return dataclasses.replace(chunk, tensors=tensors)


def truncated(chunk):
    """The last tensor of the chunk is lost."""
    return dataclasses.replace(chunk, tensors=dict(list(chunk.tensors.items())[:-1]))


def with_tensor(sent, name, tensor, *, index=0):
    """An honest update (checksums and manifest fit) in which chunk `index` also holds this tensor."""
    chunks = list(sent.chunks)
    chunks[index] = make_chunk(
        sent.header, index, chunks[index].module, {**chunks[index].tensors, name: encode(tensor)}
    )
    shards = [(c.module, c.tensors) for c in chunks]
    return sent._replace(chunks=chunks, manifest=manifest_for(sent, shards))


def manifest_for(sent, shards):
    specs = tuple(spec for module, tensors in shards for spec in specs_of(module, tensors))
    sums = tuple(make_chunk(sent.header, i, m, t).checksum for i, (m, t) in enumerate(shards))
    return dataclasses.replace(sent.manifest, tensors=specs, chunk_checksums=sums)


@pytest.fixture
def receiver(make_models):
    models = make_models(0)
    return models, WeightStage(models), ServedModels(models)


# Round trips.


def test_actor_and_critic_arrive_to_the_bit(make_models, publish, receive, fingerprint, receiver):
    models, stage, served = receiver
    sender = make_models(7)
    assert fingerprint(models) != fingerprint(sender)
    update = receive(stage, publish(sender, version=3))
    assert served.offer(update) is True
    assert fingerprint(models) == fingerprint(sender)
    assert served.version == 3
    assert update.is_full
    assert stage.open_updates == ()


def test_tied_weights_travel_once_and_stay_tied(make_models, publish, receive, receiver):
    models, stage, served = receiver
    sender = make_models(7)
    sent = publish(sender)
    names = [spec.name for spec in sent.manifest.tensors]
    assert "embedding.weight" in names
    assert "head.weight" not in names
    served.offer(receive(stage, sent))
    assert models["actor"].head.weight is models["actor"].embedding.weight
    assert torch.equal(models["actor"].head.weight, sender["actor"].head.weight)


def test_dtypes_travel_as_they_are(make_models, publish):
    sent = publish(make_models(7))
    dtypes = {(spec.module, spec.name): spec.dtype for spec in sent.manifest.tensors}
    assert dtypes["actor", "embedding.weight"] == "bfloat16"
    assert dtypes["actor", "body.weight"] == "float32"
    assert dtypes["actor", "num_seen"] == "int64"
    assert dtypes["actor", "is_open"] == "bool"
    # 20 bf16 (40) + 16 + 4 floats (80) + one int64 (8) + 2 flags + nothing; critic 4 + 1 floats (20)
    assert sent.manifest.nbytes == 40 + 80 + 8 + 2 + 20
    assert sum(chunk.nbytes for chunk in sent.chunks) == sent.manifest.nbytes


def test_a_wider_float_is_rounded_to_the_receivers_width(receiver, receive, publish, make_models):
    models, stage, served = receiver
    sender = make_models(7)
    sender["actor"].float()
    with torch.no_grad():
        sender["actor"].embedding.weight.fill_(1.00390625)  # 1 + 2⁻⁸: bfloat16 rounds it to 1
    served.offer(receive(stage, publish(sender)))
    assert models["actor"].embedding.weight.dtype == torch.bfloat16
    assert bool((models["actor"].embedding.weight == 1.0).all())


@pytest.mark.parametrize("is_tied", [False, True])
def test_transformers_models_round_trip_in_bfloat16(is_tied, receive, publish, fingerprint):
    config = LlamaConfig(
        vocab_size=11,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
        tie_word_embeddings=is_tied,
    )

    def build(seed):
        torch.manual_seed(seed)
        actor = Actor.from_config(config, dtype=torch.bfloat16)
        return {"actor": actor, "critic": Critic.from_actor(actor)}

    sender, models = build(1), build(2)
    served = ServedModels(models)
    served.offer(receive(WeightStage(models), publish(sender, max_bytes=200)))
    assert fingerprint(models) == fingerprint(sender)
    assert next(models["actor"].parameters()).dtype == torch.bfloat16


def test_chunks_may_come_in_any_order_and_twice(make_models, publish, fingerprint, receiver):
    models, stage, served = receiver
    sender = make_models(7)
    sent = publish(sender)
    assert len(sent.chunks) >= 3
    stage.begin(sent.header.update_id, version=1, source="t")
    for chunk in [*reversed(sent.chunks), *sent.chunks]:
        stage.add_chunk(chunk)
    served.offer(stage.finish(sent.manifest))
    assert fingerprint(models) == fingerprint(sender)


# Every kind of damage is an error, and leaves models and stage as they were.


def lose_a_chunk(sent):
    return sent._replace(chunks=sent.chunks[1:])


def lose_the_last_chunk(sent):
    return sent._replace(chunks=sent.chunks[:-1])


def truncate_a_chunk(sent):
    return sent._replace(chunks=[truncated(sent.chunks[0]), *sent.chunks[1:]])


def shorten_an_array(sent):
    chunk = sent.chunks[-1]
    name, wire = next(iter(chunk.tensors.items()))
    short = dataclasses.replace(chunk, tensors={**chunk.tensors, name: WireTensor(wire.array[..., :-1], wire.dtype)})
    return sent._replace(chunks=[*sent.chunks[:-1], short])


def flip_a_bit(sent):
    return sent._replace(chunks=[*sent.chunks[:-1], flipped(sent.chunks[-1], 5)])


def relabel_a_dtype(sent):
    chunk = sent.chunks[0]
    name, wire = next(iter(chunk.tensors.items()))
    other = dataclasses.replace(chunk, tensors={**chunk.tensors, name: WireTensor(wire.array, "float16")})
    return sent._replace(chunks=[other, *sent.chunks[1:]])


def chunk_for_another_module(sent):
    return sent._replace(chunks=[dataclasses.replace(sent.chunks[0], module="critic"), *sent.chunks[1:]])


def chunk_of_another_update(sent):
    stranger = dataclasses.replace(sent.chunks[0], header=new_header(version=1, source="trainer 1"))
    return sent._replace(chunks=[stranger, *sent.chunks[1:]])


def replaced_chunk_with_an_honest_checksum(sent):
    wire = {name: WireTensor(w.array.copy() * 0, w.dtype) for name, w in sent.chunks[0].tensors.items()}
    return sent._replace(chunks=[make_chunk(sent.header, 0, "actor", wire), *sent.chunks[1:]])


def chunk_that_the_manifest_does_not_list(sent):
    extra = make_chunk(sent.header, len(sent.chunks), "critic", {"bias": encode(torch.zeros(1))})
    return sent._replace(chunks=[*sent.chunks, extra])


def manifest_of_another_update(sent):
    header = new_header(version=1, source="trainer 1")
    return sent._replace(manifest=dataclasses.replace(sent.manifest, header=header))


def manifest_of_another_version(sent):
    header = dataclasses.replace(sent.header, version=99)
    return sent._replace(manifest=dataclasses.replace(sent.manifest, header=header))


def unknown_name(sent):
    return with_tensor(sent, "surprise.weight", torch.zeros(2))


def missing_name(sent):
    shards = [(c.module, c.tensors) for c in sent.chunks if c.module == "actor"]
    shards = [(m, {name: wire for name, wire in t.items() if name != "embedding.weight"}) for m, t in shards]
    chunks = [make_chunk(sent.header, i, m, t) for i, (m, t) in enumerate(shards)]
    return sent._replace(chunks=chunks, manifest=manifest_for(sent, shards))


def wrong_shape(sent):
    return with_tensor(sent, "embedding.weight", torch.zeros(6, 4, dtype=torch.bfloat16))


def transposed_shape(sent):
    return with_tensor(sent, "embedding.weight", torch.zeros(4, 5, dtype=torch.bfloat16))


def float_for_integer(sent):
    return with_tensor(sent, "num_seen", torch.tensor(1.0))


def integer_for_float(sent):
    return with_tensor(sent, "embedding.weight", torch.zeros(5, 4, dtype=torch.int64))


def narrower_integer(sent):
    return with_tensor(sent, "num_seen", torch.tensor(1, dtype=torch.int8))


def the_same_weight_twice(sent):
    return with_tensor(sent, "embedding.weight", torch.zeros(5, 4), index=1)


def unknown_module(sent):
    chunk = make_chunk(sent.header, 0, "reward", {"bias": encode(torch.zeros(1))})
    shards = [("reward", chunk.tensors)]
    return sent._replace(chunks=[chunk], manifest=manifest_for(sent, shards))


def empty_update(sent):
    return sent._replace(chunks=[], manifest=manifest_for(sent, []))


DAMAGES = [
    (lose_a_chunk, "missing 1 of"),
    (lose_the_last_chunk, "missing 1 of"),
    (truncate_a_chunk, "corrupt"),
    (shorten_an_array, "corrupt"),
    (flip_a_bit, "corrupt"),
    (relabel_a_dtype, "corrupt"),
    (chunk_for_another_module, "do not hold the tensors"),
    (chunk_of_another_update, "not open here"),
    (replaced_chunk_with_an_honest_checksum, "not the one the manifest lists"),
    (chunk_that_the_manifest_does_not_list, "does not list"),
    (manifest_of_another_update, "not open here"),
    (manifest_of_another_version, "began as version 1"),
    (unknown_name, "surprise.weight"),
    (missing_name, "lacks 2 of"),  # embedding and head are one tensor with two names
    (wrong_shape, "shape"),
    (transposed_shape, "shape"),
    (float_for_integer, "torch.float32, but it is torch.int64"),
    (integer_for_float, "torch.int64, but it is torch.bfloat16"),
    (narrower_integer, "torch.int8, but it is torch.int64"),
    (the_same_weight_twice, "twice"),
    (unknown_module, "'reward'"),
    (empty_update, "no tensors"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES, ids=[damage.__name__ for damage, _ in DAMAGES])
def test_a_damaged_update_is_rejected_whole_and_the_next_good_one_works(
    damage, message, make_models, publish, receive, fingerprint, receiver
):
    models, stage, served = receiver
    before = fingerprint(models)
    with pytest.raises(WeightUpdateError, match=message):
        served.offer(receive(stage, damage(publish(make_models(7)))))
    assert fingerprint(models) == before
    assert served.version == 0
    sender = make_models(8)
    served.offer(receive(stage, publish(sender, version=2)))
    assert fingerprint(models) == fingerprint(sender)


def test_a_rejected_update_takes_no_more_chunks(make_models, publish, receiver):
    _, stage, _ = receiver
    sent = publish(make_models(7))
    stage.begin(sent.header.update_id, version=1, source="t")
    with pytest.raises(WeightUpdateError, match="corrupt"):
        stage.add_chunk(flipped(sent.chunks[0], 0))
    with pytest.raises(WeightUpdateError, match="not open here"):
        stage.add_chunk(sent.chunks[0])
    with pytest.raises(WeightUpdateError, match="not open here"):
        stage.finish(sent.manifest)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10_000))
def test_any_flipped_bit_is_seen(bit):
    module = nn.Linear(3, 3)
    header = new_header(version=1, source="t")
    chunk, _ = weight_messages(header, [("m", module.state_dict())])
    stage = WeightStage({"m": module})
    stage.begin(header.update_id, version=1, source="t")
    with pytest.raises(WeightUpdateError, match="corrupt"):
        stage.add_chunk(flipped(chunk, bit))


# Several senders.


def test_two_interleaved_senders_never_mix(make_models, publish, fingerprint, receiver):
    models, stage, served = receiver
    first, second = make_models(7), make_models(8)
    a, b = publish(first, version=1, source="trainer 0"), publish(second, version=2, source="trainer 1")
    for sent in (a, b):
        stage.begin(sent.header.update_id, version=sent.header.version, source=sent.header.source)
    for chunk_a, chunk_b in zip(a.chunks, b.chunks, strict=True):
        stage.add_chunk(chunk_a)
        stage.add_chunk(chunk_b)
    served.offer(stage.finish(a.manifest))
    assert fingerprint(models) == fingerprint(first)
    served.offer(stage.finish(b.manifest))
    assert fingerprint(models) == fingerprint(second)


def test_an_update_that_begins_again_forgets_what_it_had(make_models, publish, receiver):
    _, stage, _ = receiver
    sent = publish(make_models(7))
    stage.begin(sent.header.update_id, version=1, source="t")
    stage.add_chunk(sent.chunks[0])
    stage.begin(sent.header.update_id, version=1, source="t")
    for chunk in sent.chunks[1:]:
        stage.add_chunk(chunk)
    with pytest.raises(WeightUpdateError, match="missing 1 of"):
        stage.finish(sent.manifest)


def test_a_dead_sender_locks_nothing_and_is_evicted_and_a_slow_one_is_not(make_models, publish, receive, fingerprint):
    now = [0.0]
    models = make_models(1)
    stage, served = WeightStage(models, clock=lambda: now[0]), ServedModels(models)
    slow_sender, dead = make_models(7), publish(make_models(8), source="dead")
    slow = publish(slow_sender, version=1, source="slow")
    stage.begin(slow.header.update_id, version=1, source="slow")
    stage.begin(dead.header.update_id, version=1, source="dead")
    stage.add_chunk(dead.chunks[0])  # and then it is killed
    for seed in range(8):  # many others at the same time evict nobody
        other = publish(make_models(20 + seed), source=f"other {seed}")
        stage.begin(other.header.update_id, version=1, source=f"other {seed}")
    assert {slow.header.update_id, dead.header.update_id} < set(stage.open_updates)
    now[0] = MAX_IDLE_SECONDS
    stage.add_chunk(slow.chunks[0])
    now[0] = MAX_IDLE_SECONDS + 1
    receive(stage, publish(make_models(40), source="late"))
    assert stage.open_updates == (slow.header.update_id,)
    for chunk in slow.chunks[1:]:
        stage.add_chunk(chunk)
    served.offer(stage.finish(slow.manifest))
    assert fingerprint(models) == fingerprint(slow_sender)
    with pytest.raises(WeightUpdateError, match="Send the update again"):
        stage.add_chunk(dead.chunks[1])


def test_a_sender_that_begins_again_discards_only_its_own_unfinished_update(make_models, publish, receiver):
    _, stage, _ = receiver
    ids = {}
    for source in ("a", "b", "a"):
        sent = publish(make_models(3), source=source)
        stage.begin(sent.header.update_id, version=1, source=source)
        ids.setdefault(source, []).append(sent.header.update_id)
    assert set(stage.open_updates) == {ids["b"][0], ids["a"][1]}


# Partial updates.


def test_a_partial_manifest_changes_what_it_names_and_is_not_a_full_update(make_models, publish, receive, receiver):
    models, stage, served = receiver
    sender = make_models(7)
    sent = publish({"critic": sender["critic"]}, is_partial=True)
    chunk = make_chunk(sent.header, 0, "actor", {"body.bias": encode(torch.full((4,), 5.0))})
    other = make_chunk(sent.header, 1, "critic", {"bias": encode(torch.full((1,), 6.0))})
    partial = sent._replace(
        chunks=[chunk, other],
        manifest=manifest_for(sent, [("actor", chunk.tensors), ("critic", other.tensors)]),
    )
    weight_before = models["actor"].body.weight.clone()
    update = receive(stage, partial)
    served.offer(update)
    assert models["actor"].body.bias.tolist() == [5.0] * 4
    assert models["critic"].bias.tolist() == [6.0]
    assert torch.equal(models["actor"].body.weight, weight_before)
    assert not update.is_full  # it touches both modules, and most weights of neither


def test_one_whole_module_is_accepted_and_is_not_a_full_update(make_models, publish, receive, receiver):
    _, stage, _ = receiver
    update = receive(stage, publish({"actor": make_models(7)["actor"]}))
    assert {module for module, _ in update.tensors} == {"actor"}
    assert not update.is_full
    assert update.nbytes == 40 + 80 + 8 + 2


# The seed's plain calls: state dicts, no manifest.


def plain(stage, *, actor=None, critic=None, allow_partial=False):
    stage.begin(PLAIN_UPDATE, version=None, source="a plain call")
    for module, state_dict in (("actor", actor), ("critic", critic)):
        if state_dict is not None:
            stage.add_plain(module, state_dict)
    return stage.finish_plain(allow_partial=allow_partial)


@pytest.mark.parametrize("form", ["tensors", "arrays"])
def test_plain_state_dicts_in_several_calls(form, make_models, fingerprint, receiver):
    models, stage, served = receiver
    sender = make_models(7)
    sender["actor"].float()  # numpy has no bfloat16; small integers are exact in both
    state = sender["actor"].state_dict()
    if form == "arrays":
        state = {name: tensor.numpy() for name, tensor in state.items()}
    stage.begin(PLAIN_UPDATE, version=None, source="a plain call")
    names = list(state)
    stage.add_plain("actor", {name: state[name] for name in names[:2]})
    stage.add_plain("critic", sender["critic"].state_dict())
    stage.add_plain("actor", {name: state[name] for name in names[2:]})
    update = stage.finish_plain(allow_partial=False)
    assert update.version is None
    assert update.is_full
    served.offer(update)
    assert served.version == 1
    assert fingerprint(models) == fingerprint(make_models(7))


def test_names_with_and_without_the_wrappers_prefix():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=7,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=16,
    )
    bare, wrapped = LlamaForCausalLM(config), Actor(LlamaForCausalLM(config))
    bare_state = {name: tensor.clone() for name, tensor in bare.state_dict().items()}
    wrapped_stage, bare_stage = WeightStage({"actor": wrapped}), WeightStage({"actor": bare})
    # A bare model's names go into a wrapped one,
    ServedModels({"actor": wrapped}).offer(plain(wrapped_stage, actor=bare_state))
    assert all(torch.equal(wrapped.model.state_dict()[name], value) for name, value in bare_state.items())
    # a wrapped model's names into a bare one, and a DDP model's names too.
    with torch.no_grad():
        wrapped.model.lm_head.weight.fill_(2.0)
    ServedModels({"actor": bare}).offer(plain(bare_stage, actor=wrapped.state_dict()))
    assert bool((bare.lm_head.weight == 2.0).all())
    with torch.no_grad():
        bare.lm_head.weight.fill_(3.0)
    ddp_state = {f"module.{name}": value for name, value in bare.state_dict().items()}
    ServedModels({"actor": bare}).offer(plain(bare_stage, actor=ddp_state))
    assert bool((bare.lm_head.weight == 3.0).all())


def test_one_weight_under_two_names_is_refused(receiver):
    _, stage, _ = receiver
    with pytest.raises(WeightUpdateError, match="twice"):
        plain(stage, critic={"weight": torch.ones(1, 4), "model.weight": torch.zeros(1, 4)}, allow_partial=True)


def test_a_partial_plain_update_is_refused_unless_allowed(fingerprint, receiver):
    models, stage, served = receiver
    before = fingerprint(models)
    with pytest.raises(WeightUpdateError, match=r"lacks 1 of 2 weights \(first: 'weight'\)"):
        plain(stage, critic={"bias": torch.ones(1)})
    assert fingerprint(models) == before
    assert stage.open_updates == ()
    served.offer(plain(stage, critic={"bias": torch.full((1,), 4.0)}, allow_partial=True))
    assert models["critic"].bias.item() == 4.0


def test_an_empty_or_unopened_plain_update_is_refused(receiver):
    _, stage, _ = receiver
    with pytest.raises(WeightUpdateError, match="no tensors"):
        plain(stage)
    with pytest.raises(WeightUpdateError, match="not open here"):
        stage.add_plain("actor", {})
    with pytest.raises(WeightUpdateError, match="not open here"):
        stage.finish_plain(allow_partial=False)


def test_a_new_plain_start_discards_what_came_before_it(receiver):
    models, stage, served = receiver
    stage.begin(PLAIN_UPDATE, version=None, source="a plain call")
    stage.add_plain("actor", {"surprise": torch.zeros(1)})
    served.offer(plain(stage, critic={"weight": torch.zeros(1, 4), "bias": torch.zeros(1)}))
    assert models["critic"].weight.abs().sum().item() == 0.0

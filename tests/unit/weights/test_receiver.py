"""An update is committed as a whole or rejected: round trips, every kind of damage, and plain calls."""

import contextlib
import copy
import dataclasses

import numpy as np
import pytest
import tiny
import torch
from torch import nn
from weight_testing import Maker, deliver, header_of, messages_of, value_chunk

from coati.errors import WeightUpdateError
from coati.models import Actor, Critic
from coati.weights.message import tensor_views


def with_info(chunk, **changes):
    return dataclasses.replace(chunk, info=dataclasses.replace(chunk.info, **changes))


def flipped(chunk, bit):
    """Return the chunk with one bit of its payload flipped but its old checksum."""
    data = chunk.data.copy()
    data[(bit // 8) % data.size] ^= 1 << (bit % 8)
    return dataclasses.replace(chunk, data=data)


def replaced(sent, index, chunk):
    chunks = list(sent.chunks)
    chunks[index] = chunk
    return sent._replace(chunks=chunks)


# Round trips.


def test_actor_and_critic_arrive_bit_for_bit(make_models, fingerprint, maker):
    sender = make_models(7)
    deliver(messages_of(sender, header=header_of(3)), maker)
    assert fingerprint(maker.models) == fingerprint(sender)
    assert maker.served.version == 3
    assert maker.open_updates == ()
    assert maker.served.wait_for_full_update(0.0)


def test_a_whole_update_may_arrive_in_one_message(make_models, fingerprint, maker):
    sent = messages_of(make_models(7))
    maker.update_experience_maker(message=dataclasses.replace(sent.end(), is_start=True, chunks=tuple(sent.chunks)))
    assert fingerprint(maker.models) == fingerprint(make_models(7))


def test_tied_weights_are_sent_once_and_stay_tied(make_models, maker):
    sender = make_models(7)
    sent = messages_of(sender)
    names = [spec.name for info in sent.manifest.chunks for spec in info.tensors]
    assert "embedding.weight" in names
    assert "head.weight" not in names
    deliver(sent, maker)
    assert maker.models["actor"].head.weight is maker.models["actor"].embedding.weight
    assert torch.equal(maker.models["actor"].head.weight, sender["actor"].head.weight)


def test_dtypes_are_preserved(make_models):
    sent = messages_of(make_models(7))
    dtypes = {(info.module, spec.name): spec.dtype for info in sent.manifest.chunks for spec in info.tensors}
    assert dtypes["actor", "embedding.weight"] == torch.bfloat16
    assert dtypes["actor", "body.weight"] == torch.float32
    assert dtypes["actor", "num_seen"] == torch.int64
    assert dtypes["actor", "is_open"] == torch.bool
    # 20 bf16 (40) + 16 + 4 floats (80) + one int64 (8) + 2 flags + nothing; critic 4 + 1 floats (20)
    assert sent.nbytes == 40 + 80 + 8 + 2 + 20


def test_a_wider_float_is_rounded_to_the_receivers_width(maker, make_models):
    sender = make_models(7)
    sender["actor"].float()
    with torch.no_grad():
        sender["actor"].embedding.weight.fill_(1.00390625)  # 1 + 2⁻⁸: bfloat16 rounds it to 1
    deliver(messages_of(sender), maker)
    assert maker.models["actor"].embedding.weight.dtype == torch.bfloat16
    assert bool((maker.models["actor"].embedding.weight == 1.0).all())


@pytest.mark.parametrize("is_tied", [False, True])
def test_transformers_models_round_trip_in_bfloat16(is_tied, fingerprint):
    def build(seed):
        actor = Actor(tiny.llama(seed, tie_word_embeddings=is_tied).to(torch.bfloat16))
        return {"actor": actor, "critic": Critic(copy.deepcopy(actor.model))}

    sender, maker = build(1), Maker(build(2))
    deliver(messages_of(sender, max_bytes=200), maker)
    assert fingerprint(maker.models) == fingerprint(sender)
    assert next(maker.models["actor"].parameters()).dtype == torch.bfloat16


def test_chunks_may_arrive_in_any_order_and_twice(make_models, fingerprint, maker):
    sent = messages_of(make_models(7))
    assert len(sent.chunks) >= 3
    deliver(sent._replace(chunks=[*reversed(sent.chunks), *sent.chunks]), maker)
    assert fingerprint(maker.models) == fingerprint(make_models(7))


# Every kind of damage raises an error and leaves models and receiver unchanged.


def lose_a_chunk(sent):
    return sent._replace(chunks=sent.chunks[1:])


def lose_the_last_chunk(sent):
    return sent._replace(chunks=sent.chunks[:-1])


def lose_a_tensor(sent):
    chunk = sent.chunks[0]
    return replaced(sent, 0, dataclasses.replace(chunk, data=chunk.data[:-256]))


def lose_a_tensor_and_its_name(sent):
    chunk = dataclasses.replace(sent.chunks[-1], data=sent.chunks[-1].data[:-256])
    return replaced(sent, -1, with_info(chunk, tensors=chunk.info.tensors[:-1]))


def lose_the_bytes(sent):
    return replaced(sent, -1, dataclasses.replace(sent.chunks[-1], data=None))


def flip_a_bit(sent):
    return replaced(sent, -1, flipped(sent.chunks[-1], 5))


def relabel_a_dtype(sent):
    first, *others = sent.chunks[0].info.tensors
    return replaced(sent, 0, with_info(sent.chunks[0], tensors=(first._replace(dtype=torch.float16), *others)))


def unknown_dtype(sent):
    first, *others = sent.chunks[0].info.tensors
    return replaced(sent, 0, with_info(sent.chunks[0], tensors=(first._replace(dtype="no_grad"), *others)))


def chunk_for_another_module(sent):
    return replaced(sent, 0, with_info(sent.chunks[0], module="critic"))


def exchange_two_names_everywhere(sent):
    """Exchange them in both chunk and manifest, as a fault before sending would."""
    chunk = sent.chunks[-1]
    swapped = tuple(
        spec._replace(name=other.name)
        for spec, other in zip(chunk.info.tensors, reversed(chunk.info.tensors), strict=True)
    )
    chunk = with_info(chunk, tensors=swapped)
    listed = (*sent.manifest.chunks[:-1], chunk.info)
    return replaced(sent, -1, chunk)._replace(manifest=dataclasses.replace(sent.manifest, chunks=listed))


def replaced_chunk_with_an_honest_checksum(sent):
    zeros = {spec.name: torch.zeros(spec.shape, dtype=torch.bfloat16) for spec in sent.chunks[0].info.tensors}
    return replaced(sent, 0, value_chunk("actor", zeros))


def chunk_that_the_manifest_does_not_list(sent):
    extra = value_chunk("critic", {"bias": torch.zeros(1)}, index=len(sent.chunks))
    return sent._replace(chunks=[*sent.chunks, extra])


def with_tensor(sent, name, tensor, *, index=0):
    """Return a consistent update (checksums and manifest match) in which chunk `index` also holds this tensor."""
    chunk = sent.chunks[index]
    extra = value_chunk(chunk.info.module, {name: tensor})
    joined = dataclasses.replace(chunk, data=np.concatenate([chunk.data, extra.data]))
    joined = with_info(joined, tensors=chunk.info.tensors + extra.info.tensors)
    return sent.listing(*[joined if one is chunk else one for one in sent.chunks])


def without_tensor(sent, name):
    kept = []
    for chunk in sent.chunks:
        tensors = tensor_views(torch.from_numpy(chunk.data.copy()), chunk.info.tensors)
        tensors.pop(name, None)
        kept.append(value_chunk(chunk.info.module, tensors))
    return sent.listing(*kept)


def unknown_name(sent):
    return with_tensor(sent, "surprise.weight", torch.zeros(2))


def missing_name(sent):
    return without_tensor(sent, "embedding.weight")


def instead_of(sent, name, tensor):
    return with_tensor(without_tensor(sent, name), name, tensor)


def wrong_shape(sent):
    return instead_of(sent, "embedding.weight", torch.zeros(6, 4, dtype=torch.bfloat16))


def transposed_shape(sent):
    return instead_of(sent, "embedding.weight", torch.zeros(4, 5, dtype=torch.bfloat16))


def float_for_integer(sent):
    return instead_of(sent, "num_seen", torch.tensor(1.0))


def integer_for_float(sent):
    return instead_of(sent, "embedding.weight", torch.zeros(5, 4, dtype=torch.int64))


def narrower_integer(sent):
    return instead_of(sent, "num_seen", torch.tensor(1, dtype=torch.int8))


def the_same_weight_twice(sent):
    return with_tensor(sent, "embedding.weight", torch.zeros(5, 4), index=1)


def the_same_weight_under_two_names(sent):
    return with_tensor(sent, "model.embedding.weight", torch.zeros(5, 4), index=1)


def unknown_module(sent):
    return sent.listing(value_chunk("reward", {"bias": torch.zeros(1)}))


def empty_update(sent):
    return sent.listing()


DAMAGES = [
    (lose_a_chunk, "missing 1 of"),
    (lose_the_last_chunk, "missing 1 of"),
    (lose_a_tensor, "unreadable"),
    (lose_a_tensor_and_its_name, "its checksum is"),
    (lose_the_bytes, "unreadable"),
    (flip_a_bit, "its checksum is"),
    (relabel_a_dtype, "unreadable"),
    (unknown_dtype, "unreadable"),
    (chunk_for_another_module, "its checksum is"),
    (exchange_two_names_everywhere, "its checksum is"),
    (replaced_chunk_with_an_honest_checksum, "does not match the manifest"),
    (chunk_that_the_manifest_does_not_list, "does not match the manifest"),
    (unknown_name, "surprise.weight"),
    (missing_name, "lacks 2 weights"),  # embedding and head are one tensor under two names
    (wrong_shape, "shape"),
    (transposed_shape, "shape"),
    (float_for_integer, "torch.float32, but the maker's is torch.int64"),
    (integer_for_float, "torch.int64, but the maker's is torch.bfloat16"),
    (narrower_integer, "torch.int8, but the maker's is torch.int64"),
    (the_same_weight_twice, "twice"),
    (the_same_weight_under_two_names, "twice"),
    (unknown_module, "'reward'"),
    (empty_update, "no tensors"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES, ids=[damage.__name__ for damage, _ in DAMAGES])
def test_a_damaged_update_is_rejected_whole_and_the_next_good_one_works(
    damage, message, make_models, fingerprint, maker
):
    before = fingerprint(maker.models)
    with pytest.raises(WeightUpdateError, match=message):
        deliver(damage(messages_of(make_models(7))), maker)
    assert fingerprint(maker.models) == before
    assert maker.served.version == 0
    assert maker.open_updates == ()
    deliver(messages_of(make_models(8), header=header_of(2)), maker)
    assert fingerprint(maker.models) == fingerprint(make_models(8))


def another_update(sent):
    return dataclasses.replace(sent.header, update_id="another")


def another_version(sent):
    return dataclasses.replace(sent.header, version=99)


@pytest.mark.parametrize("header", [another_update, another_version])
@pytest.mark.parametrize("position", [0, -1], ids=["chunk", "manifest"])
def test_a_message_under_another_header_is_rejected(header, position, make_models, maker):
    sent = messages_of(make_models(7))
    messages = [*map(sent.part, sent.chunks), sent.end()]
    messages[position] = dataclasses.replace(messages[position], header=header(sent))
    maker.update_experience_maker(message=sent.start())

    def receive_all():
        for message in messages:
            maker.update_experience_maker(message=message)

    with pytest.raises(WeightUpdateError, match="not open here"):
        receive_all()
    assert maker.served.version == 0


def test_a_rejected_update_accepts_no_more_messages(make_models, maker):
    sent = messages_of(make_models(7))
    maker.update_experience_maker(message=sent.start())
    with pytest.raises(WeightUpdateError, match="its checksum is"):
        maker.update_experience_maker(message=sent.part(flipped(sent.chunks[0], 0)))
    for message in (sent.part(sent.chunks[0]), sent.end()):
        with pytest.raises(WeightUpdateError, match="not open here"):
            maker.update_experience_maker(message=message)


def test_any_flipped_bit_is_seen():
    models = {"m": nn.Linear(6, 6)}  # 1,344 bits
    sent, maker = messages_of(models), Maker(models)
    for bit in range(sent.chunks[0].data.nbytes * 8):
        maker.update_experience_maker(message=sent.start())
        with pytest.raises(WeightUpdateError, match="its checksum is"):
            maker.update_experience_maker(message=sent.part(flipped(sent.chunks[0], bit)))
    assert bit > 1000


def test_a_chunk_cannot_drop_its_checksum_on_the_way(make_models, maker):
    sent = messages_of(make_models(7))
    with pytest.raises(WeightUpdateError, match="its checksum is"):
        deliver(replaced(sent, 0, with_info(flipped(sent.chunks[0], 0), checksum=0)), maker)


# Versions.


def versions_of(maker, models, *versions, **options):
    for version in versions:
        deliver(messages_of(models, header=header_of(version, **options)), maker)


def test_a_maker_may_miss_versions(make_models, maker):
    versions_of(maker, make_models(7), 1, 2, 2, 9)
    assert maker.served.version == 9


# Several senders.


def test_two_interleaved_senders_never_mix(make_models, fingerprint, maker):
    first, second = make_models(7), make_models(8)
    a = messages_of(first, header=header_of(1, "trainer 0"))
    b = messages_of(second, header=header_of(2, "trainer 1"))
    for one, other in zip((a.start(), *map(a.part, a.chunks)), (b.start(), *map(b.part, b.chunks)), strict=True):
        maker.update_experience_maker(message=one)
        maker.update_experience_maker(message=other)
    maker.update_experience_maker(message=a.end())
    assert fingerprint(maker.models) == fingerprint(first)
    maker.update_experience_maker(message=b.end())
    assert fingerprint(maker.models) == fingerprint(second)


def test_a_restarted_update_discards_earlier_chunks(make_models, maker):
    sent = messages_of(make_models(7))
    for message in (sent.start(), sent.part(sent.chunks[0]), sent.start(), *map(sent.part, sent.chunks[1:])):
        maker.update_experience_maker(message=message)
    with pytest.raises(WeightUpdateError, match="missing 1 of"):
        maker.update_experience_maker(message=sent.end())


def test_a_dead_sender_locks_nothing_and_its_successor_replaces_what_it_left(make_models, fingerprint, maker):
    slow = messages_of(make_models(7), header=header_of(2, source="slow"))
    dead = messages_of(make_models(8), header=header_of(source="dead"))
    maker.update_experience_maker(message=slow.start())
    maker.update_experience_maker(message=dead.start())
    maker.update_experience_maker(message=dead.part(dead.chunks[0]))  # then the sender is killed
    deliver(messages_of(make_models(9), header=header_of(source="other")), maker)
    assert set(maker.open_updates) == {slow.header.update_id, dead.header.update_id}
    deliver(messages_of(make_models(10), header=header_of(source="dead")), maker)
    assert maker.open_updates == (slow.header.update_id,)
    with pytest.raises(WeightUpdateError, match="Send it again"):
        maker.update_experience_maker(message=dead.part(dead.chunks[1]))
    for message in (*map(slow.part, slow.chunks), slow.end()):
        maker.update_experience_maker(message=message)
    assert fingerprint(maker.models) == fingerprint(make_models(7))


def test_a_sender_that_restarts_discards_only_its_own_unfinished_update(maker):
    headers = [header_of(source=source, update_id=f"{source}{number}") for number, source in enumerate("aba")]
    for header in headers:
        maker.update_experience_maker(message=messages_of({}, header=header).start())
    assert set(maker.open_updates) == {"b1", "a2"}


# Partial updates.


def test_a_partial_update_changes_what_it_names_and_is_not_a_full_one(make_models, maker):
    sent = messages_of({}, is_full=False).listing(
        value_chunk("actor", {"body.bias": torch.full((4,), 5.0)}),
        value_chunk("critic", {"bias": torch.full((1,), 6.0)}),
    )
    deliver(sent, maker)
    assert maker.models["actor"].body.bias.tolist() == [5.0] * 4
    assert maker.models["critic"].bias.tolist() == [6.0]
    assert torch.equal(maker.models["actor"].body.weight, make_models(0)["actor"].body.weight)
    assert not maker.served.wait_for_full_update(0.0)  # it changes both modules, but few weights of either


def test_one_whole_module_is_accepted_and_is_not_a_full_update(make_models, maker):
    deliver(messages_of({"actor": make_models(7)["actor"]}), maker)
    assert torch.equal(maker.models["actor"].body.weight, make_models(7)["actor"].body.weight)
    assert not maker.served.wait_for_full_update(0.0)


# The seed's plain calls: state dicts, no manifest.


def plain(maker, *, actor=None, critic=None, lora=None, **flags):
    maker.receiver.receive_plain({"actor": actor, "critic": critic}, lora or {}, **flags)


@pytest.mark.parametrize("form", ["tensors", "arrays"])
def test_start_then_dicts_then_end_commits_at_the_end(form, make_models, fingerprint, maker):
    sender, before = make_models(7), fingerprint(maker.models)
    sender["actor"].float()  # numpy has no bfloat16; small integers are exact in both
    state = sender["actor"].state_dict()
    if form == "arrays":
        state = {name: tensor.numpy() for name, tensor in state.items()}
    names = list(state)
    plain(maker, chunk_start=True)
    plain(maker, actor={name: state[name] for name in names[:2]})
    plain(maker, critic=sender["critic"].state_dict())
    plain(maker, actor={name: state[name] for name in names[2:]})
    assert fingerprint(maker.models) == before
    plain(maker, chunk_end=True)
    assert maker.served.version == 1
    assert fingerprint(maker.models) == fingerprint(make_models(7))
    assert maker.served.wait_for_full_update(0.0)


def test_a_plain_update_counts_as_the_version_after_the_newest(make_models, fingerprint, maker):
    with maker.served.use():
        versions_of(maker, make_models(5), 5)
        plain(maker, **{label: model.state_dict() for label, model in make_models(6).items()})
        versions_of(maker, make_models(4), 4)  # too old
    assert maker.served.version == 6
    assert fingerprint(maker.models) == fingerprint(make_models(6))


@pytest.mark.parametrize("flags", [{}, {"chunk_start": True, "chunk_end": True}])
def test_a_whole_plain_update_in_one_call(flags, make_models, fingerprint, maker):
    states = {label: model.state_dict() for label, model in make_models(7).items()}
    plain(maker, **states, fully_update=True, **flags)
    assert fingerprint(maker.models) == fingerprint(make_models(7))


def test_a_part_that_raises_rejects_the_whole_plain_update_and_the_next_one_works(make_models, fingerprint, maker):
    states = {label: model.state_dict() for label, model in make_models(7).items()}
    before = fingerprint(maker.models)
    plain(maker, chunk_start=True)
    plain(maker, actor={**states["actor"], "body.weight": torch.zeros(3, 3)})
    # The critic alone would be a complete module; after a rejection it must not be accepted on its own.
    plain(maker, critic=states["critic"])
    with pytest.raises(WeightUpdateError, match=r"shape \[3, 3\]"):
        plain(maker, chunk_end=True)
    plain(maker, chunk_start=True)
    with pytest.raises(TypeError):
        plain(maker, actor={"no.such.weight": object()})
    for call in ({"critic": states["critic"]}, {"chunk_end": True}):
        with pytest.raises(WeightUpdateError, match="not open here"):
            plain(maker, **call)
    assert fingerprint(maker.models) == before
    plain(maker, **states)
    assert fingerprint(maker.models) == fingerprint(make_models(7))


def test_names_with_and_without_the_wrappers_prefix():
    bare, wrapped = tiny.llama(0), Actor(tiny.llama(1))
    bare_state = {name: tensor.clone() for name, tensor in bare.state_dict().items()}
    bare_maker, wrapped_maker = Maker({"actor": bare}), Maker({"actor": wrapped})
    # A bare model's names match a wrapped model,
    plain(wrapped_maker, actor=bare_state)
    assert all(torch.equal(wrapped.model.state_dict()[name], value) for name, value in bare_state.items())
    # and the names of a wrapped model or a DDP model match a bare one.
    with torch.no_grad():
        wrapped.model.lm_head.weight.fill_(2.0)
    plain(bare_maker, actor=wrapped.state_dict())
    assert bool((bare.lm_head.weight == 2.0).all())
    with torch.no_grad():
        bare.lm_head.weight.fill_(3.0)
    plain(bare_maker, actor={f"module.{name}": value.clone() for name, value in bare.state_dict().items()})
    assert bool((bare.lm_head.weight == 3.0).all())


def test_one_weight_under_two_names_is_refused(make_models):
    maker = Maker(make_models(0), allow_partial_plain=True)
    with pytest.raises(WeightUpdateError, match="twice"):
        plain(maker, critic={"weight": torch.ones(1, 4), "model.weight": torch.zeros(1, 4)})


def test_a_partial_plain_update_is_refused_unless_allowed(make_models, fingerprint, maker):
    before = fingerprint(maker.models)
    with pytest.raises(WeightUpdateError, match=r"lacks 1 weights of the critic \(first: 'weight'\)"):
        plain(maker, critic={"bias": torch.ones(1)})
    assert fingerprint(maker.models) == before
    lenient = Maker(make_models(0), allow_partial_plain=True)
    plain(lenient, critic={"bias": torch.full((1,), 4.0)})
    assert lenient.models["critic"].bias.item() == 4.0
    with pytest.raises(WeightUpdateError, match="lacks 1 weights"):
        plain(lenient, critic={"bias": torch.full((1,), 4.0)}, fully_update=True)


def test_an_empty_or_unopened_plain_update_is_refused(maker):
    with pytest.raises(WeightUpdateError, match="no tensors"):
        plain(maker)
    with pytest.raises(WeightUpdateError, match="not open here"):
        plain(maker, chunk_end=True)


def test_a_new_plain_start_discards_the_previous_update(maker):
    plain(maker, chunk_start=True)
    plain(maker, actor={"surprise": torch.zeros(1)})
    plain(maker, chunk_start=True)
    plain(maker, critic={"weight": torch.zeros(1, 4), "bias": torch.zeros(1)}, chunk_end=True)
    assert maker.models["critic"].weight.abs().sum().item() == 0.0


# Restarted trainers


@pytest.mark.parametrize("num_chunks", [1, 5, None], ids=["one chunk", "five", "all but the manifest"])
@pytest.mark.parametrize("is_generating", [False, True], ids=["idle", "generating"])
def test_a_dead_trainers_partial_update_is_discarded_for_its_successors_full_one(
    num_chunks, is_generating, make_models, fingerprint, maker
):
    deliver(messages_of(make_models(7), header=header_of(7)), maker)
    half = messages_of(make_models(8), header=header_of(8, "trainer 0 (first)"))
    for message in (half.start(), *map(half.part, half.chunks[:num_chunks])):
        maker.update_experience_maker(message=message)
    assert fingerprint(maker.models) == fingerprint(make_models(7)), "it keeps its current weights"
    whole = messages_of(make_models(5), header=header_of(5, "trainer 0 (second)", incarnation=1))
    with maker.served.use() if is_generating else contextlib.nullcontext():
        for message in (whole.start(), *map(whole.part, whole.chunks)):
            maker.update_experience_maker(message=message)
            with pytest.raises(WeightUpdateError, match=r"replaced|not open"):  # late messages of the dead trainer
                maker.update_experience_maker(message=half.end())
        assert fingerprint(maker.models) == fingerprint(make_models(7))
        maker.update_experience_maker(message=whole.end())
        assert maker.served.version == (7 if is_generating else 5)
    assert fingerprint(maker.models) == fingerprint(make_models(5))
    assert (maker.served.version, maker.served.incarnation) == (5, 1)
    for late in (half, messages_of(make_models(9), header=header_of(9))):  # also a full update
        with pytest.raises(WeightUpdateError, match="replaced"):
            deliver(late, maker)
    deliver(messages_of(make_models(6), header=header_of(6, incarnation=1)), maker)
    assert fingerprint(maker.models) == fingerprint(make_models(6))


def test_a_dead_trainers_late_start_does_not_disturb_its_successors_update(make_models, fingerprint, maker):
    deliver(messages_of(make_models(7), header=header_of(7)), maker)
    whole = messages_of(make_models(5), header=header_of(5, incarnation=1))
    maker.update_experience_maker(message=whole.start())
    late = messages_of(make_models(8), header=header_of(8))  # under the same name
    with pytest.raises(WeightUpdateError, match="replaced"):
        maker.update_experience_maker(message=late.start())
    for message in (*map(whole.part, whole.chunks), whole.end()):
        maker.update_experience_maker(message=message)
    assert fingerprint(maker.models) == fingerprint(make_models(5))


def test_a_dead_trainers_pending_update_adds_nothing_to_its_successors(make_models, fingerprint, maker):
    with maker.served.use():
        deliver(messages_of(make_models(8), header=header_of(8)), maker)
        deliver(messages_of(make_models(5), header=header_of(5, incarnation=1)), maker)
    assert fingerprint(maker.models) == fingerprint(make_models(5))
    assert (maker.served.version, maker.served.incarnation) == (5, 1)


def test_the_first_update_of_restarted_trainers_must_hold_all_weights(make_models, fingerprint, maker):
    deliver(messages_of(make_models(7), header=header_of(7)), maker)
    actor_only = {"actor": make_models(8)["actor"]}
    with pytest.raises(WeightUpdateError, match="only part"):
        deliver(messages_of(actor_only, header=header_of(8, incarnation=1)), maker)
    assert fingerprint(maker.models) == fingerprint(make_models(7))
    assert (maker.served.version, maker.served.incarnation) == (7, 0)

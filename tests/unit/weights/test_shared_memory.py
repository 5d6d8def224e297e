"""Weights lent in shared memory: views that alias, memory that is let go of before it is overwritten, who may not."""

import contextlib
import dataclasses
import errno
import itertools
import logging
import os
from pathlib import Path

import pytest
import torch

import coati.weights.shared_memory as shared_memory
from coati.errors import WeightUpdateError
from coati.models.lora import LayerLoRA
from coati.trainer.strategies.state_chunks import iter_state_chunks
from coati.weights import (
    LentChunk,
    MemorySnapshots,
    ServedModels,
    WeightChunk,
    WeightStage,
    new_header,
    weight_messages,
    why_not_shared,
)
from coati.weights.shared_memory import MemoryBuffer, MemoryReader, open_memory

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs memfd_create")

CPU = torch.device("cpu")


class Receiver:
    """A maker's weight side: `begin`, then `take`, as its trainer calls it."""

    def __init__(self, models, *, name="maker", is_careful=True):
        self.models, self.name = models, name
        self.served = ServedModels(models)
        self.stage = WeightStage(models, let_go=self.served.let_go if is_careful else None)

    def begin(self, header):
        self.stage.begin(header.update_id, version=header.version, source=header.source, lender=header.lender)

    def take(self, chunks, manifest):
        for chunk in chunks:
            self.stage.add_chunk(chunk)
        return self.served.offer(self.stage.finish(manifest))


def shards_of(models, max_bytes=64):
    return [(label, part) for label, model in models.items() for part in iter_state_chunks(model, max_bytes=max_bytes)]


def send(snapshots, models, receivers, *, version, has_checksums=True, deaf=(), max_bytes=64):
    """One update as the channel sends it; `deaf` receivers do not answer and get nothing."""
    header = new_header(version=version, source="trainer 0", snapshots=snapshots)
    answering = [receiver for receiver in receivers if receiver not in deaf]
    for receiver in answering:
        receiver.begin(header)
    snapshots.lend_to([receiver.name for receiver in answering])
    shards = shards_of(models, max_bytes)
    *chunks, manifest = weight_messages(header, shards, has_checksums=has_checksums, snapshots=snapshots)
    for receiver in answering:
        receiver.take(chunks, manifest)
    return chunks


@pytest.fixture
def snapshots():
    return MemorySnapshots()


@pytest.fixture
def receiver(make_models):
    return Receiver(make_models(0))


# Round trips.


@pytest.mark.parametrize("has_checksums", [True, False])
@pytest.mark.parametrize("is_careful", [True, False])
def test_weights_arrive_to_the_bit(has_checksums, is_careful, make_models, snapshots, fingerprint):
    receiver = Receiver(make_models(0), is_careful=is_careful)
    for version, seed in enumerate((7, 8, 9), start=1):
        sender = make_models(seed)
        chunks = send(snapshots, sender, [receiver], version=version, has_checksums=has_checksums)
        assert len(chunks) > 2
        assert all(isinstance(chunk, LentChunk) for chunk in chunks)
        assert sum(chunk.nbytes for chunk in chunks) == 40 + 80 + 8 + 2 + 20
        assert fingerprint(receiver.models) == fingerprint(sender)


def test_two_sets_are_filled_in_turn_and_mapped_once(make_models, snapshots, receiver):
    handles = [
        [chunk.handle for chunk in send(snapshots, make_models(seed), [receiver], version=seed)] for seed in range(1, 5)
    ]
    assert handles[0] == handles[2]
    assert handles[1] == handles[3]
    assert not set(handles[0]) & set(handles[1])
    assert receiver.stage.num_mapped == len(set(handles[0])) + len(set(handles[1]))


def test_many_chunks_share_few_buffers(snapshots, fingerprint):
    models = {"actor": torch.nn.ParameterDict({f"w{i}": torch.full((3,), float(i)) for i in range(100)})}
    receiver = Receiver({"actor": torch.nn.ParameterDict({f"w{i}": torch.zeros(3) for i in range(100)})})
    chunks = send(snapshots, models, [receiver], version=1, max_bytes=1)
    # One chunk takes 256 bytes. Each buffer is as large as all before it: 1, 1, 2, 4, 8, 16, 32 and 64 chunks.
    assert len(chunks) == 100
    assert [handle.size // 256 for handle in dict.fromkeys(chunk.handle for chunk in chunks)] == [
        1,
        1,
        2,
        4,
        8,
        16,
        32,
        64,
    ]
    assert fingerprint(receiver.models) == fingerprint(models)


def test_a_smaller_update_uses_the_buffers_of_a_larger_one(make_models, snapshots, receiver, fingerprint):
    first = send(snapshots, make_models(1), [receiver], version=1)
    send(snapshots, make_models(2), [receiver], version=2)
    header = new_header(version=3, source="trainer 0", snapshots=snapshots)
    receiver.begin(header)
    snapshots.lend_to([receiver.name])
    shards = [("actor", {"body.bias": torch.zeros(4)})]
    *chunks, manifest = weight_messages(header, shards, is_partial=True, snapshots=snapshots)
    assert [(chunk.handle, chunk.slots[0].offset) for chunk in chunks] == [(first[0].handle, first[0].slots[0].offset)]
    receiver.take(chunks, manifest)
    assert receiver.models["actor"].body.bias.tolist() == [0.0] * 4
    assert receiver.models["actor"].body.weight.equal(make_models(2)["actor"].body.weight)


def test_a_mapping_shows_the_owners_writes_and_refuses_ours():
    buffer = MemoryBuffer(8)
    mapped = open_memory(buffer.handle)
    buffer.data[3] = 9
    assert mapped.tolist() == [0, 0, 0, 9, 0, 0, 0, 0]
    pages = [line for line in Path("/proc/self/maps").read_text().splitlines() if f" {buffer.handle.inode} " in line]
    assert sorted(line.split()[1] for line in pages) == ["r--s", "rw-s"]


# Memory that somebody looks at.


def test_a_waiting_update_is_in_the_senders_memory_and_copied_before_that_is_overwritten(
    make_models, snapshots, receiver, fingerprint
):
    first, second = make_models(1), make_models(2)
    with receiver.served.use():
        send(snapshots, first, [receiver], version=1)  # in A
        before = fingerprint(receiver.models)
        waiting = receiver.served._pending.tensors["critic", "weight"]
        assert waiting.tolist() == first["critic"].weight.tolist()
        header = new_header(version=2, source="trainer 0", snapshots=snapshots)  # in B, and it never gets there
        receiver.begin(header)
        send(snapshots, second, [], version=3)  # in A, without asking anybody
        assert waiting.tolist() == first["critic"].weight.tolist()  # so A was retired
        assert fingerprint(receiver.models) == before


def test_an_update_that_waits_in_a_set_survives_the_overwriting_of_it(make_models, snapshots, receiver, fingerprint):
    first = make_models(1)
    with receiver.served.use():
        send(snapshots, first, [receiver], version=1)  # in A
        lent = receiver.served._pending.tensors["critic", "weight"]
        header = new_header(version=2, source="trainer 0", snapshots=snapshots)  # in B; its sender fails
        receiver.begin(header)
        snapshots.retire()
        header = new_header(version=3, source="trainer 0", snapshots=snapshots)  # in A again
        receiver.begin(header)
        snapshots.lend_to([receiver.name])
        shards = shards_of(make_models(2))
        list(weight_messages(header, shards, snapshots=snapshots))
        assert lent.tolist() == make_models(2)["critic"].weight.tolist()  # overwritten, as it was lent
    assert receiver.served.version == 1
    assert fingerprint(receiver.models) == fingerprint(first)


def test_two_updates_during_one_piece_of_work_leave_the_newer_without_a_copy(
    make_models, snapshots, receiver, fingerprint, monkeypatch
):
    with receiver.served.use():
        send(snapshots, make_models(1), [receiver], version=1)
        send(snapshots, make_models(2), [receiver], version=2)
        monkeypatch.setattr(torch.Tensor, "clone", None)  # nothing of A is wanted any more
        send(snapshots, make_models(3), [receiver], version=3)
        monkeypatch.undo()
    assert receiver.served.version == 3
    assert fingerprint(receiver.models) == fingerprint(make_models(3))


def test_what_only_an_older_waiting_update_touched_is_copied_too(make_models, snapshots, receiver):
    with receiver.served.use():
        send(snapshots, make_models(1), [receiver], version=1)  # A: everything
        header = new_header(version=2, source="trainer 0", snapshots=snapshots)  # B: the critic's bias alone
        receiver.begin(header)
        snapshots.lend_to([receiver.name])
        shards = [("critic", {"bias": torch.tensor([5.0])})]
        *chunks, manifest = weight_messages(header, shards, is_partial=True, snapshots=snapshots)
        receiver.take(chunks, manifest)
        header = new_header(version=3, source="trainer 0", snapshots=snapshots)
        receiver.begin(header)
        snapshots.lend_to([receiver.name])
        shards = shards_of(make_models(9))
        list(weight_messages(header, shards, snapshots=snapshots))  # overwrites A, and is never finished
    assert receiver.models["critic"].bias.tolist() == [5.0]
    assert receiver.models["critic"].weight.equal(make_models(1)["critic"].weight)
    assert receiver.models["actor"].body.weight.equal(make_models(1)["actor"].body.weight)


def test_the_base_of_an_adapter_does_not_stay_in_the_senders_memory(make_models, snapshots, receiver):
    settings = {"actor": {"body": LayerLoRA(rank=1, alpha=2, dropout=0.0, scale=2.0)}}

    def publish(version, base=None):
        header = new_header(version=version, source="trainer 0", snapshots=snapshots)
        receiver.begin(header)
        snapshots.lend_to([receiver.name])
        adapter = {
            "body.lora_A.default.weight": torch.full((1, 4), float(version)),
            "body.lora_B.default.weight": torch.ones(4, 1),
        }
        weights = adapter if base is None else {"body.base_layer.weight": torch.full((4, 4), base), **adapter}
        *chunks, manifest = weight_messages(
            header, [("actor", weights)], is_partial=True, lora=settings, snapshots=snapshots
        )
        return chunks, manifest

    receiver.take(*publish(1, base=100.0))  # A: the base is W₀ from now on
    receiver.take(*publish(2))  # B
    publish(3, base=-7.0)  # overwrites A, and fails
    receiver.take(*publish(4))  # B: 100 + 2·1·4
    assert receiver.models["actor"].body.weight.unique().tolist() == [108.0]


def test_an_unfinished_stage_is_dropped_when_its_memory_is_used_again(make_models, snapshots, receiver):
    header = new_header(version=1, source="trainer 0", snapshots=snapshots)
    receiver.begin(header)
    other = dataclasses.replace(header, update_id="other", source="trainer 0 under another name")
    receiver.begin(other)
    assert receiver.stage.open_updates == ("other",)


@pytest.mark.parametrize("is_deaf", [False, True])
def test_a_set_is_retired_if_one_who_was_lent_it_does_not_answer(is_deaf, make_models, snapshots, fingerprint):
    receivers = [Receiver(make_models(0), name=name) for name in ("a", "b")]
    sluggish = receivers[1]
    with sluggish.served.use():
        first = send(snapshots, make_models(1), receivers, version=1)
        deaf = [sluggish] if is_deaf else []
        send(snapshots, make_models(2), receivers, version=2, deaf=deaf)
        third = send(snapshots, make_models(3), receivers, version=3, deaf=deaf)
        assert (first[0].handle == third[0].handle) is not is_deaf  # with the same regions in it
    assert fingerprint(receivers[0].models) == fingerprint(make_models(3))
    assert fingerprint(sluggish.models) == fingerprint(make_models(1 if is_deaf else 3))


def test_what_nobody_was_asked_about_is_never_overwritten(make_models, snapshots, receiver):
    def draw(version):
        header = new_header(version=version, source="trainer 0", snapshots=snapshots)
        receiver.begin(header)
        *chunks, manifest = weight_messages(header, shards_of(make_models(version)), snapshots=snapshots)
        return chunks, manifest

    with receiver.served.use():
        first = draw(1)
        receiver.take(*first)
        draw(2)
        snapshots.next_lender()  # the third update is in the set of the first, without a word to the receiver
        *third, _ = weight_messages(
            new_header(version=3, source="trainer 0"), shards_of(make_models(3)), snapshots=snapshots
        )
        assert third[0].handle != first[0][0].handle
    assert receiver.models["critic"].weight.equal(make_models(1)["critic"].weight)


def test_memory_that_its_owner_gave_up_is_unmapped_at_the_next_update(make_models, snapshots, receiver):
    ours = {chunk.handle for chunk in send(snapshots, make_models(1), [receiver], version=1)}
    snapshots.retire()
    assert set(receiver.stage._reader._in_memory._open) == ours
    other = MemorySnapshots()
    theirs = {chunk.handle for chunk in send(other, make_models(2), [receiver], version=2)}
    assert set(receiver.stage._reader._in_memory._open) == theirs


# Damage.


def overwrite(chunks, snapshots):
    region = snapshots._sets[snapshots._turn].regions[1]
    region.buffer.data[region.start + 3] ^= 1
    return chunks


def lie_about_the_checksum(chunks, snapshots):
    return [chunks[0], dataclasses.replace(chunks[1], checksum=chunks[1].checksum ^ 1), *chunks[2:]]


def lose_a_slot(chunks, snapshots):
    return [chunks[0], dataclasses.replace(chunks[1], slots=chunks[1].slots[:-1]), *chunks[2:]]


def name_other_memory(chunks, snapshots):
    handle = dataclasses.replace(chunks[1].handle, inode=0)
    return [chunks[0], dataclasses.replace(chunks[1], handle=handle), *chunks[2:]]


def name_a_process_that_is_gone(chunks, snapshots):
    handle = dataclasses.replace(chunks[1].handle, process=2**31 - 1)
    return [chunks[0], dataclasses.replace(chunks[1], handle=handle), *chunks[2:]]


DAMAGES = [
    (overwrite, "chunk 1 of .* is corrupt"),
    (lie_about_the_checksum, "chunk 1 of .* is corrupt"),
    (lose_a_slot, "chunk 1 of .* is corrupt"),
    (name_other_memory, "chunk 1 of .* no longer what its owner shared"),
    (name_a_process_that_is_gone, "chunk 1 of .* could not be read in the sender's memory: .*No such file"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES, ids=[damage.__name__ for damage, _ in DAMAGES])
def test_a_damaged_update_is_rejected_whole_and_the_next_works(
    damage, message, make_models, snapshots, receiver, fingerprint
):
    before, sender = fingerprint(receiver.models), make_models(7)
    header = new_header(version=1, source="trainer 0", snapshots=snapshots)
    receiver.begin(header)
    snapshots.lend_to([receiver.name])
    shards = shards_of(sender)
    *chunks, manifest = weight_messages(header, shards, snapshots=snapshots)
    with pytest.raises(WeightUpdateError, match=message):
        receiver.take(damage(chunks, snapshots), manifest)
    assert receiver.stage.open_updates == ()
    assert fingerprint(receiver.models) == before
    snapshots.retire()
    send(snapshots, sender, [receiver], version=2)
    assert fingerprint(receiver.models) == fingerprint(sender)


# Chunks that others check.


@pytest.mark.parametrize(
    ("is_careful", "checked", "is_refused"), [(True, [1], False), (True, [], True), (False, [1], True)]
)
def test_a_chunk_is_left_to_others_only_if_they_found_it_right_and_it_is_not_our_copy(
    is_careful, checked, is_refused, make_models, snapshots
):
    receiver = Receiver(make_models(0), is_careful=is_careful)
    header = new_header(version=1, source="trainer 0", snapshots=snapshots)
    receiver.begin(header)
    snapshots.lend_to([receiver.name])
    *chunks, manifest = weight_messages(header, shards_of(make_models(7)), snapshots=snapshots)
    overwrite(chunks, snapshots)  # chunk 1
    refusal = pytest.raises(WeightUpdateError, match=r"chunk 1 of .* is corrupt")
    with refusal if is_refused else contextlib.nullcontext():
        for chunk in chunks:
            receiver.stage.add_chunk(chunk, may_trust=chunk.index == 1)
        receiver.served.offer(receiver.stage.finish(manifest, checked=checked))
    assert receiver.served.version == int(not is_refused)
    assert receiver.stage.open_updates == ()


def test_a_chunk_that_comes_again_to_be_checked_is_checked(make_models, snapshots, receiver):
    header = new_header(version=1, source="trainer 0", snapshots=snapshots)
    receiver.begin(header)
    snapshots.lend_to([receiver.name])
    *chunks, manifest = weight_messages(header, shards_of(make_models(7)), snapshots=snapshots)
    for chunk in chunks:
        receiver.stage.add_chunk(chunk, may_trust=True)
    for chunk in chunks:
        receiver.stage.add_chunk(chunk)
    assert not receiver.stage._open[header.update_id].unchecked
    assert receiver.served.offer(receiver.stage.finish(manifest))


# Who takes this way.


def test_a_receiver_that_reads_the_probe_can_and_others_say_why_not(snapshots):
    probe = snapshots.probe()
    assert why_not_shared(probe, CPU) == ""
    elsewhere = dataclasses.replace(probe.handle, process=2**31 - 1)
    assert "cannot open memory of the sender's process" in why_not_shared(
        dataclasses.replace(probe, handle=elsewhere), CPU
    )
    assert "other bytes" in why_not_shared(dataclasses.replace(probe, checksum=probe.checksum ^ 1), CPU)


def test_shards_that_there_is_no_memory_for_go_through_the_store_and_that_is_said_once(
    make_models, snapshots, receiver, fingerprint, monkeypatch, caplog
):
    num_calls = itertools.count(1)

    def scarce(descriptor, offset, size):
        if next(num_calls) > 2:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shared_memory.os, "posix_fallocate", scarce)
    with caplog.at_level(logging.WARNING):
        for version in (1, 2, 3):
            chunks = send(snapshots, make_models(version), [receiver], version=version)
            assert fingerprint(receiver.models) == fingerprint(make_models(version))
    assert [type(chunk) for chunk in chunks[:3]] == [LentChunk, LentChunk, WeightChunk]
    said = [record.getMessage() for record in caplog.records if "no shared memory left" in record.getMessage()]
    assert len(said) == 1
    assert "they go through Ray's object store" in said[0]


def test_a_reader_forgets_what_is_gone_and_keeps_what_is_not(make_models, snapshots):
    reader = MemoryReader()
    chunks = send(snapshots, make_models(1), [], version=1)
    for chunk in chunks:
        reader.take(chunk, may_look=True, may_trust=False)
    reader.forget_gone()
    assert reader.num_open == len({chunk.handle for chunk in chunks}) > 1
    snapshots.retire()
    reader.forget_gone()
    assert reader.num_open == 0

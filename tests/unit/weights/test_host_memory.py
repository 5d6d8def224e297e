"""Weights lent in shared memory: views that alias, memory that is released before it is overwritten, who cannot."""

import dataclasses
import errno
import itertools
import logging
import mmap
import os
from pathlib import Path

import pytest
import torch
from weight_testing import Maker, header_of, messages_of

import coati.weights.host_memory as host_memory
from coati.errors import WeightUpdateError
from coati.models.lora import LayerLoRA
from coati.weights.host_memory import HostMemory, MemoryBuffer, MemoryHandle
from coati.weights.transports import ChunkReader

CPU = torch.device("cpu")

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs memfd_create")


@pytest.fixture
def memory():
    return HostMemory()


def begin(memory, *makers, version=1, names=None):
    """Begin an update as a sender does: the makers release the set that it will overwrite."""
    header = header_of(version, lender=memory.begin())
    for maker in makers:
        maker.update_experience_maker(message=messages_of({}, header=header).start())
    memory.lend_to(names if names is not None else [maker.served.name for maker in makers])
    return header


def take(sent, *makers):
    for maker in makers:
        for message in (*map(sent.part, sent.chunks), sent.end()):
            maker.update_experience_maker(message=message)


def send(memory, models, *makers, version, **options):
    """One whole update; returns its chunks."""
    sent = messages_of(models, memory=memory, header=begin(memory, *makers, version=version), **options)
    take(sent, *makers)
    return sent.chunks


def num_mapped(reader):
    return len(reader._open)


# Round trips.


@pytest.mark.parametrize("has_checksums", [True, False])
def test_weights_arrive_to_the_bit(has_checksums, make_models, memory, maker, fingerprint):
    for version, seed in enumerate((7, 8, 9), start=1):
        sender = make_models(seed)
        chunks = send(memory, sender, maker, version=version, has_checksums=has_checksums)
        assert len(chunks) > 2
        assert all(isinstance(chunk.handle, MemoryHandle) and not chunk.arrays for chunk in chunks)
        assert sum(chunk.info.nbytes for chunk in chunks) == 40 + 80 + 8 + 2 + 20
        assert fingerprint(maker.models) == fingerprint(sender)


def test_two_sets_are_filled_in_turn_and_mapped_once(make_models, memory, maker):
    handles = [[chunk.handle for chunk in send(memory, make_models(seed), maker, version=seed)] for seed in range(1, 5)]
    assert handles[0] == handles[2]
    assert handles[1] == handles[3]
    assert not set(handles[0]) & set(handles[1])
    assert num_mapped(maker.receiver._reader) == len(set(handles[0])) + len(set(handles[1]))


def partial(memory, *makers, version, module="actor", lora=None, **tensors):
    """An update of some weights, not yet delivered."""
    sent = messages_of({}, header=begin(memory, *makers, version=version), is_full=False)
    chunk = memory.make_chunk(0, module, tensors).with_checksum()
    manifest = dataclasses.replace(sent.manifest, chunks=(chunk.info,), lora=lora or {})
    return sent._replace(chunks=[chunk], manifest=manifest)


def test_a_smaller_update_uses_the_buffers_of_a_larger_one(make_models, memory, maker):
    first = send(memory, make_models(1), maker, version=1)
    send(memory, make_models(2), maker, version=2)
    sent = partial(memory, maker, version=3, **{"body.bias": torch.zeros(4)})
    assert sent.chunks[0].handle == first[0].handle
    take(sent, maker)
    assert maker.models["actor"].body.bias.tolist() == [0.0] * 4
    assert maker.models["actor"].body.weight.equal(make_models(2)["actor"].body.weight)


def test_many_chunks_take_few_descriptors_and_no_more_memory_than_their_bytes(memory):
    def num_descriptors():
        return len(os.listdir("/proc/self/fd"))

    before, readers = num_descriptors(), [ChunkReader(CPU), ChunkReader(CPU)]
    for reader in readers:  # one for each set
        begin(memory)
        for index in range(100):
            weight = torch.full((64,), float(index))
            assert reader.read(memory.make_chunk(index, "actor", {"w": weight}).chunk)["w"].equal(weight)
    assert num_descriptors() - before <= 6  # for each set, two of the sender and one of the reader
    buffers = [os.fstat(handle.descriptor) for reader in readers for handle in reader._open]
    assert sum(status.st_blocks * 512 for status in buffers) <= 2 * (100 * 256 + 2 * mmap.PAGESIZE)


def test_chunks_that_a_buffer_has_no_room_for_are_in_the_next_one(make_models, memory, maker, fingerprint, monkeypatch):
    monkeypatch.setattr(host_memory, "BUFFER_BYTES", 600)
    for version in range(1, 5):
        chunks = send(memory, make_models(version), maker, version=version)
        assert 1 < len({chunk.handle for chunk in chunks}) < len(chunks)
        assert fingerprint(maker.models) == fingerprint(make_models(version))
    assert num_mapped(maker.receiver._reader) == 2 * len({chunk.handle for chunk in chunks})


def test_a_chunk_larger_than_a_buffer_gets_one_of_its_size(make_models, memory, maker, fingerprint, monkeypatch):
    monkeypatch.setattr(host_memory, "BUFFER_BYTES", 256)
    handles = {}
    for version, max_bytes in enumerate((64, 64, 2**20, 2**20, 64, 64, 2**20), start=1):
        chunks = send(memory, make_models(version), maker, version=version, max_bytes=max_bytes)
        assert fingerprint(maker.models) == fingerprint(make_models(version))
        handles[version] = [chunk.handle for chunk in chunks]
    assert handles[7] == handles[3], "a slot that is too small is replaced once"


def test_a_mapping_shows_the_owners_writes_and_refuses_ours():
    buffer = MemoryBuffer(8)
    mapped = buffer.handle.open(CPU)
    buffer.data[3] = 9
    assert mapped.tolist() == [0, 0, 0, 9, 0, 0, 0, 0]
    pages = [line for line in Path("/proc/self/maps").read_text().splitlines() if f" {buffer.handle.inode} " in line]
    assert sorted(line.split()[1] for line in pages) == ["r--s", "rw-s"]


# Memory that a maker still reads.


def test_a_waiting_update_is_copied_before_its_memory_is_overwritten(make_models, memory, maker, fingerprint):
    with maker.served.use():
        first = send(memory, make_models(1), maker, version=1)  # in A
        begin(memory, maker, version=2)  # in B; its sender fails
        third = messages_of(make_models(3), memory=memory, header=begin(memory, maker, version=3))  # in A again
        assert [chunk.handle for chunk in third.chunks] == [chunk.handle for chunk in first]  # overwritten
    assert maker.served.version == 1
    assert fingerprint(maker.models) == fingerprint(make_models(1))


def test_a_set_is_not_overwritten_if_a_maker_was_not_asked(make_models, memory, maker, fingerprint):
    with maker.served.use():
        first = send(memory, make_models(1), maker, version=1)  # in A
        send(memory, make_models(2), version=2)  # in B, to nobody
        third = send(memory, make_models(3), version=3)  # in A, to nobody: A is retired
        assert third[0].handle != first[0].handle
    assert fingerprint(maker.models) == fingerprint(make_models(1))


def test_two_updates_during_one_piece_of_work_leave_the_newer_without_a_copy(
    make_models, memory, maker, fingerprint, monkeypatch
):
    with maker.served.use():
        send(memory, make_models(1), maker, version=1)
        send(memory, make_models(2), maker, version=2)
        header = begin(memory, version=3, names=[maker.served.name])
        monkeypatch.setattr(torch.Tensor, "clone", None)  # nothing of A is needed any more
        maker.update_experience_maker(message=messages_of({}, header=header).start())
        monkeypatch.undo()
        take(messages_of(make_models(3), memory=memory, header=header), maker)
    assert maker.served.version == 3
    assert fingerprint(maker.models) == fingerprint(make_models(3))


def test_what_only_an_older_waiting_update_touched_is_copied_too(make_models, memory, maker):
    with maker.served.use():
        send(memory, make_models(1), maker, version=1)  # A: everything
        take(partial(memory, maker, version=2, module="critic", bias=torch.tensor([5.0])), maker)  # B
        messages_of(make_models(9), memory=memory, header=begin(memory, maker, version=3))  # A; never finished
    assert maker.models["critic"].bias.tolist() == [5.0]
    assert maker.models["critic"].weight.equal(make_models(1)["critic"].weight)
    assert maker.models["actor"].body.weight.equal(make_models(1)["actor"].body.weight)


def test_the_base_of_an_adapter_does_not_stay_in_the_senders_memory(memory, maker):
    lora = {"actor": {"body": LayerLoRA(rank=1, alpha=2, dropout=0.0, scale=2.0)}}

    def publish(version, base=None):
        adapter = {
            "body.lora_A.default.weight": torch.full((1, 4), float(version)),
            "body.lora_B.default.weight": torch.ones(4, 1),
        }
        weights = adapter if base is None else {"body.base_layer.weight": torch.full((4, 4), base), **adapter}
        return partial(memory, maker, version=version, lora=lora, **weights)

    take(publish(1, base=100.0), maker)  # A: the base is W₀ from now on
    take(publish(2), maker)  # B
    publish(3, base=-7.0)  # overwrites A, and fails
    take(publish(4), maker)  # B: 100 + 2·1·4
    assert maker.models["actor"].body.weight.unique().tolist() == [108.0]


@pytest.mark.parametrize("is_deaf", [False, True])
def test_a_set_is_retired_if_a_maker_that_was_lent_it_does_not_answer(is_deaf, make_models, memory, fingerprint):
    makers = [Maker(make_models(0), name=name) for name in ("a", "b")]
    sluggish, answering = makers[1], makers[:1] if is_deaf else makers
    with sluggish.served.use():
        first = send(memory, make_models(1), *makers, version=1)
        send(memory, make_models(2), *answering, version=2)
        third = send(memory, make_models(3), *answering, version=3)
        assert (first[0].handle == third[0].handle) is not is_deaf
    assert fingerprint(makers[0].models) == fingerprint(make_models(3))
    assert fingerprint(sluggish.models) == fingerprint(make_models(1 if is_deaf else 3))


def test_memory_of_a_sender_that_is_gone_is_unmapped_after_two_updates(make_models, memory, maker):
    ours = {chunk.handle for chunk in send(memory, make_models(1), maker, version=1)}
    assert num_mapped(maker.receiver._reader) == len(ours)
    other = HostMemory()
    theirs = {c.handle for v in (2, 3) for c in send(other, make_models(v), maker, version=v)}
    assert set(maker.receiver._reader._open) == theirs


# Damage.


def changed(sent, **changes):
    chunk = dataclasses.replace(sent.chunks[1], **changes)
    return sent._replace(chunks=[sent.chunks[0], chunk, *sent.chunks[2:]])


def with_info(sent, **changes):
    return changed(sent, info=dataclasses.replace(sent.chunks[1].info, **changes))


def overwrite(sent, memory):
    memory._sets[memory._turn].slots[1][0][3] ^= 1
    return sent


def lie_about_the_checksum(sent, memory):
    return with_info(sent, checksum=sent.chunks[1].info.checksum ^ 1)


def lose_a_tensor(sent, memory):
    return with_info(sent, tensors=sent.chunks[1].info.tensors[:-1])


def name_the_offset_of_another_chunk(sent, memory):
    return changed(sent, handle=dataclasses.replace(sent.chunks[1].handle, offset=sent.chunks[2].handle.offset))


def name_an_offset_outside_of_the_memory(sent, memory):
    return changed(sent, handle=dataclasses.replace(sent.chunks[1].handle, offset=sent.chunks[1].handle.size))


def name_the_memory_of_another_chunk(sent, memory):
    return changed(sent, handle=sent.chunks[0].handle)


def exchange_two_tensors_everywhere(sent, memory):
    """In the chunk and in the manifest alike: each tensor's bytes are then those of the other."""
    index = next(
        i for i, chunk in enumerate(sent.chunks) if chunk.info.module == "actor" and len(chunk.info.tensors) > 1
    )
    chunk = sent.chunks[index]
    names = [spec.name for spec in chunk.info.tensors]
    tensors = tuple(spec._replace(name=name) for spec, name in zip(chunk.info.tensors, reversed(names), strict=True))
    chunk = dataclasses.replace(chunk, info=dataclasses.replace(chunk.info, tensors=tensors))
    chunks = [chunk if number == index else one for number, one in enumerate(sent.chunks)]
    manifest = dataclasses.replace(sent.manifest, chunks=tuple(one.info for one in chunks))
    return sent._replace(chunks=chunks, manifest=manifest)


def name_other_memory(sent, memory):
    return changed(sent, handle=dataclasses.replace(sent.chunks[1].handle, inode=0))


def name_a_process_that_is_gone(sent, memory):
    return changed(sent, handle=dataclasses.replace(sent.chunks[1].handle, process=2**31 - 1))


DAMAGES = [
    (overwrite, "chunk 1 of .* is unreadable: its checksum"),
    (lie_about_the_checksum, "chunk 1 of .* is unreadable: its checksum"),
    (lose_a_tensor, "chunk 1 of .* is unreadable: its checksum"),
    (name_the_offset_of_another_chunk, "chunk 1 of .* is unreadable: its checksum"),
    (name_an_offset_outside_of_the_memory, "chunk 1 of .* is unreadable"),
    (name_the_memory_of_another_chunk, "chunk 1 of .* is unreadable"),
    (exchange_two_tensors_everywhere, "its checksum"),
    (name_other_memory, "chunk 1 of .* no longer what its owner shared"),
    (name_a_process_that_is_gone, "chunk 1 of .* is unreadable: .*No such file"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES, ids=[damage.__name__ for damage, _ in DAMAGES])
def test_a_damaged_update_is_rejected_whole_and_the_next_works(
    damage, message, make_models, memory, maker, fingerprint
):
    before = fingerprint(maker.models)
    sent = messages_of(make_models(7), memory=memory, header=begin(memory, maker))
    with pytest.raises(WeightUpdateError, match=message):
        take(damage(sent, memory), maker)
    assert maker.open_updates == ()
    assert fingerprint(maker.models) == before
    send(memory, make_models(7), maker, version=2)
    assert fingerprint(maker.models) == fingerprint(make_models(7))


# Who can use it.


def test_a_receiver_that_reads_the_probe_can_and_others_say_why_not(memory, maker):
    probe = memory.probe()
    assert maker.sharing_fault(probe) is None
    elsewhere = dataclasses.replace(probe.handle, process=2**31 - 1)
    assert "No such file" in maker.sharing_fault(dataclasses.replace(probe, handle=elsewhere))
    other = dataclasses.replace(probe.info, checksum=probe.info.checksum ^ 1)
    assert "checksum" in maker.sharing_fault(dataclasses.replace(probe, info=other))


def test_chunks_that_there_is_no_memory_for_travel_by_value_and_the_log_says_so_once(
    make_models, memory, maker, fingerprint, monkeypatch, caplog
):
    num_calls, allocate = itertools.count(1), os.posix_fallocate

    def scarce(*arguments):
        if next(num_calls) > 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        allocate(*arguments)

    monkeypatch.setattr(host_memory.os, "posix_fallocate", scarce)
    with caplog.at_level(logging.WARNING):
        for version in (1, 2, 3):
            chunks = send(memory, make_models(version), maker, version=version)
            assert fingerprint(maker.models) == fingerprint(make_models(version))
    assert [chunk.handle is None for chunk in chunks[:3]] == [False, False, True]
    assert sum("no shared memory left" in record.getMessage() for record in caplog.records) == 1

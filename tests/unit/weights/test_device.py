"""Weights that stay on one device: the same code as on a card, with CPU tensors in one process."""

import dataclasses
import doctest

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import coati.weights.device as device_module
from coati.errors import WeightUpdateError
from coati.trainer.strategies.state_chunks import iter_state_chunks
from coati.weights import (
    DeviceSnapshots,
    LentChunk,
    ServedModels,
    WeightStage,
    new_header,
    weight_messages,
    why_not_shared,
)
from coati.weights.device import copy_all, device_checksum

CPU = torch.device("cpu")


@pytest.fixture
def snapshots():
    return DeviceSnapshots(CPU)


def messages_of(models, snapshots, *, version=1, has_checksums=True):
    header = new_header(version=version, source="trainer 0")
    shards = ((label, chunk) for label, model in models.items() for chunk in iter_state_chunks(model, max_bytes=64))
    *chunks, manifest = weight_messages(header, shards, snapshots=snapshots, has_checksums=has_checksums)
    return header, chunks, manifest


def deliver(stage, header, chunks, manifest):
    stage.begin(header.update_id, version=header.version, source=header.source)
    for chunk in chunks:
        stage.add_chunk(chunk)
    return stage.finish(manifest)


def test_docstring_examples_run():
    result = doctest.testmod(device_module)
    assert result.attempted > 0
    assert result.failed == 0


# The checksum.


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 100), st.data())
def test_any_flipped_bit_changes_the_checksum(size, data):
    original = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
    changed = original.clone()
    changed[data.draw(st.integers(0, size - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert device_checksum(changed) != device_checksum(original)


def test_the_checksum_counts_on_over_rows_by_hand(monkeypatch):
    words = torch.tensor([5, 6, 7, -1, 9], dtype=torch.int64)
    # 5·1 + 6·3 + 7·5 - 1·7 + 9·9 = 132, whatever the rows
    for row in (1, 2, 3, 5, 100):
        monkeypatch.setattr(device_module, "_ROW_WORDS", row)
        assert device_checksum(words.view(torch.uint8)) == 132
    assert device_checksum(words.flip(0).view(torch.uint8)) != 132


def test_the_checksum_wraps_around():
    # (2⁶³ - 1)·1 + (2⁶³ - 1)·3 = 2⁶⁵ - 4, which is -4 modulo 2⁶⁴
    words = torch.tensor([2**63 - 1, 2**63 - 1], dtype=torch.int64)
    assert device_checksum(words.view(torch.uint8)) == 2**64 - 4


# Round trips.


@pytest.mark.parametrize("has_checksums", [True, False])
def test_weights_arrive_to_the_bit(has_checksums, make_models, snapshots, fingerprint):
    models, sender = make_models(0), make_models(7)
    stage, served = WeightStage(models), ServedModels(models)
    header, chunks, manifest = messages_of(sender, snapshots, has_checksums=has_checksums)
    assert len(chunks) > 2
    assert all(isinstance(chunk, LentChunk) for chunk in chunks)
    assert sum(chunk.nbytes for chunk in chunks) == manifest.nbytes == 40 + 80 + 8 + 2 + 20
    update = deliver(stage, header, chunks, manifest)
    assert served.offer(update)
    assert update.is_full
    assert fingerprint(models) == fingerprint(sender)


def test_the_next_update_uses_the_same_buffers_and_leaves_what_is_staged_alone(make_models, snapshots, fingerprint):
    models, first, second = make_models(0), make_models(7), make_models(8)
    stage, served = WeightStage(models), ServedModels(models)
    one = messages_of(first, snapshots, version=1)
    staged = deliver(stage, *one)
    other = messages_of(second, snapshots, version=2)  # overwrites the snapshots that the first was cloned from
    assert [chunk.handle for chunk in one[1]] == [chunk.handle for chunk in other[1]]
    served.offer(staged)
    assert fingerprint(models) == fingerprint(first)
    served.offer(deliver(stage, *other))
    assert fingerprint(models) == fingerprint(second)


def test_a_retired_snapshot_is_never_written_again(make_models, snapshots, fingerprint):
    models, first = make_models(0), make_models(7)
    header, chunks, manifest = messages_of(first, snapshots)
    snapshots.retire()  # the send failed, and a slow maker reads on
    messages_of(make_models(8), snapshots, version=2)
    ServedModels(models).offer(deliver(WeightStage(models), header, chunks, manifest))
    assert fingerprint(models) == fingerprint(first)


# Damage.


def overwrite_the_snapshot(chunks, sender, snapshots):
    snapshots._buffers[0][0][3] ^= 1
    return chunks


def lie_about_the_checksum(chunks, sender, snapshots):
    return [dataclasses.replace(chunks[0], checksum=chunks[0].checksum ^ 1), *chunks[1:]]


def lose_a_slot(chunks, sender, snapshots):
    return [dataclasses.replace(chunks[0], slots=chunks[0].slots[:-1]), *chunks[1:]]


def move_to_another_module(chunks, sender, snapshots):
    return [dataclasses.replace(chunks[0], module="critic"), *chunks[1:]]


def a_handle_that_does_not_open(chunks, sender, snapshots):
    def fail(_):
        raise RuntimeError("invalid device context")

    return [dataclasses.replace(chunks[0], handle=(fail, (0,))), *chunks[1:]]


DAMAGES = [
    (overwrite_the_snapshot, "chunk 0 of .* is corrupt"),
    (lie_about_the_checksum, "chunk 0 of .* is corrupt"),
    (lose_a_slot, "do not hold the tensors"),
    (move_to_another_module, "do not hold the tensors"),
    (a_handle_that_does_not_open, "chunk 0 of .* could not be read in the sender's memory"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES, ids=[damage.__name__ for damage, _ in DAMAGES])
def test_a_damaged_update_is_rejected_whole_and_the_next_works(damage, message, make_models, snapshots, fingerprint):
    models, sender = make_models(0), make_models(7)
    before = fingerprint(models)
    stage, served = WeightStage(models), ServedModels(models)
    header, chunks, manifest = messages_of(sender, snapshots)
    with pytest.raises(WeightUpdateError, match=message):
        deliver(stage, header, damage(chunks, sender, snapshots), manifest)
    assert stage.open_updates == ()
    assert fingerprint(models) == before
    served.offer(deliver(stage, *messages_of(sender, snapshots, version=2)))
    assert fingerprint(models) == fingerprint(sender)


# Who takes this way.


def test_a_receiver_on_the_same_card_can_and_one_elsewhere_says_why_not(snapshots):
    probe = snapshots.probe()
    assert why_not_shared(probe, CPU) == ""
    other = dataclasses.replace(probe, place="GPU-7")
    assert why_not_shared(other, CPU) == "it computes on cpu, and the sender on GPU-7"


def test_memory_that_cannot_be_opened_or_reads_otherwise_is_a_reason_and_no_crash(snapshots):
    def fail(_):
        raise RuntimeError("peer access is not supported")

    probe = snapshots.probe()
    assert "peer access" in why_not_shared(dataclasses.replace(probe, handle=(fail, (0,))), CPU)
    assert "other bytes" in why_not_shared(dataclasses.replace(probe, checksum=1), CPU)


def test_a_commit_copies_mixed_dtypes_and_rounds_to_the_target():
    targets = [torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16), torch.zeros(0), torch.tensor(0)]
    copy_all(targets, [torch.ones(2), torch.full((2,), 1.00390625), torch.zeros(0), torch.tensor(5)])
    assert [target.tolist() for target in targets] == [[1.0, 1.0], [1.0, 1.0], [], 5]

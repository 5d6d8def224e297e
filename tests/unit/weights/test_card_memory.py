"""Weight updates in shared GPU memory: the same code as on a GPU, with CPU tensors in one process."""

import dataclasses
import doctest

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from weight_testing import deliver, header_of, messages_of

from coati.errors import OutOfMemory, WeightUpdateError
from coati.weights import message as transports
from coati.weights.message import BufferHandle, SharedGpuMemory, copy_all, device_checksum

CPU = torch.device("cpu")


@pytest.fixture
def memory():
    return SharedGpuMemory(CPU)


def test_docstring_examples_run():
    result = doctest.testmod(transports)
    assert result.attempted > 0
    assert result.failed == 0


# The checksum.


@given(st.integers(1, 100), st.data())
def test_any_flipped_bit_changes_the_checksum(size, data):
    original = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
    changed = original.clone()
    changed[data.draw(st.integers(0, size - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert device_checksum(changed) != device_checksum(original)


def test_the_checksum_over_several_rows_by_hand(monkeypatch):
    words = torch.tensor([5, 6, 7, -1, 9], dtype=torch.int64)
    # 5·1 + 6·3 + 7·5 - 1·7 + 9·9 = 132 for any row length
    for row in (1, 2, 3, 5, 100):
        monkeypatch.setattr(transports, "_ROW_WORDS", row)
        assert device_checksum(words.view(torch.uint8)) == 132
    assert device_checksum(words.flip(0).view(torch.uint8)) != 132


def test_the_checksum_wraps_around():
    # (2⁶³ - 1)·1 + (2⁶³ - 1)·3 = 2⁶⁵ - 4, which is -4 modulo 2⁶⁴
    words = torch.tensor([2**63 - 1, 2**63 - 1], dtype=torch.int64)
    assert device_checksum(words.view(torch.uint8)) == 2**64 - 4


# Round trips.


def test_weights_arrive_bit_for_bit(make_models, memory, maker, fingerprint):
    sent = messages_of(make_models(7), memory=memory)
    assert len(sent.chunks) > 2
    assert all(isinstance(chunk.handle, BufferHandle) and chunk.data is None for chunk in sent.chunks)
    assert sent.nbytes == 40 + 80 + 8 + 2 + 20
    deliver(sent, maker)
    assert fingerprint(maker.models) == fingerprint(make_models(7))


def test_the_next_update_uses_the_same_buffers_and_leaves_what_is_staged_alone(make_models, memory, maker, fingerprint):
    first = messages_of(make_models(7), memory=memory)
    with maker.served.use():
        deliver(first, maker)
        second = messages_of(make_models(8), memory=memory, header=header_of(2))  # overwrites the buffers
        assert [chunk.handle for chunk in first.chunks] == [chunk.handle for chunk in second.chunks]
    assert fingerprint(maker.models) == fingerprint(make_models(7))
    deliver(second, maker)
    assert fingerprint(maker.models) == fingerprint(make_models(8))


# Damage.


def changed(sent, **changes):
    return sent._replace(chunks=[dataclasses.replace(sent.chunks[0], **changes), *sent.chunks[1:]])


def with_info(sent, **changes):
    return changed(sent, info=dataclasses.replace(sent.chunks[0].info, **changes))


def overwrite_the_snapshot(sent):
    sent.chunks[0].handle.arguments[0][3] ^= 1
    return sent


def lie_about_the_checksum(sent):
    return with_info(sent, checksum=sent.chunks[0].info.checksum ^ 1)


def lose_a_tensor(sent):
    return with_info(sent, tensors=sent.chunks[0].info.tensors[:-1])


def move_to_another_module(sent):
    return with_info(sent, module="critic")


def a_handle_that_does_not_open(sent):
    def fail(*_):
        raise RuntimeError("invalid device context")

    return changed(sent, handle=BufferHandle("cpu", "gone", fail, (0,)))


def a_handle_of_another_chunk(sent):
    return changed(sent, handle=sent.chunks[1].handle)


DAMAGES = [
    (overwrite_the_snapshot, "chunk 0 of .* is unreadable: its checksum"),
    (lie_about_the_checksum, "chunk 0 of .* is unreadable: its checksum"),
    (lose_a_tensor, "chunk 0 of .* is unreadable: its checksum"),
    (move_to_another_module, "chunk 0 of .* is unreadable: its checksum"),
    (a_handle_that_does_not_open, "chunk 0 of .* is unreadable"),
    (a_handle_of_another_chunk, "chunk 0 of .* is unreadable"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES, ids=[damage.__name__ for damage, _ in DAMAGES])
def test_a_damaged_update_is_rejected_whole_and_the_next_works(
    damage, message, make_models, memory, maker, fingerprint
):
    before = fingerprint(maker.models)
    with pytest.raises(WeightUpdateError, match=message):
        deliver(damage(messages_of(make_models(7), memory=memory)), maker)
    assert maker.open_updates == ()
    assert fingerprint(maker.models) == before
    deliver(messages_of(make_models(7), memory=memory), maker)
    assert fingerprint(maker.models) == fingerprint(make_models(7))


@pytest.mark.parametrize("is_lent", [True, False])
def test_a_maker_out_of_memory_rejects_the_update_and_accepts_the_next(
    is_lent, make_models, memory, maker, fingerprint, monkeypatch
):
    before = fingerprint(maker.models)
    sent = messages_of(make_models(7), memory=memory if is_lent else None)
    with monkeypatch.context() as patch:
        patch.setattr(transports, "checksum_of", no_room)
        with pytest.raises(OutOfMemory, match=r"not be staged: .* ran out of memory.*topology\.gpus_per_maker"):
            deliver(sent, maker)
        assert "out of memory" in maker.sharing_fault(sent.chunks[0])
    assert maker.open_updates == ()
    assert fingerprint(maker.models) == before
    deliver(sent, maker)
    assert fingerprint(maker.models) == fingerprint(make_models(7))


def no_room(*_):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


# Which receivers can read it.


def test_only_a_receiver_on_the_same_gpu_can_share_memory(memory, maker):
    probe = memory.probe()
    assert maker.sharing_fault(probe) is None
    elsewhere = dataclasses.replace(probe.handle, device="GPU-7")
    assert "GPU-7" in maker.sharing_fault(dataclasses.replace(probe, handle=elsewhere))


def test_unreadable_or_changed_memory_is_reported_as_a_fault(memory, maker):
    probe = memory.probe()
    sent = messages_of({}, memory=memory)._replace(chunks=[probe])
    assert "invalid device" in maker.sharing_fault(a_handle_that_does_not_open(sent).chunks[0])
    assert "checksum" in maker.sharing_fault(lie_about_the_checksum(sent).chunks[0])


def test_a_commit_copies_mixed_dtypes_and_rounds_to_the_target():
    targets = [torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16), torch.zeros(0), torch.tensor(0)]
    copy_all(targets, [torch.ones(2), torch.full((2,), 1.00390625), torch.zeros(0), torch.tensor(5)])
    assert [target.tolist() for target in targets] == [[1.0, 1.0], [1.0, 1.0], [], 5]


def test_a_reader_closes_the_memory_of_a_sender_that_was_replaced(make_models, memory, maker):
    for version, of_a_sender in enumerate((memory, SharedGpuMemory(CPU)), start=1):
        sent = messages_of(make_models(version), memory=of_a_sender, header=header_of(version))
        deliver(sent, maker)
        assert {handle for handle, _ in maker.receiver._reader._open.values()} == {
            chunk.handle for chunk in sent.chunks
        }

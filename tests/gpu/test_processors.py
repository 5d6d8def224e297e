"""On which of a card's processors the work of a share runs: each block of a kernel notes the number of its own."""

import contextlib

import pytest
import torch

from coati.gpu import ProcessorShare, processors_of

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")


@triton.jit
def note_processor(seen, numbers):
    processor = tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    total = tl.sum(tl.load(numbers + tl.arange(0, 1024)), axis=0)  # so that a block takes a while
    tl.store(seen + processor, total)


def test_work_on_a_part_stays_on_so_many_processors():
    total = torch.cuda.get_device_properties(0).multi_processor_count
    numbers = torch.ones(1024, device="cuda")

    def processors_used(used):
        seen = torch.zeros(total, device="cuda")
        with used():
            note_processor[(4096,)](seen, numbers)
        return int((seen > 0).sum())

    share = ProcessorShare(torch.device("cuda", 0), 0.5)
    assert processors_used(contextlib.nullcontext) == total
    assert 0 < processors_used(share.used) <= processors_of(0.5, total)
    assert processors_used(contextlib.nullcontext) == total  # and only while it is used

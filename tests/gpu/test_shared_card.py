"""A step on a part of its processors, and work on a side stream."""

import contextlib

import torch

from coati.gpu import ProcessorShare, SideStream


def test_work_on_a_part_of_the_processors_is_the_same_work_and_in_order():
    torch.manual_seed(0)
    weight = 0.02 * torch.randn(2048, 2048, device="cuda")
    share = ProcessorShare(torch.device("cuda", 0), 0.5)

    def steps(used):
        value = weight
        for _ in range(30):
            value = value.detach().requires_grad_(True)  # on the outer stream, which waits for the step before
            with used():
                loss = (value @ value.T).log_softmax(-1).diagonal().sum()
                loss.backward()  # autograd's own thread
                with torch.no_grad():
                    value = value + 0.1 * value.grad
            value = value * 1.001  # outside again: reads what the step has written
        return value

    expected = steps(contextlib.nullcontext)
    found = steps(share.used)
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert (expected - weight * 1.001**30).abs().max() > 0.01  # the steps did something
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_work_on_the_side_stream_waits_for_what_was_before_and_not_for_what_came_since():
    large = torch.randn(8192, 8192, device="cuda")
    large @ large  # its handles are there
    small = torch.zeros(4, device="cuda")
    with SideStream(small.device).used():
        float((small @ small).sum())
    torch.cuda.synchronize()
    small += 3
    side, done = SideStream(small.device), torch.cuda.Event()
    for _ in range(100):
        large = large @ large * 1e-4
    small_later = small + large[0, :4]
    done.record()
    with side.used():
        found = float((small @ small).sum())
    assert not done.query()  # the long work goes on
    assert found == 36.0
    assert torch.isfinite(small_later).all()

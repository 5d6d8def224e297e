"""Work on a side stream."""

import torch

from coati.gpu import SideStream


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

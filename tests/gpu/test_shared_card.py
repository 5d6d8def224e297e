"""What a process holds of a card that it shares."""

import subprocess
import sys

SHARE = """
import ctypes, torch
from coati.gpu import share_gpu, stack_limit

device = torch.device("cuda", 0)
driver = ctypes.CDLL("libcuda.so.1")
torch.zeros(1, device=device)
before = stack_limit(driver)
share_gpu(device)
assert stack_limit(driver) == 256 < before
x = torch.randn(64, 64, device=device, requires_grad=True)
(x @ x).log_softmax(-1).sum().backward()
assert torch.isfinite(x.grad).all()
print("lowered")
"""


def test_the_stack_limit_is_lowered_and_kernels_still_run():
    # In a process of its own: the limit would stay for all other tests of this one.
    done = subprocess.run([sys.executable, "-c", SHARE], capture_output=True, text=True, timeout=120)
    assert done.stdout == "lowered\n", done.stderr[-3000:]

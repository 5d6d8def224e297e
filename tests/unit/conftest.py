"""Models small enough to check by hand: 11 tokens, 16 dimensions, one or two layers, seeded.

Fixtures import what they need, because the main process of `pytest -n` loads this file too and runs no test.
"""

import pytest

VOCABULARY = 11


@pytest.fixture(autouse=True)
def _one_thread(one_thread):
    pass


@pytest.fixture(autouse=True, scope="session")
def _seed_the_cpu_only():
    """`torch.manual_seed` formats a stack trace for each kind of device that is not there."""
    import torch

    with pytest.MonkeyPatch.context() as patch:
        for device in (torch.cuda, torch.xpu, torch.mtia):
            if not device.is_available():
                patch.setattr(device, "manual_seed_all", lambda seed: None)
        yield


# Far from uniform, so that wrong tokens have clearly wrong log-probs.
SETTINGS = {"vocab_size": VOCABULARY, "eos_token_id": 2, "initializer_range": 0.5}


@pytest.fixture
def llama_config():
    import tiny

    return lambda **changes: tiny.llama_config(**{**SETTINGS, **changes})


@pytest.fixture
def llama():
    import tiny

    return lambda seed=0, **changes: tiny.llama(seed, **{**SETTINGS, **changes})


@pytest.fixture
def gpt2():
    import tiny

    return lambda seed=0, **changes: tiny.gpt2(seed, **{**SETTINGS, **changes})

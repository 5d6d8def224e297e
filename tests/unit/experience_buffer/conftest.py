"""Samples with distinct values, so that tests detect swapped fields and shifted rows."""

from collections.abc import Callable

import pytest
import torch

from coati.experience_buffer.utils import BufferItem


@pytest.fixture
def item() -> Callable[..., BufferItem]:
    """Return an item with `prompt` and `actions` tokens, whose values depend on `number`."""

    def make(number=1, prompt=2, actions=2, **changes):
        floats = [torch.arange(actions).float() + 100 * number + 10 * index for index in range(4)]
        fields = {
            "sequences": torch.arange(prompt + actions) + 1000 * number,
            "action_log_probs": floats[0],
            "values": floats[1],
            "reward": torch.tensor(float(number)),
            "kl": floats[2],
            "advantages": floats[3],
            "attention_mask": torch.ones(prompt + actions, dtype=torch.long),
            "action_mask": torch.ones(actions, dtype=torch.bool),
            "sample_ids": torch.tensor(number),
        }
        return BufferItem(**{**fields, **changes})

    return make

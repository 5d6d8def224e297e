"""Batches of a user's data loader."""

import pytest
import torch

from coati.errors import DataError
from coati.experience_maker.work_source import LoaderPrompts


def drawn(*args, **kwargs):
    source = LoaderPrompts(*args, **kwargs)
    return [len(batch) for batch in iter(lambda: source.wait_for_work(0), None)]


def test_passes_and_steps():
    def loader():
        return [torch.ones(1, 2), torch.ones(2, 2)]

    assert drawn(loader, num_epochs=2) == [1, 2, 1, 2]
    assert drawn(loader, num_epochs=9, num_steps=3) == [1, 2, 1]
    with pytest.raises(DataError, match=r"dataloader_fn.* maker m"):
        drawn(list, maker_name="m")

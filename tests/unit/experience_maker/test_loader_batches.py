"""Batches from a user's loader."""

import pytest

from coati.errors import DataError
from coati.experience_maker.work_loop import loader_batches


def test_passes_and_steps():
    assert list(loader_batches(lambda: [1, 2], num_epochs=2)) == [1, 2, 1, 2]
    assert list(loader_batches(lambda: [1, 2], num_steps=3)) == [1, 2, 1]
    with pytest.raises(DataError, match=r"dataloader_fn.* maker m"):
        list(loader_batches(list, name="m"))

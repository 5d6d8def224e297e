"""The memory of the paged cache, without a model."""

import pytest
import torch

from coati.rollout.native.cache import PagedCache


@pytest.mark.parametrize("are_columns", [True, False])
def test_a_cache_stays_usable_after_running_out_of_memory(monkeypatch: pytest.MonkeyPatch, are_columns: bool) -> None:
    cache = PagedCache(num_layers=2, num_heads=1, head_dim=2, like=torch.zeros(1), are_columns=are_columns)
    cache.enlarge(3, 4)
    cache.keys[0][1] = 7.0
    new_zeros, done = torch.Tensor.new_zeros, []

    def scarce(tensor: torch.Tensor, *shape: int) -> torch.Tensor:
        if done:
            raise torch.OutOfMemoryError("only the first allocation succeeds")
        done.append(shape)
        return new_zeros(tensor, *shape)

    monkeypatch.setattr(torch.Tensor, "new_zeros", scarce)
    with pytest.raises(torch.OutOfMemoryError):
        cache.enlarge(8, 4)
    monkeypatch.undo()

    cache.enlarge(3, 4)  # the current size
    assert cache.has_free(2)
    assert not cache.has_free(3)
    cache.enlarge(5, 4)
    assert min(len(tensor) for tensor in cache.tensors()) == 5
    assert cache.keys[0][1].eq(7.0).all()

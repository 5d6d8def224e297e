"""Two small models with every kind of tensor that an update must handle, and a hash of their contents."""

import hashlib
from collections.abc import Callable

import pytest
import torch
from torch import nn
from weight_testing import Maker


class TinyActor(nn.Module):
    """bfloat16 and float32 weights, tied weights, an integer scalar, flags, and an empty tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4, dtype=torch.bfloat16)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 5, bias=False, dtype=torch.bfloat16)
        self.head.weight = self.embedding.weight
        self.register_buffer("num_seen", torch.tensor(0))
        self.register_buffer("is_open", torch.tensor([True, False]))
        self.register_buffer("nothing", torch.zeros(0, 3))


@pytest.fixture
def make_models() -> Callable[[int], dict[str, nn.Module]]:
    """Create an actor and a critic whose contents depend only on the seed."""

    def make(seed: int) -> dict[str, nn.Module]:
        models: dict[str, nn.Module] = {"actor": TinyActor(), "critic": nn.Linear(4, 1)}
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for model in models.values():
                for tensor in model.state_dict().values():
                    tensor.copy_(torch.randint(-99, 99, tensor.shape, generator=generator))
        return models

    return make


@pytest.fixture
def maker(make_models) -> Maker:
    return Maker(make_models(0))


@pytest.fixture
def fingerprint() -> Callable[[dict[str, nn.Module]], str]:
    """Hash the bytes of every tensor, so that a single flipped bit is detected."""

    def run(models: dict[str, nn.Module]) -> str:
        digest = hashlib.sha256()
        for label, model in models.items():
            for name, tensor in model.state_dict().items():
                digest.update(f"{label}.{name}:{tensor.dtype}:{tuple(tensor.shape)}".encode())
                digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    return run

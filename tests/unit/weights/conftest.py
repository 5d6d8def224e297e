"""Two small modules that hold everything a weight update can trip over, and how to send and hash them."""

import hashlib
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import nn

from coati.trainer.strategies.state_chunks import iter_state_chunks
from coati.weights import UpdateHeader, WeightChunk, WeightManifest, WeightStage, new_header, weight_messages


class Sent(NamedTuple):
    header: UpdateHeader
    chunks: list[WeightChunk]
    manifest: WeightManifest


class TinyActor(nn.Module):
    """bfloat16 and float32 weights, tied ones, an integer scalar, flags, and an empty tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4, dtype=torch.bfloat16)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 5, bias=False, dtype=torch.bfloat16)
        self.head.weight = self.embedding.weight
        self.register_buffer("num_seen", torch.tensor(0))
        self.register_buffer("is_open", torch.tensor([True, False]))
        self.register_buffer("nothing", torch.zeros(0, 3))


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def make_models() -> Callable[[int], dict[str, nn.Module]]:
    """Actor and critic with contents that depend on the seed alone."""

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
def publish() -> Callable[..., Sent]:
    """All messages of one update, in chunks of at most `max_bytes`."""

    def run(models, *, version=1, source="trainer 0", is_partial=False, max_bytes=64) -> Sent:
        header = new_header(version=version, source=source)
        shards = (
            (label, {name: tensor.clone() for name, tensor in chunk.items()})
            for label, model in models.items()
            for chunk in iter_state_chunks(model, max_bytes=max_bytes)
        )
        *chunks, manifest = weight_messages(header, shards, is_partial=is_partial)
        return Sent(header, chunks, manifest)

    return run


@pytest.fixture
def receive() -> Callable:
    """Stage a whole update and finish it."""

    def run(stage: WeightStage, sent: Sent):
        stage.begin(sent.header.update_id, version=sent.header.version, source=sent.header.source)
        for chunk in sent.chunks:
            stage.add_chunk(chunk)
        return stage.finish(sent.manifest)

    return run


@pytest.fixture
def fingerprint() -> Callable[[dict[str, nn.Module]], str]:
    """A hash over the bytes of every tensor, so that one flipped bit shows."""

    def run(models: dict[str, nn.Module]) -> str:
        digest = hashlib.sha256()
        for label, model in models.items():
            for name, tensor in model.state_dict().items():
                digest.update(f"{label}.{name}:{tensor.dtype}:{tuple(tensor.shape)}".encode())
                digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    return run

"""Weights shared by two processes on one GPU, without Ray."""

import multiprocessing

import pytest
import torch
from torch import nn
from weight_testing import Maker, PlainStrategy, make_sender

from coati.peers import LocalPeers
from coati.weights.message import SharedGpuMemory


def make_models(seed, device):
    torch.manual_seed(seed)
    return {"actor": nn.Linear(512, 512, dtype=torch.bfloat16, device=device), "critic": nn.Linear(8, 1, device=device)}


def serve(pipe, device):
    """A maker in a process of its own: takes messages until None comes, then sends its weights back."""
    maker = Maker(make_models(0, device))
    while (call := pipe.recv()) is not None:
        method, argument = call
        try:
            pipe.send((getattr(maker, method)(**argument), None))
        except Exception as error:
            pipe.send((None, str(error)))
    pipe.send([tensor.cpu().numpy().tobytes() for tensor in weights_of(maker.models)])


def weights_of(models):
    return [tensor.detach().float() for model in models.values() for tensor in model.state_dict().values()]


class RemoteMaker:
    def __init__(self, device):
        context = multiprocessing.get_context("spawn")
        self._pipe, end = context.Pipe()
        self.process = context.Process(target=serve, args=(end, device), daemon=True)
        self.process.start()

    def _call(self, method, **argument):
        self._pipe.send((method, argument))
        assert self._pipe.poll(120), "the other process does not answer"
        value, error = self._pipe.recv()
        if error is not None:
            raise RuntimeError(error)
        return value

    def update_experience_maker(self, *, message):
        assert all(chunk.data is None for chunk in message.chunks), "a weight went through host memory"
        return self._call("update_experience_maker", message=message)

    def sharing_fault(self, probe):
        return self._call("sharing_fault", probe=probe)

    def end(self):
        self._pipe.send(None)
        weights = self._pipe.recv()
        self.process.join(60)
        return weights


@pytest.mark.timeout(300)
def test_weights_arrive_to_the_bit_without_leaving_the_card():
    device = "cuda"
    models, maker = make_models(1, device), RemoteMaker(device)
    strategy = PlainStrategy()
    strategy.device = torch.device(device)
    shared = SharedGpuMemory(strategy.device)
    shared.least_chunk_mib = 0.0
    sender = make_sender(
        models,
        LocalPeers(maker=maker),
        ["maker"],
        strategy=strategy,
        shared=shared,
        chunk_mib=0.1,
    )
    for version in range(4):
        with torch.no_grad():
            models["actor"].bias.fill_(version)
        sender.send(version)
    assert maker.end() == [tensor.cpu().numpy().tobytes() for tensor in weights_of(models)]

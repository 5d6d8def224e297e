"""A maker whose trainer dies and is restarted, on threads: it keeps its weights, waits, and makes everything again
with the weights of the new trainer."""

from collections import Counter

import pytest
import torch
from thread_peers import PATIENCE, ThreadPeers
from tiny import actor_and_critic, maker_models
from weight_testing import header_of, messages_of

from coati.actors.host import Host
from coati.actors.maker import Maker
from coati.actors.options import MakerOptions
from coati.background import run_in_background
from coati.config import Deadlines
from coati.experience import Sample
from coati.experience_buffer.buffer import LeasedBuffer
from coati.ledger import LedgerRules
from coati.prompts.stream import PromptStream
from coati.trainer.strategies import DDPStrategy

DEADLINES = Deadlines(start_seconds=PATIENCE, batch_seconds=PATIENCE, update_seconds=PATIENCE)


class Prompts(PromptStream):
    """A stream of equal prompts."""

    samples_per_batch = 2

    def __init__(self):
        self.skipped = Counter()

    def batch(self, numbers, *, group_size):
        return [Sample(number, [3, 3], group=number) for number in numbers], {}


class Trainer:
    """The part of a trainer that makers call. A seed determines the weights of its versions."""

    def __init__(self, rules, incarnation=0):
        self.buffer = LeasedBuffer(rules, 2, incarnation=incarnation)
        self.requests = []
        self._incarnation = incarnation
        if incarnation:
            self.buffer.start_over()

    def lease(self, request):
        self.requests.append(request)
        return self.buffer.lease(request)

    def buffer_extend(self, items):
        self.buffer.extend(items)

    def update(self, version, *, seed, **header):
        models = dict(zip(("actor", "critic"), actor_and_critic(seed), strict=True))
        header = header_of(version, f"trainer {self._incarnation}", incarnation=self._incarnation, **header)
        return messages_of(models, header=header, max_bytes=4000)


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_maker_serves_a_new_trainer_after_all_its_weights_came(max_staleness):
    rules = LedgerRules(samples_per_version=2, total_samples=6, lead=0, max_staleness=max_staleness)
    first, second = Trainer(rules), Trainer(rules, 1)
    peers = ThreadPeers(trainer=first)
    holder = Maker(
        ["trainer"],
        lambda: DDPStrategy(device="cpu"),
        lambda: maker_models(0),
        sync_models_from_trainers=True,
        options=MakerOptions(deadlines=DEADLINES, rules=rules, incarnation=1),
        host=Host("maker", peers),
        max_new_tokens=4,
    )

    def receive(*messages):
        for message in messages:
            holder.update_experience_maker(message=message)

    loop = run_in_background(lambda: holder.workingloop(Prompts), name="maker")
    one = first.update(0, seed=1)
    receive(one.start(), *map(one.part, one.chunks), one.end())
    lost = first.buffer.sample(timeout_seconds=PATIENCE)
    first.buffer.mark_trained(1)
    half = first.update(1, seed=2)
    receive(half.start(), *map(half.part, half.chunks[:2]))  # then the trainer dies
    peers.kill("trainer")
    peers.add("trainer", second)
    asked = len(second.requests)
    while len(second.requests) < asked + 3:  # it makes requests and gets nothing
        assert not loop.done()
    assert second.buffer.get_length() == 0
    two = second.update(0, seed=1)
    receive(two.start(), *map(two.part, two.chunks), two.end())
    again = second.buffer.sample(timeout_seconds=PATIENCE)
    holder.stop()
    loop.result(PATIENCE)
    assert holder.progress().version == 0
    for (name, tensor), (_, other) in zip(lost.tensors(), again.tensors(), strict=True):
        assert torch.equal(tensor, other), f"{name} of the same leases, made again with the same weights"
    assert {request.trainer_incarnation for request in second.requests} == {0, 1}

"""Weight updates through real actors; tests/unit/weights tests the protocol between senders and receivers."""

import os
import select

import pytest
import ray
import torch
from ray_testing import DEADLINES, PATIENCE, make_ppo_trainer, strategy
from tiny import actor_and_critic, experience, maker_models
from weight_testing import header_of, messages_of

from coati.actors.options import MakerOptions, TrainerOptions
from coati.errors import WeightUpdateError
from coati.ray.detached_trainer_ppo import DetachedPPOTrainer
from coati.ray.experience_maker_holder import ExperienceMakerHolder

pytestmark = pytest.mark.usefixtures("cluster")


@pytest.fixture(scope="module")
def shared_maker(cluster, _shared_sinks):
    """A maker actor shared by this module. Its version only increases, so tests check differences."""
    maker = ExperienceMakerHolder.options(name="weights-maker", num_cpus=0).remote(
        list(_shared_sinks),
        strategy,
        maker_models,
        options=MakerOptions(deadlines=DEADLINES, num_threads=1),
        max_new_tokens=4,
    )
    yield "weights-maker", maker
    ray.kill(maker)


def ask(actor, function):
    return ray.get(actor.__ray_call__.remote(function), timeout=PATIENCE)


def weights_of(maker):
    """Return the current actor and critic of a maker actor."""
    return ask(
        maker,
        lambda self: {
            (label, name): tensor.clone()
            for label, module in self._served.modules.items()
            for name, tensor in module.state_dict().items()
        },
    )


def states(seed):
    actor, critic = actor_and_critic(seed)
    return {"actor": actor.state_dict(), "critic": critic.state_dict()}


def serves(served, seed):
    return all(
        torch.equal(served[label, name], tensor)
        for label, state in states(seed).items()
        for name, tensor in state.items()
    )


def call(maker, **arguments):
    return ray.get(maker.update_experience_maker.remote(**arguments), timeout=PATIENCE)


def version_of(maker):
    return ray.get(maker.progress.remote(), timeout=PATIENCE).version


@pytest.fixture
def make_trainer(keep, shared_maker):
    """Create a trainer in this process, one version ahead of the maker that it updates."""
    name, maker = shared_maker

    def make(**kwargs):
        trainer = make_ppo_trainer([name], **kwargs)
        keep(trainer._buffer)
        trainer.version = version_of(maker) + 1
        return trainer

    return make


def test_the_seeds_plain_calls_commit_at_the_end_or_not_at_all(shared_maker):
    _, maker = shared_maker
    state, before, version = states(10), weights_of(maker), version_of(maker)
    half = len(state["actor"]) // 2
    call(maker, chunk_start=True, fully_update=True)
    call(maker, new_actor_state_dict=dict(list(state["actor"].items())[:half]), fully_update=True)
    call(maker, new_actor_state_dict=dict(list(state["actor"].items())[half:]), fully_update=True)
    call(maker, new_critic_state_dict=state["critic"], fully_update=True)
    staged = weights_of(maker)
    assert all(torch.equal(staged[key], before[key]) for key in before)
    call(maker, chunk_end=True, fully_update=True)
    assert serves(weights_of(maker), 10)
    assert version_of(maker) == version + 1
    with pytest.raises(WeightUpdateError, match=r"shape \[3, 3\]"):
        call(maker, new_actor_state_dict={**state["actor"], "model.lm_head.weight": torch.zeros(3, 3)})
    assert version_of(maker) == version + 1
    call(maker, new_actor_state_dict=states(11)["actor"], new_critic_state_dict=states(11)["critic"])
    assert serves(weights_of(maker), 11)


def by_value(trainer):
    """Make memory sharing fail, as if the maker were on another host."""
    trainer._sender.shared = None


@pytest.mark.parametrize("change", [lambda trainer: None, by_value], ids=["shared memory", "object store"])
def test_training_steps_change_the_served_weights(shared_maker, make_trainer, change):
    _, maker = shared_maker
    trainer = make_trainer(seed=18)
    change(trainer)
    trainer.sync_models_to_remote_makers(shard_size=1 / 1024)
    assert serves(weights_of(maker), 18)
    batch = experience(0, 8)
    batch.temperatures = torch.ones(8)
    trainer.buffer_append(batch)
    trainer.fit(2, 1, 2)
    served, own = weights_of(maker), trainer._learner.actor.state_dict()
    assert all(torch.equal(served["actor", name], tensor) for name, tensor in own.items())
    assert not serves(served, 18)
    assert version_of(maker) == trainer.version
    metrics = [record["metrics"] for record in trainer.report().records.records]
    assert sum("actor_loss" in one and "critic_loss" in one for one in metrics) == 4  # 2 batches, 2 epochs


def enter(self):
    """Run inside a maker: start using its models."""
    self.held = self._served.use()
    self.held.__enter__()


def leave(self):
    self.held.__exit__(None, None, None)


def test_only_a_killed_trainers_complete_update_is_committed(shared_maker, make_trainer, unique):
    name, maker = shared_maker
    version = version_of(maker) + 1

    def start_at(self):
        self.version = version

    def send_half(self):
        actor, critic = self._learner.actor, self._learner.critic
        half = messages_of({"actor": actor, "critic": critic}, header=header_of(version + 1, "a trainer that dies"))
        for message in (half.start(), half.part(half.chunks[0])):
            ray.get(ray.get_actor(name).update_experience_maker.remote(message=message))

    doomed = DetachedPPOTrainer.options(name=unique("doomed"), num_cpus=0).remote(
        [name], strategy, lambda: actor_and_critic(31), options=TrainerOptions(deadlines=DEADLINES, num_threads=1)
    )
    process = os.pidfd_open(ask(doomed, lambda _: os.getpid()))  # readable when the process has ended
    ask(doomed, start_at)
    ask(maker, enter)
    try:
        ray.get(doomed.sync_models_to_remote_makers.remote(), timeout=PATIENCE)
        ask(doomed, send_half)
        ray.kill(doomed)
        assert select.select([process], [], [], PATIENCE)[0], "the killed trainer did not end"
    finally:
        ask(maker, leave)
    assert version_of(maker) == version
    assert serves(weights_of(maker), 31)
    os.close(process)
    make_trainer(seed=32).sync_models_to_remote_makers()
    assert serves(weights_of(maker), 32)

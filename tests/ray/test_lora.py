"""Adapters-only updates between real actors."""

import functools

import pytest
import ray
import torch
from ray_testing import DEADLINES, strategy
from tiny import actor_and_critic, llama, maker_models

from coati.actors.options import MakerOptions, TrainerOptions
from coati.models import Actor, Critic, LoRASettings
from coati.ray.detached_trainer_ppo import DetachedPPOTrainer
from coati.ray.experience_maker_holder import ExperienceMakerHolder

pytestmark = pytest.mark.usefixtures("cluster")
LORA = LoRASettings(rank=2, alpha=4.0)


def lora_models():
    """Build the models of `actor_and_critic` with adapters."""
    actor, critic = actor_and_critic(0)
    return Actor(actor.model, lora=LORA), Critic(critic.body, lora=LORA)


def logits_of(actor_handle, find_actor):
    def look(self):
        with torch.no_grad():
            return find_actor(self)(torch.tensor([[1, 2, 3]])).logits

    return ray.get(actor_handle.__ray_call__.remote(look))


def test_plain_makers_follow_a_lora_trainer_by_adapters_and_new_ones_get_the_base_too(keep, unique, sinks):
    maker_name, newcomer_name = unique("maker"), unique("newcomer")

    def make(name, seed):
        actor = ExperienceMakerHolder.options(name=name, num_cpus=0).remote(
            list(sinks),
            strategy,
            functools.partial(maker_models, seed),
            update_lora_weights=True,
            max_new_tokens=4,
            options=MakerOptions(deadlines=DEADLINES, num_threads=1),
        )
        return keep(actor)

    maker, newcomer = make(maker_name, 0), make(newcomer_name, 7)  # the newcomer has a different base and no adapters
    trainer = keep(
        DetachedPPOTrainer.options(name=unique("trainer"), num_cpus=0).remote(
            [maker_name],
            strategy,
            lora_models,
            update_lora_weights=True,
            options=TrainerOptions(deadlines=DEADLINES, num_threads=1),
        )
    )
    ray.get(trainer.sync_models_to_remote_makers.remote())
    full = ray.get(trainer.report.remote()).records.records[-1]["metrics"]["weights/bytes"]

    def shake(self, seed):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self._learner.actor.parameters():
                if parameter.requires_grad:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
        self.version += 1
        self._update_remote_makers()
        self.finish()

    for seed in range(5):
        ray.get(trainer.__ray_call__.remote(shake, seed))
    ray.get(trainer.change_makers.remote([maker_name, newcomer_name]))
    for seed in range(5, 7):
        ray.get(trainer.__ray_call__.remote(shake, seed))
    *_, adapters, joined, again = (
        record["metrics"]["weights/bytes"] for record in ray.get(trainer.report.remote()).records.records
    )
    assert adapters == again < full == joined
    of_maker = logits_of(maker, lambda self: self.pipeline.experience_maker.actor)
    of_trainer = logits_of(trainer, lambda self: self._learner.actor)
    of_newcomer = logits_of(newcomer, lambda self: self.pipeline.experience_maker.actor)
    torch.testing.assert_close(of_maker, of_trainer, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(of_newcomer, of_trainer, atol=1e-5, rtol=1e-5)
    assert (of_maker - Actor(llama(0)).eval()(torch.tensor([[1, 2, 3]])).logits).abs().max() > 1e-2
    assert [ray.get(one.progress.remote()).version for one in (maker, newcomer)] == [7, 7]

"""The usage example of each seed document, call by call, with its `my_…` placeholders filled in.

Differences from the documents: smaller numbers, and no `num_gpus`. Documents 000 and 002 run together, because 000's
maker needs a trainer and 002's trainer needs a maker.
"""

import pytest
import ray
import torch
from ray_testing import PATIENCE, strategy
from tiny import actor_and_critic, llama, maker_models, prompts
from transformers import AutoModelForCausalLM

from coati.experience_maker import Experience
from coati.experience_maker.base import ExperienceMaker
from coati.models import Actor, Critic
from coati.ray.detached_replay_buffer import DetachedReplayBuffer
from coati.ray.detached_trainer_base import DetachedTrainer
from coati.ray.detached_trainer_ppo import DetachedPPOTrainer
from coati.ray.experience_maker_holder import ExperienceMakerHolder

pytestmark = pytest.mark.usefixtures("cluster")

my_strategy = strategy


def my_actor():
    return actor_and_critic()[0]


def my_critic():
    return actor_and_critic()[1]


def my_reward_model():
    return maker_models()[2]


def my_initial_model():
    return llama(0)  # a plain transformers model, as in the documents


def my_dataloader():
    return prompts(num_batches=2, batch_size=4)


def test_documents_000_and_002_a_maker_feeds_a_custom_trainer(keep):
    @ray.remote(concurrency_groups={"buffer_length": 1, "buffer_append": 1, "buffer_sample": 1, "compute": 1})
    class MyTrainer(DetachedTrainer):
        def training_step(self, experience: Experience):
            assert experience.sequences.shape[0] == 8
            assert experience.sequences.shape[1] <= 12  # max_length counts prompt and response
            return {"loss": 0.0}

        def _update_remote_makers(self, fully_update=False, **kwargs):
            pass

    trainer = keep(
        MyTrainer.options(name="trainer_0").remote(
            experience_maker_holder_name_list=["maker_0"],
            train_batch_size=8,
        )
    )
    maker = keep(
        ExperienceMakerHolder.options(name="maker_0").remote(
            detached_trainer_name_list=["trainer_0"],
            strategy_fn=lambda: my_strategy(),
            model_fn=lambda: (my_actor(), my_critic(), my_reward_model(), my_initial_model()),
            kl_coef=0.1,
            buffer_cpu_offload=True,
            eval_performance=True,
            max_length=12,
            top_k=5,
        )
    )
    loop = maker.workingloop.remote(
        dataloader_fn=lambda: my_dataloader(),
        num_epochs=5,
    )
    # 5 epochs of 2 batches of 4 prompts are 40 samples: 5 batches of 8.
    ray.get(trainer.fit.remote(total_steps=5, update_steps=2, train_epochs=2), timeout=PATIENCE)
    ray.get(loop, timeout=PATIENCE)
    progress = ray.get(trainer.progress.remote())
    assert (progress.num_batches, progress.num_samples) == (10, 80)  # each batch twice
    assert progress.version == 3  # episodes of 2, 2 and 1 batches
    assert ray.get(trainer.buffer_get_length.remote()) == 0


def test_document_003_a_ppo_trainer_with_two_makers(keep, tmp_path):
    trainer = keep(
        DetachedPPOTrainer.options(name="trainer_0").remote(
            experience_maker_holder_name_list=["maker_0", "maker_1"],
            strategy_fn=lambda: my_strategy(),
            model_fn=lambda: (my_actor(), my_critic()),
            train_batch_size=8,
            eps_clip=0.2,
            value_clip=0.4,
            eval_performance=True,
        )
    )
    makers = [
        keep(
            ExperienceMakerHolder.options(name=name).remote(
                detached_trainer_name_list=["trainer_0"],
                strategy_fn=lambda: my_strategy(),
                model_fn=lambda: (my_actor(), my_critic(), my_reward_model(), my_initial_model()),
                sync_models_from_trainers=True,
                max_new_tokens=4,
            )
        )
        for name in ("maker_0", "maker_1")
    ]
    loops = [maker.workingloop.remote(lambda: my_dataloader(), num_steps=4) for maker in makers]

    # Sync initial model weights to experience makers
    ray.get(trainer.sync_models_to_remote_makers.remote(), timeout=PATIENCE)
    # Start training: 2 makers × 4 batches of 4 are 32 samples, 4 batches of 8.
    ray.get(trainer.fit.remote(total_steps=4, update_steps=2, train_epochs=2), timeout=PATIENCE)
    # Save models
    path = str(tmp_path / "actor_checkpoint")
    ray.get(trainer.strategy_save_actor.remote(path, only_rank0=True), timeout=PATIENCE)
    critic_path = str(tmp_path / "critic_checkpoint")
    ray.get(trainer.strategy_save_critic.remote(critic_path, only_rank0=True), timeout=PATIENCE)
    ray.get(loops, timeout=PATIENCE)

    assert ray.get(trainer.progress.remote()).num_batches == 8
    assert [ray.get(maker.progress.remote()).version for maker in makers] == [2, 2]
    saved = AutoModelForCausalLM.from_pretrained(path).state_dict()
    served = ray.get(
        makers[0].__ray_call__.remote(
            lambda self: {name: t.clone() for name, t in self._served.modules["actor"].state_dict().items()}
        )
    )
    assert {f"model.{name}" for name in saved} == set(served)
    assert all(torch.equal(tensor, served[f"model.{name}"]) for name, tensor in saved.items())
    assert not torch.equal(saved["lm_head.weight"], llama(0).state_dict()["lm_head.weight"])
    assert Critic.from_pretrained(critic_path)(torch.tensor([[2, 3]])).shape == (1, 2)


def my_experience(num_samples=8):
    tokens = torch.arange(num_samples * 5).reshape(num_samples, 5) % 20
    floats = torch.zeros(num_samples, 3)
    return Experience(
        sequences=tokens,
        action_log_probs=floats,
        values=floats,
        reward=torch.ones(num_samples),
        kl=floats,
        advantages=floats,
        attention_mask=torch.ones_like(tokens),
        action_mask=torch.ones(num_samples, 3, dtype=torch.bool),
    )


def test_document_001_experience_is_a_container_and_its_maker_is_abstract():
    experience = my_experience()
    experience.to_device(torch.device("cpu"))
    assert experience.pin_memory() is experience
    with pytest.raises(TypeError, match="make_experience"):
        ExperienceMaker(Actor(llama(0)), my_critic(), my_reward_model(), my_initial_model())


def test_document_004_a_replay_buffer_with_a_limit(keep):
    # Create a buffer that batches experiences into groups of 8
    buffer = keep(DetachedReplayBuffer(sample_batch_size=8, limit=16))
    experience = my_experience()
    # Remotely called by ExperienceMakerHolder
    buffer.append(experience)
    assert buffer.get_length() == 1
    # Locally called by the trainer to get a batch
    batch = buffer.sample(to_device="cpu")
    assert torch.equal(batch.sequences, experience.sequences)

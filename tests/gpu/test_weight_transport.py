"""Trainer and maker processes on one GPU: weights stay on it, and generation hardly pauses."""

import copy

import pytest
import torch
from transformers import LlamaConfig

from coati.models import Actor, Critic
from coati.trainer.strategies import DDPStrategy

CONFIG = LlamaConfig(
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=1000,
    max_position_embeddings=64,
    tie_word_embeddings=True,
)


def trainer_models(seed):
    torch.manual_seed(seed)
    actor = Actor.from_config(CONFIG, dtype=torch.bfloat16)
    return actor, Critic(copy.deepcopy(actor.model))


def maker_models():
    actor, critic = trainer_models(0)
    reference, _ = trainer_models(0)
    return actor, critic, Critic(copy.deepcopy(actor.model)), reference


def digests(modules):
    """Every weight, on the host, by module and name."""
    return {
        (label, name): tensor.detach().cpu()
        for label, module in modules.items()
        for name, tensor in module.state_dict().items()
    }


@pytest.fixture
def cluster():
    ray = pytest.importorskip("ray", reason="needs Ray")
    import sys

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    ray.init(address="local", num_cpus=4, num_gpus=1, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


@pytest.mark.timeout(300)
def test_weights_move_on_the_card_and_arrive_to_the_bit(cluster):
    from coati.actors.options import TrainerOptions
    from coati.config import TopologySettings
    from coati.ray.detached_trainer_ppo import DetachedPPOTrainer
    from coati.ray.experience_maker_holder import ExperienceMakerHolder

    ray = cluster
    topology = TopologySettings(max_staleness=-1)
    trainer = DetachedPPOTrainer.options(name="gpu-trainer", num_gpus=0.5).remote(
        ["gpu-maker"], DDPStrategy, lambda: trainer_models(7), options=TrainerOptions(topology=topology)
    )
    maker = ExperienceMakerHolder.options(name="gpu-maker", num_gpus=0.5).remote(
        ["gpu-trainer"], DDPStrategy, maker_models, max_new_tokens=4
    )

    def addresses(self):
        return [p.data_ptr() for module in self._served.modules.values() for p in module.parameters()]

    def forbid_the_host_path(self):
        import coati.weights.sender as sender

        def refuse(*_):
            raise AssertionError("a weight went through host memory")

        sender.value_chunk = refuse

    before = ray.get(maker.__ray_call__.remote(addresses), timeout=240)
    ray.get(trainer.__ray_call__.remote(forbid_the_host_path), timeout=240)
    for config in ({"shard_size": 1}, {}, {"shard_size": 1}):  # in many chunks, in two, and with the same memory again
        ray.get(trainer.sync_models_to_remote_makers.remote(**config), timeout=120)
    sent = ray.get(
        trainer.__ray_call__.remote(
            lambda self: digests({"actor": self._learner.actor, "critic": self._learner.critic})
        ),
        timeout=60,
    )
    served, seconds, path = ray.get(
        maker.__ray_call__.remote(
            lambda self: (digests(self._served.modules), self._served.last_commit_seconds, str(self._receiver.device))
        ),
        timeout=60,
    )
    assert path.startswith("cuda")
    assert served.keys() == sent.keys()
    assert all(torch.equal(served[key], sent[key]) for key in sent)
    assert ray.get(maker.__ray_call__.remote(addresses), timeout=60) == before  # in place
    print(
        f"commit of {sum(t.numel() * t.element_size() for t in sent.values()) / 2**20:.0f} MiB: {seconds * 1e3:.2f} ms"
    )
    for actor in (trainer, maker):
        ray.kill(actor)


def test_the_checksum_of_the_card_is_the_checksum_of_the_host():
    from coati.weights.message import device_checksum

    data = torch.randint(0, 256, (40_000_001,), dtype=torch.uint8)
    assert device_checksum(data.cuda()) == device_checksum(data)

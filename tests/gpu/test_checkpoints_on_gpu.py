"""Checkpoints on a GPU restore weights, moments and random state bit for bit."""

import tiny
import torch
from learner_settings import sections

from coati.trainer.checkpoints import Checkpoints, find_checkpoint
from coati.trainer.ppo import PPOLearner
from coati.trainer.strategies import DDPStrategy


def make(folder, seed):
    train, algorithm = sections(actor_lr=0.01, warmup_steps=8, total_steps=20, save_every=1)
    torch.manual_seed(seed)
    strategy = DDPStrategy(device="cuda", compute_dtype=torch.bfloat16)  # with weights and moments in float32
    learner = PPOLearner(
        *tiny.actor_and_critic(seed), strategy, train, algorithm, optimizer_class=strategy.optimizer_class
    )
    return learner, Checkpoints(folder, learner, None, train=train)


def state_of(learner):
    """Weights and moments."""
    tensors = {
        f"{label}.{name}": tensor.clone()
        for label, model in learner.models.items()
        for name, tensor in model.state_dict().items()
    }
    for label, optimizer in learner.optimizers.items():
        for index, state in optimizer.state_dict()["state"].items():
            tensors |= {f"{label}.{index}.{name}": value.clone() for name, value in state.items()}
    return tensors


def test_a_checkpoint_made_on_a_gpu_restores_to_the_same_bits_there(tmp_path):
    learner, checkpoints = make(tmp_path, seed=0)
    learner.step(tiny.experience(0, 4))
    checkpoints.save(1, {})
    learner.step(tiny.experience(4, 4))
    checkpoints.save(2, {})  # into the memory that the first one was copied to
    saved = state_of(learner)
    expected = torch.rand(4, device="cuda")
    learner.step(tiny.experience(8, 4))  # while it is being written
    checkpoints.wait()
    path, state = find_checkpoint(tmp_path)
    assert state["version"] == 2

    other, others = make(tmp_path, seed=5)
    others.restore(path)
    assert torch.equal(torch.rand(4, device="cuda"), expected)
    assert any(".exp_avg" in name for name in saved)
    restored = state_of(other)
    assert saved.keys() == restored.keys()
    assert all(torch.equal(saved[name], restored[name].to(saved[name].device)) for name in saved)

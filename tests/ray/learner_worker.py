"""Strategies under the real learner: what one rank does here in the test's process, and each of two as a process.

`python learner_worker.py FOLDER` is one of two ranks; the folder has the models, and checkpoints of one rank.
"""

import dataclasses
import os
import sys
import weakref
from pathlib import Path

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from coati.experience_maker import Experience
from coati.models import Actor, Critic
from coati.models.actor import packed_scoring_problem
from coati.models.deferred import DeferredWeights
from coati.models.value_head import packs
from coati.trainer.off_policy import CorrectionSettings
from coati.trainer.ppo import PPOLearner, PPOSettings
from coati.trainer.strategies import DDPStrategy, GeminiStrategy, LowLevelZeroStrategy, base

VOCAB = 23
NUM_STEPS = 20
STRATEGIES = {
    "ddp": lambda **options: DDPStrategy(device="cpu", timeout_seconds=180, **options),
    "zero1": lambda **options: LowLevelZeroStrategy(stage=1, device="cpu", timeout_seconds=180, **options),
    "zero2": lambda **options: LowLevelZeroStrategy(stage=2, device="cpu", timeout_seconds=180, **options),
    "gemini": lambda **options: GeminiStrategy("static", device="cpu", timeout_seconds=180, **options),
    "gemini-cpu": lambda **options: GeminiStrategy("cpu", device="cpu", timeout_seconds=180, **options),
}
SAVERS = ("ddp", "zero1", "zero2", "gemini")  # on CPUs the policies of Gemini are one
LAYOUTS = ("whole", "sharded")
SETTINGS = PPOSettings(actor_lr=1e-3, critic_lr=2e-3, entropy_coef=0.01, micro_batch_size=2, max_grad_norm=0.5)
OFF_POLICY = dataclasses.replace(SETTINGS, correction=CorrectionSettings(policy="decoupled", estimator="vtrace"))


def write_models(folder):
    """What every rank starts from, in files: a policy sharp enough to be clipped, a critic with an opinion."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        initializer_range=0.2,
    )
    Actor(LlamaForCausalLM(config)).save_pretrained(folder / "actor")
    critic = Critic.from_pretrained(folder / "actor")
    nn.init.normal_(critic.value_head.weight, std=0.3)
    critic.save_pretrained(folder / "critic")


def load_models(folder):
    return (
        Actor.from_pretrained(folder / "actor", dtype=torch.float64),
        Critic.from_pretrained(folder / "critic", dtype=torch.float64),
    )


def make_learner(folder, strategy, settings=SETTINGS):
    with strategy.model_init_context():
        models = load_models(folder)
    return PPOLearner(*models, strategy, settings, optimizer_class=strategy.optimizer_class)


def batch(step, num_samples=4):
    """The joined batch of a step, float64, ragged, its old log-probs a random distance from any policy's."""
    generator = torch.Generator().manual_seed(step)
    width, actions = 3, 4
    prompts = torch.randint(1, width + 1, (num_samples, 1), generator=generator)
    responses = torch.randint(1, actions + 1, (num_samples, 1), generator=generator)
    positions = torch.arange(width + actions)
    attention_mask = ((positions >= width - prompts) & (positions < width + responses)).long()
    mask = attention_mask[:, width:].bool()

    def noise(scale=1.0, shift=0.0):
        values = torch.randn(num_samples, actions, generator=generator, dtype=torch.float64) * scale + shift
        return values.masked_fill(~mask, 0.0)

    return Experience(
        sequences=torch.randint(0, VOCAB, (num_samples, width + actions), generator=generator) * attention_mask,
        action_log_probs=noise(0.3, shift=-3.0),
        values=noise(),
        reward=noise()[:, 0].clone(),
        kl=noise(0.1),
        advantages=noise(2.0, shift=1.0),
        attention_mask=attention_mask,
        action_mask=mask,
        sample_ids=torch.arange(num_samples),
    )


def rows_of(rank, world_size, step, num_samples=4):
    """Uneven, and another way in every step: other numbers of samples and micro-batches, and now and then none."""
    if world_size == 1:
        return slice(0, num_samples)
    cut = step % (num_samples + 1)
    return slice(0, cut) if rank == 0 else slice(cut, num_samples)


def part_of(strategy, step):
    return batch(step).select(rows_of(strategy.rank, strategy.world_size, step))


def whole_state(learner):
    return {
        f"{label}.{name}": tensor.clone()
        for label, model in learner.models.items()
        for chunk in learner.strategy.get_model_state_dict_shard(model, shard_size=1 / 512)
        for name, tensor in chunk.items()
    }


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def num_bytes(tensors):
    """Memory that this rank holds for them: its piece of what is sharded, nothing on the meta device."""
    return sum(0 if tensor.is_meta else local(tensor).nbytes for tensor in tensors)


def held(learner, grad_bytes):
    models, optimizers = learner.models.values(), learner.optimizers.values()
    moments = [
        value
        for optimizer in optimizers
        for state in optimizer.state.values()
        for key, value in state.items()
        if key != "step"
    ]
    return {
        "parameters": num_bytes(parameter for model in models for parameter in model.parameters()),
        "gradients": grad_bytes,
        "state": num_bytes(moments),
    }


def train(folder, name, settings=SETTINGS, num_steps=NUM_STEPS):
    """The run of one rank: where the weights ended, each step's metrics, and what was held meanwhile."""
    strategy = STRATEGIES[name]()
    seen = {"fill_bytes": [], "metrics": []}
    with watched_fill(seen["fill_bytes"]):
        learner = make_learner(folder, strategy, settings)
    plain_step, grad_bytes = strategy.optimizer_step, []

    def optimizer_step(optimizer):
        grad_bytes.append(num_bytes(p.grad for group in optimizer.param_groups for p in group["params"]))
        plain_step(optimizer)

    strategy.optimizer_step = optimizer_step
    for step in range(num_steps):
        seen["metrics"].append(learner.step(part_of(strategy, step)))
    seen["is_packed"] = not packed_scoring_problem(learner.actor) and packs(learner.critic)
    seen["state"] = whole_state(learner)
    seen["held"] = held(learner, sum(grad_bytes[-2:]))
    seen["streamed"] = streamed_bytes(learner)
    return learner, seen


class watched_fill:
    """Notes the bytes of parameters that a model holds whenever a part of it has just been filled."""

    def __init__(self, notes):
        self._notes = notes

    def __enter__(self):
        self._plain = plain = DeferredWeights.fill
        notes = self._notes

        def fill(deferred, model, *args, **kwargs):
            plain(deferred, model, *args, **kwargs)
            notes.append(num_bytes(model.parameters()))

        DeferredWeights.fill = fill

    def __exit__(self, *exc_info):
        DeferredWeights.fill = self._plain


def streamed_bytes(learner):
    """Most bytes of gathered tensors that are alive at once while the actor's weights are streamed."""
    alive, peak = [], 0
    own = {local(parameter).data_ptr() for parameter in learner.actor.parameters()}
    for chunk in learner.strategy.get_model_state_dict_shard(learner.actor, shard_size=4096 / 2**20):
        alive += [weakref.ref(tensor) for tensor in chunk.values() if tensor.data_ptr() not in own]
        peak = max(peak, sum(tensor().nbytes for tensor in alive if tensor() is not None))
    return peak


def save_all(learner, folder):
    """Everything a run needs to go on, in both layouts; tiny files, so that there are several."""
    strategy, usual = learner.strategy, base._DEFAULT_SHARD_MIB
    base._DEFAULT_SHARD_MIB = 1 / 256
    for layout in LAYOUTS:
        sharded = layout == "sharded"
        for label, model in learner.models.items():
            strategy.save_model(model, folder / layout / label, sharded=sharded)
            strategy.save_optimizer(learner.optimizers[label], folder / layout / f"{label}-optimizer", sharded=sharded)
    base._DEFAULT_SHARD_MIB = usual


def resume(learner, checkpoint):
    """Go on from a checkpoint for one step, whatever the learner was before; returns where its weights are then."""
    for label, model in learner.models.items():
        learner.strategy.load_model(model, checkpoint / label)
        learner.strategy.load_optimizer(learner.optimizers[label], checkpoint / f"{label}-optimizer")
    learner.step(part_of(learner.strategy, NUM_STEPS))
    return whole_state(learner)


def furthest(one, other):
    """Largest distance between two sets of weights; infinite if they are of different models."""
    if one.keys() != other.keys():
        return float("inf")
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def resume_from_all(folder, expected):
    """Distances to the run that was never interrupted: for every loader, saver, the saver's ranks, and layout."""
    distances = {}
    for loader in SAVERS:
        learner = make_learner(folder, STRATEGIES[loader](), dataclasses.replace(SETTINGS, micro_batch_size=0))
        for saver in SAVERS:
            for ranks in (1, 2):
                for layout in LAYOUTS:
                    state = resume(learner, folder / f"{saver}-{ranks}" / layout)
                    distances[loader, saver, ranks, layout] = furthest(state, expected)
    return distances


def mixed_precision(folder, name):
    """Two steps in bfloat16 on float32 weights; also the dtypes in which they compute and are stored."""
    strategy = STRATEGIES[name](compute_dtype=torch.bfloat16)
    with strategy.model_init_context():
        models = (
            Actor.from_pretrained(folder / "actor", dtype=torch.float32),
            Critic.from_pretrained(folder / "critic", dtype=torch.float32),
        )
    learner = PPOLearner(*models, strategy, SETTINGS, optimizer_class=strategy.optimizer_class)
    example = batch(0).select(slice(0, 2))
    logits = learner.actor(example.sequences, example.attention_mask).logits
    for step in range(2):
        part = part_of(strategy, step)
        floats = {key: t.float() for key, t in part.tensors() if t.is_floating_point()}
        learner.step(dataclasses.replace(part, **floats))
    wire = next(strategy.get_model_state_dict_shard(learner.actor, dtype=strategy.compute_dtype))
    return {
        "computed": logits.dtype,
        "stored": {tensor.dtype for tensor in whole_state(learner).values()},
        "moments": {v.dtype for s in learner.optimizers["actor"].state.values() for v in s.values()},
        "wire": {tensor.dtype for tensor in wire.values()},
        "state": whole_state(learner),
    }


def main(folder):
    torch.set_num_threads(1)
    seen = {}
    for name in STRATEGIES:
        learner, seen[name] = train(folder, name)
        if name in SAVERS:
            save_all(learner, folder / f"{name}-2")
        seen[f"mixed-{name}"] = mixed_precision(folder, name)
    for name in ("ddp", "gemini"):
        seen[f"off-policy-{name}"] = train(folder, name, OFF_POLICY, num_steps=3)[1]
    seen["resumed"] = resume_from_all(folder, torch.load(folder / "expected.pt"))
    torch.save(seen, folder / f"rank{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

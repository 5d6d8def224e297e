"""Strategies with the real learner: the run of one rank in the test's process, and of each of two ranks in `main`.

The folder holds the models, and the checkpoints of one rank.
"""

import contextlib
import dataclasses
import itertools
import os
import weakref

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from coati.config import AlgorithmSettings, TrainSettings
from coati.errors import CoatiError
from coati.experience_maker import Experience
from coati.models import Actor, Critic
from coati.models.actor import packed_scoring_problem
from coati.models.lora import LoRASettings
from coati.models.memory import whole_tensor
from coati.models.value_head import packs
from coati.trainer.ppo import PPOLearner
from coati.trainer.strategies import DDPStrategy, GeminiStrategy, LowLevelZeroStrategy
from coati.trainer.strategies.layouts import ShardedStrategy

VOCAB = 23
NUM_STEPS = 3
NUM_MIXED_STEPS = 2
STRATEGIES = {
    "ddp": lambda **options: DDPStrategy(device="cpu", timeout_seconds=180, **options),
    "zero1": lambda **options: LowLevelZeroStrategy(stage=1, device="cpu", timeout_seconds=180, **options),
    "zero2": lambda **options: LowLevelZeroStrategy(stage=2, device="cpu", timeout_seconds=180, **options),
    "gemini": lambda **options: GeminiStrategy(cpu_offload=True, device="cpu", timeout_seconds=180, **options),
}
TRAIN = TrainSettings(actor_lr=1e-3, critic_lr=2e-3, micro_batch_size=2, max_grad_norm=0.5)
ALGORITHM = AlgorithmSettings(entropy_coef=0.01, correction="none")
OFF_POLICY = AlgorithmSettings(entropy_coef=0.01, correction="decoupled")


def write_models(folder):
    """Write the initial models: a policy sharp enough to be clipped, and a critic with a random head."""
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


def load_models(folder, dtype=torch.float64):
    return (
        Actor.from_pretrained(folder / "actor", dtype=dtype),
        Critic.from_pretrained(folder / "critic", dtype=dtype),
    )


def make_learner(folder, strategy, algorithm=ALGORITHM, dtype=torch.float64, train=TRAIN):
    with strategy.model_init_context():
        models = load_models(folder, dtype)
    return PPOLearner(*models, strategy, train, algorithm, optimizer_class=strategy.optimizer_class)


def batch(step, num_samples=4):
    """Build the joined batch of a step: float64, ragged, with random old log-probs."""
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
    """Return a rank's rows: uneven, with different numbers of samples and micro-batches per step, sometimes none."""
    if world_size == 1:
        return slice(0, num_samples)
    cut = step % (num_samples + 1)
    return slice(0, cut) if rank == 0 else slice(cut, num_samples)


def part_of(strategy, step):
    return batch(step).select(rows_of(strategy.rank, strategy.world_size, step))


def passes_of(world_size, step, num_samples=4):
    """Return the rows of every micro-batch of a step, over all ranks."""
    for rank in range(world_size):
        start, stop, _ = rows_of(rank, world_size, step).indices(num_samples)
        for first in range(start, stop, TRAIN.micro_batch_size):
            yield slice(first, min(first + TRAIN.micro_batch_size, stop))


def in_float32(experience):
    floats = {key: tensor.float() for key, tensor in experience.tensors() if tensor.is_floating_point()}
    return dataclasses.replace(experience, **floats)


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
    """Return the bytes that this rank holds: its part of sharded tensors, and nothing on the meta device."""
    return sum(0 if tensor.is_meta else local(tensor).nbytes for tensor in tensors)


def state_bytes(learner):
    states = [state for optimizer in learner.optimizers.values() for state in optimizer.state.values()]
    return num_bytes(value for state in states for key, value in state.items() if key != "step")


def held(learner, grad_bytes):
    return {
        "parameters": num_bytes(p for model in learner.models.values() for p in model.parameters()),
        "gradients": grad_bytes,
        "state": state_bytes(learner),
    }


def train(folder, name, algorithm=ALGORITHM, num_steps=NUM_STEPS):
    """Run one rank; return its final weights, each step's metrics, and the memory it held."""
    strategy = STRATEGIES[name]()
    seen = {"fill_bytes": [], "metrics": []}
    with watched_fill(seen["fill_bytes"]):
        learner = make_learner(folder, strategy, algorithm)
    plain_step, grad_bytes = strategy.optimizer_step, []

    def optimizer_step(optimizer):
        grad_bytes.append(num_bytes(p.grad for group in optimizer.param_groups for p in group["params"]))
        plain_step(optimizer)

    strategy.optimizer_step = optimizer_step
    with counted_whole_blocks(learner.actor) as seen["whole_blocks"]:
        seen["metrics"].append(learner.step(part_of(strategy, 0)))
    for step in range(1, num_steps):
        seen["metrics"].append(learner.step(part_of(strategy, step)))
    seen["is_packed"] = not packed_scoring_problem(learner.actor) and packs(learner.critic)
    seen["state"] = whole_state(learner)
    seen["held"] = held(learner, sum(grad_bytes[-2:]))
    seen["streamed"] = streamed_bytes(learner)
    return learner, seen


class watched_fill:
    """Records the bytes of parameters that a model holds each time a part of it has been filled."""

    def __init__(self, notes):
        self._notes = notes

    def __enter__(self):
        self._plain = agree, fill = ShardedStrategy._sync_dtypes, ShardedStrategy._broadcast_from_rank0
        notes, models = self._notes, []

        def watched_agree(strategy, model):
            models.append(model)
            agree(strategy, model)

        def watched_fill(strategy, module):
            fill(strategy, module)
            notes.append(num_bytes(models[-1].parameters()))

        ShardedStrategy._sync_dtypes, ShardedStrategy._broadcast_from_rank0 = watched_agree, watched_fill

    def __exit__(self, *exc_info):
        ShardedStrategy._sync_dtypes, ShardedStrategy._broadcast_from_rank0 = self._plain


@contextlib.contextmanager
def counted_whole_blocks(model):
    """Record the number of unsharded blocks each time a block of the model begins to compute."""
    blocks = [module for module in model.modules() if isinstance(module, FSDPModule) and module is not model]
    counts = []

    def count(*_):
        counts.append(sum(not isinstance(next(block.parameters()), DTensor) for block in blocks))

    hooks = [block.register_forward_pre_hook(count) for block in blocks]
    yield counts
    for hook in hooks:
        hook.remove()


class most_alive:
    """Tracks the tensors that functions return: `num_bytes` is the peak memory of those alive at once."""

    def __init__(self, *places):
        self.num_bytes = 0
        self._places, self._seen = places, []

    def __enter__(self):
        self._plain = [getattr(*place) for place in self._places]
        for place, plain in zip(self._places, self._plain, strict=True):
            setattr(*place, self._watched(plain))
        return self

    def __exit__(self, *exc_info):
        for place, plain in zip(self._places, self._plain, strict=True):
            setattr(*place, plain)

    def _watched(self, plain):
        def watched(*args, **kwargs):
            result = plain(*args, **kwargs)
            self.note(result)
            return result

        return watched

    def note(self, tensor):
        if isinstance(tensor, torch.Tensor):
            self._seen.append(weakref.ref(tensor))
            alive = {id(one): one.nbytes for seen in self._seen if (one := seen()) is not None}
            self.num_bytes = max(self.num_bytes, sum(alive.values()))


def streamed_bytes(learner):
    """Return the peak bytes of gathered or copied tensors while the actor's weights are streamed."""
    own = {local(parameter).data_ptr() for parameter in learner.actor.parameters()}
    with most_alive((DTensor, "full_tensor")) as made:
        for chunk in learner.strategy.get_model_state_dict_shard(learner.actor, shard_size=4096 / 2**20):
            for tensor in chunk.values():
                if tensor.data_ptr() not in own:
                    made.note(tensor)
    return made.num_bytes


def save_all(learner, folder):
    """Save everything that a run needs to continue."""
    for label, model in learner.models.items():
        learner.strategy.save_model(model, folder / label)
        learner.strategy.save_optimizer(learner.optimizers[label], folder / f"{label}-optimizer")


def resume(learner, checkpoint):
    """Continue from a checkpoint for one step, with any learner.

    Return its weights after the step, and the bytes of optimizer state that it loaded.
    """
    for label, model in learner.models.items():
        learner.strategy.load_model(model, checkpoint / label)
        learner.strategy.load_optimizer(learner.optimizers[label], checkpoint / f"{label}-optimizer")
    loaded = state_bytes(learner)
    learner.step(part_of(learner.strategy, NUM_STEPS))
    return whole_state(learner), loaded


def furthest(one, other):
    """Return the largest distance between two sets of weights; infinite if they belong to different models."""
    if one.keys() != other.keys():
        return float("inf")
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def resume_from_all(folder, expected):
    """Return, for every loader, saver and number of saving ranks, the distance to an uninterrupted run.

    Also return the bytes of optimizer state that were loaded.
    """
    resumed = {}
    ranks_of_savers = itertools.cycle([1, 2, 2])
    for loader in STRATEGIES:
        learner = make_learner(folder, STRATEGIES[loader](), train=TRAIN.model_copy(update={"micro_batch_size": 0}))
        for saver in STRATEGIES:
            state, loaded = resume(learner, folder / f"{saver}-{next(ranks_of_savers)}")
            resumed[loader, saver] = furthest(state, expected), loaded
    return resumed


def draw_weights(folder, name):
    """Return the weights of a trained model with adapters and one for inference, built with a seed per rank."""
    strategy = STRATEGIES[name]()
    torch.manual_seed(strategy.rank)
    config = LlamaConfig.from_pretrained(folder / "actor", tie_word_embeddings=True)
    with strategy.model_init_context():
        actor = Actor.from_config(config, lora=LoRASettings(rank=2))
        critic = Critic.from_config(config, dtype=torch.bfloat16 if strategy.rank == 0 else None)
    trained = [parameter for parameter in actor.parameters() if parameter.requires_grad]
    (actor, _), critic = strategy.prepare((actor, strategy.optimizer_class(trained)), critic)
    streams = [strategy.get_model_state_dict_shard(model) for model in (actor, critic)]
    buffers = [{name: tensor.clone() for name, tensor in model.named_buffers()} for model in (actor, critic)]
    return [{n: t.clone() for chunk in stream for n, t in chunk.items()} for stream in streams] + buffers


def prepare_different_models(folder, name):
    """Return the error that each rank gets if the ranks build different models."""
    strategy = STRATEGIES[name]()
    config = LlamaConfig.from_pretrained(folder / "actor", num_hidden_layers=1 + strategy.rank)
    with strategy.model_init_context():
        actor = Actor.from_config(config)
    try:
        strategy.prepare((actor, strategy.optimizer_class(actor.parameters())))
    except CoatiError as error:
        return str(error)
    return ""


def mixed_precision(folder, name):
    """Take two bfloat16 steps on float32 weights; return gradients and the dtypes of all tensors."""
    strategy = STRATEGIES[name](compute_dtype=torch.bfloat16)
    learner = make_learner(folder, strategy, dtype=torch.float32)
    plain_clip, gradients = strategy.clip_grad_norm, []

    def clip_grad_norm(model, max_norm):
        parameters = strategy.unwrap_model(model).named_parameters()
        gradients.append({name: whole_tensor(parameter.grad).clone() for name, parameter in parameters})
        return plain_clip(model, max_norm)

    strategy.clip_grad_norm = clip_grad_norm
    example = batch(0).select(slice(0, 2))
    logits = learner.actor(example.sequences, example.attention_mask).logits
    for step in range(NUM_MIXED_STEPS):
        learner.step(in_float32(part_of(strategy, step)))
    wire = next(strategy.get_model_state_dict_shard(learner.actor, dtype=strategy.compute_dtype))
    return {
        "computed": logits.dtype,
        "stored": {tensor.dtype for tensor in whole_state(learner).values()},
        "moments": {v.dtype for s in learner.optimizers["actor"].state.values() for v in s.values()},
        "wire": {tensor.dtype for tensor in wire.values()},
        "gradients": gradients,
        "state": whole_state(learner),
    }


def main(folder):
    seen = {}
    for name in STRATEGIES:
        learner, seen[name] = train(folder, name)
        save_all(learner, folder / f"{name}-2")
        seen[f"mixed-{name}"] = mixed_precision(folder, name)
    seen["drawn"] = draw_weights(folder, "gemini")
    seen["different"] = prepare_different_models(folder, "gemini")
    for name in ("ddp", "gemini"):
        seen[f"off-policy-{name}"] = train(folder, name, OFF_POLICY, num_steps=3)[1]
    seen["resumed"] = resume_from_all(folder, torch.load(folder / "expected.pt"))
    torch.save(seen, folder / f"rank{os.environ['RANK']}.pt")

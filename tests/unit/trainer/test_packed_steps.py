"""Token budgets, activation checkpointing and chunked logits do not change the result of a step."""

import contextlib
import copy
import shutil

import pytest
import tiny
import torch
from learner_settings import sections
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen2Config

import coati.algos.logprobs
from coati.errors import ConfigError
from coati.experience_maker import Experience
from coati.models import Actor, Critic, LoRASettings
from coati.trainer.optim import make_optimizer
from coati.trainer.ppo import PPOLearner, check_compiler, checkpoint_activations, compile_blocks, turn_off_dropout
from coati.trainer.strategies import DDPStrategy

VOCAB = 61
CONFIG = Qwen2Config(
    vocab_size=VOCAB,
    hidden_size=8,
    intermediate_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=32,
    initializer_range=0.3,
)
SETTINGS = {"actor_lr": 1e-3, "critic_lr": 2e-3, "entropy_coef": 0.01}
PROMPTS, RESPONSES = (3, 1, 2, 3, 1, 2), (4, 2, 3, 1, 6, 5)
LENGTHS = [7, 3, 5, 4, 7, 7]


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    for key in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(key, raising=False)


@pytest.fixture(scope="module")
def template():
    torch.manual_seed(0)
    actor = Actor.from_config(CONFIG).double()
    critic = Critic(copy.deepcopy(actor.model))
    nn.init.normal_(critic.value_head.weight, std=0.3)
    return actor, critic


def make_batch():
    generator = torch.Generator().manual_seed(0)
    width, actions = max(PROMPTS), max(RESPONSES)
    columns = torch.arange(width + actions)
    starts, ends = width - torch.tensor(PROMPTS).unsqueeze(1), width + torch.tensor(RESPONSES).unsqueeze(1)
    mask = ((columns >= starts) & (columns < ends)).long()
    action_mask = mask[:, width:].bool()

    def noise(shift=0.0):
        values = torch.randn(action_mask.shape, generator=generator, dtype=torch.float64) + shift
        return values.masked_fill(~action_mask, 0.0)

    return Experience(
        sequences=torch.randint(1, VOCAB, mask.shape, generator=generator) * mask,
        action_log_probs=noise(-4.0),
        values=noise(),
        reward=torch.zeros(len(PROMPTS), dtype=torch.float64),
        kl=torch.zeros(action_mask.shape, dtype=torch.float64),
        advantages=noise(),
        attention_mask=mask,
        action_mask=action_mask,
    )


def learner_of(models, **changes):
    actor, critic = copy.deepcopy(models)
    return PPOLearner(actor, critic, DDPStrategy(device="cpu"), *sections(**SETTINGS | changes))


def calls_of(module):
    """Return a list that collects the number of tokens of each call of the module."""
    seen = []
    module.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append((kwargs.get("input_ids", args[0] if args else None)).numel()),
        with_kwargs=True,
    )
    return seen


def furthest(one, other):
    pairs = zip(one.models.values(), other.models.values(), strict=True)
    return max(
        float((a - b).detach().abs().max())
        for x, y in pairs
        for a, b in zip(x.parameters(), y.parameters(), strict=True)
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [33]),
        ({"micro_batch_tokens": 15}, [15, 11, 7]),
        ({"micro_batch_tokens": 15, "micro_batch_size": 2}, [10, 9, 14]),
        ({"micro_batch_tokens": 1}, LENGTHS),
    ],
)
def test_passes_keep_to_the_budget_compute_no_padding_and_give_the_same_step(template, changes, expected):
    whole, parts = learner_of(template, micro_batch_tokens=0), learner_of(template, **changes)
    bodies = [calls_of(parts.actor.model.model), calls_of(parts.critic.body)]
    metrics = [learner.step(make_batch()) for learner in (whole, parts)]
    assert [each.pop("train/micro_batch_tokens") for each in metrics] == [0, changes.get("micro_batch_tokens", 16384)]
    assert bodies == [expected, expected]
    assert furthest(whole, parts) < 1e-12
    assert metrics[1] == pytest.approx(metrics[0], rel=1e-9)


def test_computed_padding_counts_towards_the_budget(template, monkeypatch):
    monkeypatch.setattr("coati.models.actor.scoring_problem", lambda model: "it is not to")
    learner = learner_of(template, micro_batch_tokens=20)
    seen = calls_of(learner.actor.model)
    learner.step(make_batch())
    assert seen == [18, 18, 18]  # two rows of nine columns per pass


def test_padded_and_packed_steps_are_the_same_step(template, monkeypatch):
    packed, padded = learner_of(template), learner_of(template)
    metrics = [packed.step(make_batch())]
    monkeypatch.setattr("coati.models.actor.scoring_problem", lambda model: "it is not to")
    monkeypatch.setattr("coati.models.value_head.packing_problem", lambda model: "it is not to")
    seen = calls_of(padded.critic.body)
    metrics.append(padded.step(make_batch()))
    assert seen == [6 * 9]  # padding was computed
    assert furthest(packed, padded) < 1e-10
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-9)


class LargestTensor(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
        return result


def test_a_step_never_holds_the_logits_of_the_batch(template, monkeypatch):
    chunk = 4
    monkeypatch.setattr(coati.algos.logprobs, "_CHUNK_BYTES_CPU", chunk * VOCAB * 8)
    learner = learner_of(template)
    with LargestTensor() as seen:
        learner.step(make_batch())
    head = VOCAB * CONFIG.hidden_size  # its gradient has the same size
    assert seen.largest == max(head, sum(LENGTHS) * CONFIG.intermediate_size)
    assert seen.largest < sum(RESPONSES) * VOCAB


@pytest.mark.parametrize("lora", [None, LoRASettings(rank=2)])
def test_activation_checkpointing_gives_the_same_step(template, lora):
    models = template
    if lora is not None:
        torch.manual_seed(0)
        models = (Actor.from_config(CONFIG, lora=lora).double(), None)
    learners = [learner_of(models), learner_of(models, activation_checkpointing=True)]
    counts = []
    for learner in learners:
        block = next(module for name, module in learner.actor.named_modules() if name.endswith("layers.1"))
        calls = []
        block.self_attn.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        learner.step(make_batch())
        counts.append(len(calls))
    assert counts == [1, 2]
    assert furthest(*learners) < 1e-12
    attention = next(m for n, m in learners[1].actor.named_modules() if n.endswith("layers.1.self_attn"))
    assert not attention.training  # modules inside the blocks are not in training mode


def test_activation_checkpointing_disables_dropout_inside_blocks():
    model = tiny.decoder("opt", dropout=0.5)
    ids, mask = torch.arange(3, 11).unsqueeze(0), torch.ones(1, 8, dtype=torch.long)
    expected = model(ids, mask).logits
    checkpoint_activations(model)
    turn_off_dropout(model)
    assert torch.equal(model(ids, mask).logits, expected)


def test_models_without_checkpointing_or_blocks_are_refused():
    with pytest.raises(ConfigError, match=r"activation_checkpointing needs transformers models .* got Linear"):
        checkpoint_activations(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="compile needs a model with two or more blocks, got Linear"):
        compile_blocks(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("device", "variable", "value", "there", "says"),
    [
        ("cpu", "CXX", "", {"g++"}, None),
        ("cpu", "CXX", "ccache my++", {"ccache"}, None),
        ("cpu", "CXX", "", {"gcc"}, r"g\+\+ or clang\+\+, or the compiler that CXX names, .* got none. Install one"),
        ("cpu", "CXX", "my++", {"g++"}, r"got CXX = 'my\+\+', which is not a program"),
        ("cuda", "CC", "", {"gcc"}, None),
        ("cuda", "CC", "", {"g++"}, "gcc or clang, or the compiler that CC names, .* set train.compile to false"),
    ],
)
def test_compiling_without_a_compiler_is_refused(monkeypatch, device, variable, value, there, says):
    monkeypatch.setenv(variable, value)
    monkeypatch.setattr(shutil, "which", lambda name: name if name in there else None)
    with pytest.raises(ConfigError, match=says) if says else contextlib.nullcontext():
        check_compiler(torch.device(device))


def test_compile_takes_the_blocks_and_nothing_else(template, monkeypatch):
    compiled, asked = [], []
    monkeypatch.setattr("coati.trainer.ppo.check_compiler", asked.append)
    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: compiled.append((type(self).__name__, options)))
    learner_of(template, compile=True)
    assert compiled == [("Qwen2DecoderLayer", {"dynamic": True})] * 4  # two of the actor, two of the critic
    assert asked == [torch.device("cpu")]


def test_adam_is_fused_and_other_optimizers_are_unchanged():
    adam, sgd = (make_optimizer(kind, nn.Linear(2, 2), 0.1) for kind in (torch.optim.Adam, torch.optim.SGD))
    assert adam.param_groups[0]["fused"]
    assert sgd.param_groups[0]["fused"] is None

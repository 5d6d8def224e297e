"""Float32 weights computing in bfloat16: bit-identical to a bfloat16 model, with float32 gradients."""

import copy
import inspect
import weakref

import pytest
import torch
from torch import nn
from transformers import Qwen2Config

from coati.models import Actor, Critic, LoRASettings, action_logprobs
from coati.models.actor import Scoring, packed_scoring_problem
from coati.trainer.ppo import checkpoint_activations, turn_off_dropout
from coati.trainer.strategies import DDPStrategy
from coati.trainer.strategies.layouts import CastWeights

CONFIG = Qwen2Config(
    vocab_size=31,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=32,
    initializer_range=0.3,
    tie_word_embeddings=True,
)
ACTIONS = 5


@pytest.fixture
def actor():
    torch.manual_seed(0)
    return Actor.from_config(CONFIG).eval()


def in_bfloat16(actor):
    """Return a copy with the makers' weights; buffers keep their dtype, as in models loaded in bfloat16."""
    half = copy.deepcopy(actor)
    for parameter in half.parameters():
        parameter.data = parameter.data.bfloat16()
    return half


def casting(actor):
    actor.forward = CastWeights(actor, torch.bfloat16)
    return actor


def batch(seed):
    return torch.randint(3, 31, (3, 9), generator=torch.Generator().manual_seed(seed))


def add_gradient(actor, seed):
    logprobs, _ = action_logprobs(actor, batch(seed), None, ACTIONS)
    logprobs.sum().backward()
    return logprobs.detach()


def test_a_pass_is_bit_identical_to_the_bfloat16_models(actor):
    half, ours = in_bfloat16(actor), casting(actor)
    assert torch.equal(add_gradient(ours, 0), add_gradient(half, 0))
    for (name, weight), other in zip(ours.named_parameters(), half.parameters(), strict=True):
        assert weight.dtype == weight.grad.dtype == torch.float32, name
        assert torch.equal(weight.grad, other.grad.float()), name
    with torch.no_grad():
        again, _ = action_logprobs(ours, batch(0), None, ACTIONS)
        assert torch.equal(again, action_logprobs(half, batch(0), None, ACTIONS)[0])


def test_gradients_of_passes_add_up_in_float32(actor):
    half, ours = in_bfloat16(actor), casting(actor)
    total = [torch.zeros_like(weight) for weight in ours.parameters()]
    for seed in range(3):
        half.zero_grad()
        add_gradient(ours, seed)
        add_gradient(half, seed)
        for entry, weight in zip(total, half.parameters(), strict=True):
            entry += weight.grad
    assert all(torch.equal(w.grad, entry) for w, entry in zip(ours.parameters(), total, strict=True))
    assert not any(torch.equal(entry, entry.bfloat16().float()) for entry in total)  # the sums need float32's 24 bits


def test_a_step_below_bfloat16_resolution_is_not_lost(actor):
    half = in_bfloat16(actor)
    model, optimizer = DDPStrategy(seed=0, device="cpu", compute_dtype=torch.bfloat16).prepare(
        (actor, torch.optim.SGD(actor.parameters(), lr=1.0))
    )
    assert torch.equal(add_gradient(model, 0), add_gradient(half, 0))
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    for weight in model.parameters():
        weight.grad = torch.full_like(weight, 1e-6)
    optimizer.step()
    assert all((weight != before[name]).all() for name, weight in model.named_parameters())
    halves = [(weight.bfloat16(), before[name].bfloat16()) for name, weight in model.named_parameters()]
    assert sum(int((one != other).sum()) for one, other in halves) < 100  # of 5,000, almost none in bfloat16


def test_recomputed_activations_use_the_weights_of_their_own_pass(actor):
    half, ours = in_bfloat16(actor), casting(actor)
    checkpoint_activations(ours)
    turn_off_dropout(ours)
    calls = []
    ours.model.model.layers[1].self_attn.register_forward_hook(lambda *_: calls.append(1))
    logprobs, _ = action_logprobs(ours, batch(0), None, ACTIONS)
    action_logprobs(ours, batch(1), None, ACTIONS)  # another forward pass before the first one's backward
    logprobs.sum().backward()
    assert len(calls) == 3
    assert torch.equal(logprobs, add_gradient(half, 0))
    for weight, other in zip(ours.parameters(), half.parameters(), strict=True):
        assert torch.equal(weight.grad, other.grad.float())
    assert all(weight.dtype == torch.float32 for weight in ours.parameters())


def test_frozen_weights_are_cast_and_get_no_gradient():
    torch.manual_seed(0)
    ours = casting(Actor.from_config(CONFIG, lora=LoRASettings(rank=2)).eval())
    seen = []
    layer = ours.model.get_base_model().model.layers[0].mlp.up_proj
    layer.register_forward_hook(lambda module, *_: seen.append(module.base_layer.weight))
    add_gradient(ours, 0)
    assert (seen[0].dtype, seen[0].requires_grad) == (torch.bfloat16, False)
    trained = [weight for weight in ours.parameters() if weight.requires_grad]
    assert 0 < len(trained) < len(list(ours.parameters()))
    assert all((weight.grad is not None) == weight.requires_grad for weight in ours.parameters())


def test_a_body_shared_by_actor_and_critic_supports_checkpointing(actor):
    critic = Critic(actor.model)
    nn.init.normal_(critic.value_head.weight)
    half = in_bfloat16(actor)
    half_critic = Critic(half.model)
    half_critic.value_head.weight.data = critic.value_head.weight.data.bfloat16()
    ours = [casting(model) for model in (actor, critic)]
    for model in ours:
        checkpoint_activations(model)
        turn_off_dropout(model)
    for policy, value in (ours, (half, half_critic)):
        add_gradient(policy, 0)
        value(batch(0)).sum().backward()
    weight, other = (model.model.model.layers[0].mlp.up_proj.weight for model in (actor, half))
    assert weight.grad.dtype == torch.float32
    assert (weight.grad - other.grad).norm() < 0.01 * weight.grad.norm()  # the reference sums in bfloat16


def test_a_retained_graph_supports_two_backward_passes(actor):
    checkpoint_activations(casting(actor))
    turn_off_dropout(actor)
    logprobs, _ = action_logprobs(actor, batch(0), None, ACTIONS)
    logprobs.sum().backward(retain_graph=True)
    once = [weight.grad.clone() for weight in actor.parameters()]
    logprobs.sum().backward()
    assert all(torch.equal(weight.grad, 2 * grad) for weight, grad in zip(actor.parameters(), once, strict=True))


def test_copies_are_freed_after_their_pass(actor):
    seen = []
    layer = actor.model.model.layers[0].mlp.up_proj
    layer.register_forward_hook(lambda module, *_: seen.append(weakref.ref(module.weight)))
    add_gradient(casting(actor), 0)
    with torch.no_grad():
        action_logprobs(actor, batch(0), None, ACTIONS)
    assert [reference() for reference in seen] == [None, None]


def test_unused_weights_get_no_gradient_and_integers_stay(actor):
    class WithUnused(Actor):
        def __init__(self, model):
            super().__init__(model)
            self.unused = nn.Parameter(torch.ones(2))
            self.numbers = nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False)

        def forward(self, *args, **kwargs):
            assert (self.unused.dtype, self.numbers.dtype) == (torch.bfloat16, torch.int8)
            return super().forward(*args, **kwargs)

    ours = casting(WithUnused(actor.model))
    logprobs, _ = ours(batch(0), None, scoring=Scoring(ACTIONS))
    logprobs.sum().backward()
    assert ours.unused.grad is None
    assert all(weight.grad is not None for weight in ours.model.parameters())


def test_a_tied_weight_is_one_weight_in_a_pass_too(actor):
    seen = []
    embedding, head = actor.model.get_input_embeddings(), actor.model.get_output_embeddings()
    embedding.register_forward_hook(lambda *_: seen.append((embedding.weight, head.weight)))
    add_gradient(casting(actor), 0)
    assert seen[0][0] is seen[0][1]
    assert seen[0][0].dtype == torch.bfloat16
    assert embedding.weight is head.weight


def test_a_pass_that_raises_leaves_the_weights_in_place():
    class Broken(nn.Linear):
        def forward(self, x, *, factor=1.0):
            assert self.weight.dtype == torch.bfloat16
            raise ArithmeticError("no")

    model = casting(Broken(2, 2))
    weight = model.weight
    with pytest.raises(ArithmeticError):
        model(torch.ones(2))
    assert model.weight is weight
    assert list(inspect.signature(model.forward).parameters) == ["x", "factor"]


def test_a_bare_model_computes_in_bfloat16_too(actor):
    bare = casting(actor.model)
    assert "wrap it in Actor" in packed_scoring_problem(bare)
    seen = []
    bare.model.layers[0].register_forward_hook(lambda module, args, output: seen.append(args[0].dtype))
    add_gradient(bare, 0)
    assert seen == [torch.bfloat16]

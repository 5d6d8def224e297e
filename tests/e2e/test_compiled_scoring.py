"""Compiled blocks: scoring models share code, use the current weights, and train on copies."""

import copy

import torch
from torch import nn
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend
from transformers import Qwen2Config

from coati.experience_maker.scoring import logprobs_of, values_of
from coati.models import Actor, Critic, RewardModel, action_logprobs
from coati.models.packing import PackedRows
from coati.trainer.ppo import checkpoint_activations, compile_blocks, turn_off_dropout
from coati.trainer.strategies.layouts import CastWeights

CONFIG = Qwen2Config(
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    vocab_size=11,
    max_position_embeddings=64,
)


def test_models_of_one_class_share_their_code_and_new_weights_are_seen(monkeypatch):
    torch.manual_seed(0)
    reference, critic, reward = (kind.from_config(CONFIG).eval() for kind in (Actor, Critic, RewardModel))
    for model in (critic, reward):
        nn.init.normal_(model.value_head.weight)
    sequences = torch.randint(1, 11, (3, 9))
    attention_mask = torch.ones_like(sequences)
    attention_mask[0, :4] = 0
    action_mask = torch.ones(3, 4, dtype=torch.bool)

    def scores():
        tokens = sequences, attention_mask, action_mask
        log_probs, values = logprobs_of(reference, tokens, torch.ones(3)), values_of(critic, tokens)
        num_frames.append(graphs.frame_count)
        with torch.no_grad():
            rewards = reward(sequences, attention_mask)
        num_frames.append(graphs.frame_count)
        return torch.cat([log_probs.flatten(), values.flatten(), rewards])

    # Graphs are made as for a compiler, and run as they are: what is asked for here is no matter of machine code.
    graphs, num_frames = CompileCounter(), []
    before = scores()
    compile_module = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: compile_module(self, backend=graphs, **options))
    for model in (reference, critic, reward):
        compile_blocks(model)
    torch.testing.assert_close(scores(), before)
    num_of_one = num_frames[2]
    assert num_of_one > 0
    assert num_frames == [0, 0, num_of_one, num_of_one]  # the reward model found all of it made

    with torch.no_grad():  # as a maker commits an update: into the memory that is there
        for parameter in critic.parameters():
            parameter.mul_(1.5)
    after = scores()
    assert num_frames[-1] == num_of_one
    values = slice(12, 24)
    assert not torch.allclose(after[values], before[values], rtol=0.1)
    for block in critic.body.layers:
        block._compiled_call_impl = None
    torch.testing.assert_close(scores()[values], after[values])


def test_a_compiled_learner_gets_the_same_gradient_from_rows_with_one_prompt(monkeypatch):
    torch.manual_seed(0)
    actor = Actor.from_config(CONFIG).eval()
    sequences = torch.randint(1, 11, (3, 40))
    sequences[1:, :36] = sequences[0, :36]
    assert PackedRows.of(sequences, None).shared is not None

    def gradient():
        actor.zero_grad()
        action_logprobs(actor, sequences, None, 4)[0].square().sum().backward()
        return torch.cat([parameter.grad.flatten() for parameter in actor.parameters()])

    graphs, before = CompileCounter(), gradient()
    compile_module = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: compile_module(self, backend=graphs, **options))
    compile_blocks(actor)
    torch.testing.assert_close(gradient(), before)
    assert graphs.frame_count > 0


def test_blocks_that_learn_with_copies_of_their_weights_are_compiled_once(monkeypatch):
    torch.manual_seed(0)
    plain = Actor.from_config(CONFIG)
    compiled = copy.deepcopy(plain)
    graphs = CompileCounterWithBackend("aot_eager")
    compile_module = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: compile_module(self, backend=graphs, **options))
    for model in (plain, compiled):
        model.forward = CastWeights(model, torch.bfloat16)
    checkpoint_activations(compiled)
    compile_blocks(compiled)
    turn_off_dropout(compiled)
    sequences = torch.randint(1, 11, (3, 9))
    num_frames = []
    for _ in range(2):
        for model in (plain, compiled):
            log_probs, _ = action_logprobs(model, sequences, None, 4)
            log_probs.sum().backward()
        num_frames.append(graphs.frame_count)
        for weight, other in zip(plain.parameters(), compiled.parameters(), strict=True):
            assert weight.grad.dtype == other.grad.dtype == torch.float32
            assert torch.equal(weight.grad, other.grad)
            with torch.no_grad():  # new weights, in the memory that is there
                weight.mul_(1.25)
                other.mul_(1.25)
    assert 0 < num_frames[0] == num_frames[1]

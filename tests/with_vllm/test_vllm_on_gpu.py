"""vLLM on a GPU in bfloat16, where rounding can hide a small update from the canary."""

import pytest
import torch
from tiny import samples_of
from transformers import Qwen2Config, Qwen2ForCausalLM

from coati.config import LoRASettings
from coati.errors import WeightUpdateError
from coati.models import Actor
from coati.models.actor import action_logprobs
from coati.rollout import GenerateOptions, generate

pytest.importorskip("vllm")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

VOCAB = 1000
SETTINGS = {"gpu_memory_utilization": 0.2, "enforce_eager": True}


def policy(**options):
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.1, tie_word_embeddings=True,
    )  # fmt: skip
    return Actor(Qwen2ForCausalLM(config).to("cuda", torch.bfloat16), **options)


def request(**options):
    ids = torch.randint(2, VOCAB, (6, 5), generator=torch.Generator().manual_seed(0)).cuda()
    return samples_of(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        sample_ids=torch.arange(6),
        seed=1,
        options=GenerateOptions.parse(eos_token_id=[], pad_token_id=0, **options),
        max_new_tokens=24,
    )


@torch.no_grad()
def gap(model, rollout):
    forward = (rollout.sequences, rollout.attention_mask, rollout.action_mask.shape[1])
    return float((action_logprobs(model, *forward)[0] - rollout.action_log_probs).abs().mean())


@torch.no_grad()
def change_a_little(model):
    weight = next(parameter for name, parameter in model.named_parameters() if "down_proj" in name)
    weight[0, 0] += weight[0, 0].abs() * 0.05


@pytest.fixture
def engine(vllm_engine):
    return vllm_engine(policy(lora=LoRASettings(rank=4)), **SETTINGS)


def test_adapters_and_versions(engine):
    model = engine.model
    rollout = generate(engine, request(), version=3)
    assert gap(model, rollout) < 0.05
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    after = generate(engine, request(), version=4)
    assert gap(model, after) < 0.05
    assert gap(model, rollout) > 0.2
    assert after.policy_versions.unique().tolist() == [4]
    assert engine._keeps_bits


def test_a_small_update_that_does_not_arrive_is_noticed(engine, monkeypatch):
    generate(engine, request())
    change_a_little(engine.model)
    with monkeypatch.context() as patch:
        rpc = engine._engine.collective_rpc
        patch.setattr(
            engine._engine,
            "collective_rpc",
            lambda what, *a, **k: None if what == "reload_weights" else rpc(what, *a, **k),
        )
        with pytest.raises(WeightUpdateError, match="copied"):
            generate(engine, request())
    assert gap(engine.model, generate(engine, request())) < 0.05

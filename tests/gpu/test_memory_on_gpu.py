"""A nearly full GPU: passes are halved until they fit, and all other failures raise coati's errors."""

import contextlib
import gc
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

import coati
from coati.config import TrainSettings
from coati.errors import OutOfMemory
from coati.experience import Experience
from coati.experience_maker import NaiveExperienceMaker
from coati.models import Actor, Critic
from coati.trainer.ppo import PPOLearner
from coati.trainer.steps import LARGEST_PASS
from coati.trainer.strategies import DDPStrategy

CONFIG = LlamaConfig(
    hidden_size=512,
    intermediate_size=1408,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    vocab_size=2000,
    max_position_embeddings=1024,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
PROMPT, RESPONSE = 64, 192


def make_batch(num_samples=LARGEST_PASS // (PROMPT + RESPONSE), response=RESPONSE):
    generator = torch.Generator().manual_seed(0)
    shape = (num_samples, response)
    floats = [torch.randn(shape, generator=generator) for _ in range(3)]
    tokens = torch.randint(3, CONFIG.vocab_size, (num_samples, PROMPT + response), generator=generator)
    return Experience(
        sequences=tokens,
        action_log_probs=0.1 * floats[0] - 7.6,
        values=floats[1],
        reward=torch.zeros(num_samples),
        kl=torch.zeros(shape),
        advantages=floats[2],
        attention_mask=torch.ones_like(tokens),
        action_mask=torch.ones(shape, dtype=torch.bool),
    )


def make_models():
    torch.manual_seed(0)
    return (kind.from_config(CONFIG, dtype=torch.bfloat16) for kind in (Actor, Critic))


def make_learner(tokens):
    """A learner, and the gradients of its steps."""
    strategy = DDPStrategy(device="cuda")
    settings = TrainSettings(micro_batch_tokens=tokens, actor_lr=1e-3, critic_lr=1e-3)
    learner = PPOLearner(*make_models(), strategy, settings)
    gradients, clip = [], strategy.clip_grad_norm

    def clip_grad_norm(model, max_norm):
        gradients.append(torch.cat([parameter.grad.flatten().float().cpu() for parameter in model.parameters()]))
        return clip(model, max_norm)

    strategy.clip_grad_norm = clip_grad_norm
    return learner, gradients


def free_all():
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


@contextlib.contextmanager
def room_for(num_bytes, *, fill_gaps=False):
    """Fill the card but for so much memory; with `fill_gaps` also what is free between tensors, but for scraps."""
    free_all()
    free, _ = torch.cuda.mem_get_info()
    ballast = [torch.empty(free - int(num_bytes), dtype=torch.uint8, device="cuda")]
    with contextlib.suppress(torch.OutOfMemoryError):
        while fill_gaps:
            ballast.append(torch.empty(2**21, dtype=torch.uint8, device="cuda"))
    try:
        yield
    finally:
        ballast.clear()
        free_all()


def peak_of(tokens):
    """Bytes that the card has to have free for a step of such passes, its metrics and its gradients."""
    learner, gradients = make_learner(tokens)
    free_all()
    before = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    metrics = learner.step(make_batch())
    return torch.cuda.max_memory_reserved() - before, metrics, gradients


def test_a_pass_that_does_not_fit_is_halved_and_the_step_is_that_of_the_smaller_size(caplog):
    half = LARGEST_PASS // 2
    peak_of(half)  # libraries take their workspaces
    large, _, _ = peak_of(LARGEST_PASS)
    small, expected, theirs = peak_of(half)
    assert large > 1.5 * small > 2**30
    learner, ours = make_learner("auto")
    with room_for((small + large) / 2), caplog.at_level(logging.WARNING, logger="coati.trainer.steps"):
        metrics = learner.step(make_batch())
        assert metrics["train/micro_batch_tokens"] == half
        learner.step(make_batch())  # begins with what fits
    (warning,) = (record for record in caplog.records if record.name == "coati.trainer.steps")
    assert f"{LARGEST_PASS} tokens, ran out of memory" in warning.getMessage()
    assert len(theirs) == 2  # of the actor and the critic, once: not of the passes that failed
    assert len(ours) == 4
    for mine, other in zip(ours, theirs, strict=False):
        # Attention adds up gradients in any order, so not all bits are the same.
        assert float((mine - other).norm() / other.norm()) < 1e-2
    for name in ("policy/loss", "value/loss", "policy/entropy", "policy/grad_norm", "train/tokens"):
        assert metrics[name] == pytest.approx(expected[name], rel=1e-2, abs=1e-4), name


def test_a_single_sample_that_does_not_fit_is_an_error_with_the_memory_there_was():
    learner, _ = make_learner("auto")
    learner.step(make_batch(2))  # the optimizers have their state
    before = [parameter.detach().clone() for parameter in learner.actor.parameters()]
    message = r"over 1 samples, 960 tokens.*GiB held.*GiB free"
    with room_for(2**24, fill_gaps=True), pytest.raises(OutOfMemory, match=message):
        learner.step(make_batch(4, response=960 - PROMPT))
    assert all(map(torch.equal, before, learner.actor.parameters()))
    learner.step(make_batch(4))
    assert not all(map(torch.equal, before, learner.actor.parameters()))


@pytest.mark.parametrize("engine", ["native", "reference"])
def test_generation_and_placing_say_what_did_not_fit(engine):
    actor, critic = (model.to("cuda").eval() for model in make_models())
    reference = next(make_models()).to("cuda").eval()
    maker = NaiveExperienceMaker(actor, critic, lambda sequences, _: sequences[:, 0].float(), reference, engine=engine)
    prompts = torch.randint(3, CONFIG.vocab_size, (256, PROMPT))
    maker.make_experience(prompts[:2], max_new_tokens=4)
    with room_for(2**25):
        with pytest.raises(OutOfMemory, match=r"generating 256 responses.*rollout\.prompts_per_batch"):
            maker.make_experience(prompts, max_new_tokens=900)
        with pytest.raises(OutOfMemory, match="placing models on cuda"):
            DDPStrategy(device="cuda").prepare(torch.nn.Linear(8192, 8192, dtype=torch.bfloat16))
    maker.make_experience(prompts[:2], max_new_tokens=4)


def test_a_broken_card_is_an_error_of_ours():
    # In a process of its own: no process can use the card after it.
    program = """
import torch
from coati.errors import AcceleratorFailed
from coati.devices import device_errors_explained
try:
    with device_errors_explained("looking a token up", "None."):
        torch.nn.functional.embedding(torch.tensor([9], device="cuda"), torch.ones(4, 4, device="cuda")).sum().item()
except AcceleratorFailed as error:
    print("ours:", error)
"""
    env = {**os.environ, "PYTHONPATH": str(Path(coati.__file__).parents[1])}
    result = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert "ours: looking a token up failed on the GPU" in result.stdout, result.stderr[-2000:]

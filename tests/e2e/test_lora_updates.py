"""A thousand LoRA updates, some torn, late or merged: the model always equals its base plus the last delta."""

import copy
import random

import pytest
import tiny
import torch
from torch import nn
from transformers import LlamaConfig
from weight_testing import Maker, deliver, header_of, messages_of

from coati.errors import WeightUpdateError
from coati.models import Actor, LoRASettings
from coati.models.lora import plain_name

NUM_UPDATES = 1000
# The smallest models that have everything: some layers with adapters, some frozen, and a critic trained as it is.
CONFIG = LlamaConfig(
    hidden_size=4,
    intermediate_size=4,
    num_hidden_layers=1,
    num_attention_heads=1,
    num_key_value_heads=1,
    vocab_size=8,
    max_position_embeddings=8,
    initializer_range=0.5,
)
LORA = LoRASettings(rank=2, alpha=3.0, target_modules=("q_proj", "down_proj"))


def models_with_adapters(seed=0):
    torch.manual_seed(seed)
    return {"actor": Actor.from_config(CONFIG, lora=LORA), "critic": nn.Linear(4, 1)}


def without_adapters(models):
    actor = Actor(tiny.copy_without_adapters(models["actor"].model))
    return {"actor": actor, "critic": copy.deepcopy(models["critic"])}


def trainable(models):
    return {
        (label, name): parameter
        for label, model in models.items()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def state_of(models):
    return {
        (label, name): tensor.detach().clone()
        for label, model in models.items()
        for name, tensor in model.state_dict().items()
    }


class Sender:
    """A trainer whose trainable weights are drawn again for each version."""

    def __init__(self, models, source="trainer"):
        self._models, self._source = models, source

    @torch.no_grad()
    def train(self, seed):
        generator = torch.Generator().manual_seed(seed)
        for parameter in trainable(self._models).values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def update(self, version, *, is_full=False):
        """One update, as a copy: what is on its way does not change with the trainer."""
        header = header_of(version, self._source)
        return messages_of(self._models, header=header, is_full=is_full, max_bytes=64)


def assert_base_plus_delta(maker, base, last):
    """Every weight of the maker is what the formula says, to 1e-6; `last` are the trainable weights sent last."""
    deltas = {}
    for (label, name), a in last.items():
        if ".lora_A." in name:
            b = last[label, name.replace(".lora_A.", ".lora_B.")]
            scale = LORA.alpha / LORA.rank
            deltas[label, plain_name(name.split("lora_A")[0]) + "weight"] = scale * b.double() @ a.double()
    assert len(deltas) == 2
    others = {(label, plain_name(name)): tensor for (label, name), tensor in last.items() if ".lora_" not in name}
    served = state_of(maker.models)
    has_adapters = any(".lora_A." in name for _, name in served)
    for (label, name), tensor in served.items():
        if ".lora_" in name:
            assert torch.equal(tensor, last[label, name]), name
            continue
        key = (label, plain_name(name))
        expected = others.get(key, base[key]).double()
        if key in deltas and not has_adapters:
            expected = expected + deltas[key]
        assert (tensor.double() - expected).abs().max() <= 1e-6, name


def test_a_thousand_adapter_updates_leave_base_plus_the_last_delta():
    trainer = models_with_adapters()
    sender = Sender(trainer)
    plain = without_adapters(trainer)
    base = state_of(plain)
    makers = [Maker(plain), Maker(models_with_adapters())]
    dice = random.Random(7)
    num_rejected = num_merged = num_late = 0
    for version in range(1, NUM_UPDATES + 1):
        sender.train(version)
        sent = sender.update(version, is_full=version % 250 == 0)
        assert len(sent.chunks) > 2
        last_good = version == NUM_UPDATES
        fate = 1.0 if last_good else dice.random()
        for maker in makers:
            if fate < 0.1:
                num_rejected += 1
                torn = [chunk for chunk in sent.chunks if chunk.index != version % 3]
                with pytest.raises(WeightUpdateError, match=f"first: {version % 3}"):
                    deliver(sent._replace(chunks=torn), maker)
            elif fate < 0.2:
                num_merged += 1
                with maker.served.use():  # two updates wait for a batch to end: the same one, sent twice
                    deliver(sent, maker)
                    deliver(sent, maker)
            else:
                deliver(sent, maker)
                assert maker.served.version == version
            if fate > 0.95 and maker.served.version == version:
                num_late += 1
                deliver(sender.update(version - 1), maker)  # old weights
    last = {key: parameter.detach() for key, parameter in trainable(trainer).items()}
    for maker in makers:
        assert maker.served.version == NUM_UPDATES
        assert_base_plus_delta(maker, base, last)
    assert min(num_rejected, num_merged, num_late) > 50


@pytest.mark.parametrize("has_adapters", [True, False], ids=["a maker with adapters", "a maker without adapters"])
def test_weights_that_come_too_late_do_not_become_the_base(has_adapters):
    trainer = models_with_adapters()
    sender = Sender(trainer)
    base = state_of(without_adapters(trainer))
    maker = Maker(models_with_adapters() if has_adapters else without_adapters(trainer))
    sender.train(1)
    deliver(sender.update(5, is_full=True), maker)
    other = Sender(models_with_adapters(seed=1), source="another trainer")
    deliver(other.update(3, is_full=True), maker)
    assert maker.served.version == 5
    sender.train(2)
    deliver(sender.update(6), maker)
    assert_base_plus_delta(maker, base, {key: parameter.detach() for key, parameter in trainable(trainer).items()})

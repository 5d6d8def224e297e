"""Environment variables and arguments of strategies."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from coati.errors import ConfigError
from coati.trainer.strategies import DDPStrategy, LowLevelZeroStrategy
from coati.trainer.strategies.layouts import transformer_blocks
from coati.trainer.strategies.ranks import RankInfo

FIVE = {"RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "2950"}


def test_no_variables_mean_one_process():
    assert RankInfo.from_env({}) == RankInfo(rank=0, local_rank=0, world_size=1)


def test_all_five_variables_are_read():
    assert RankInfo.from_env(FIVE) == RankInfo(rank=1, local_rank=0, world_size=2, rendezvous="10.0.0.7:2950")


@pytest.mark.parametrize(
    "change",
    [
        *({key: ""} for key in FIVE),
        {"RANK": "2"},
        {"RANK": "-1"},
        {"WORLD_SIZE": "0"},
        {"LOCAL_RANK": "-3"},
        {"MASTER_PORT": "http"},
    ],
)
def test_some_of_the_variables_or_bad_ones_are_refused_and_shown(change):
    with pytest.raises(ConfigError, match="all of RANK") as caught:
        RankInfo.from_env({**FIVE, **change})
    ((key, value),) = change.items()
    assert (f"'{key}': '{value}'" in str(caught.value)) == bool(value)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: DDPStrategy(timeout_seconds=0), "timeout_seconds must be positive and finite, got 0"),
        (lambda: DDPStrategy(timeout_seconds=float("inf")), "timeout_seconds"),
        (
            lambda: DDPStrategy(compute_dtype=torch.float16),
            "compute_dtype must be torch.bfloat16 or None, got torch.float16",
        ),
        (lambda: LowLevelZeroStrategy(stage=3), "stage must be 1 or 2, got 3.*GeminiStrategy"),
    ],
)
def test_bad_arguments(build, message):
    with pytest.raises(ConfigError, match=message):
        build()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_requesting_cuda_without_cuda_is_a_clear_error():
    with pytest.raises(ConfigError, match="'cuda:1' needs CUDA"):
        DDPStrategy(device="cuda:1")


def test_the_seed_reaches_every_generator():
    def draws(seed):
        DDPStrategy(seed, device="cpu")
        return random.random(), np.random.rand(), torch.rand(1).item()

    assert draws(7) == draws(7)
    assert all(a != b for a, b in zip(draws(7), draws(8), strict=True))


def test_one_rank_does_not_communicate():
    strategy = DDPStrategy(device="cpu")
    tensor = torch.tensor([2.0])
    assert strategy.all_reduce_sum(tensor) is tensor
    assert (strategy.rank, strategy.world_size, strategy.device) == (0, 1, torch.device("cpu"))


def test_blocks_are_the_outermost_repeated_modules():
    experts = [nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)]) for _ in range(2)]
    layers = nn.ModuleList([nn.ModuleDict({"experts": expert}) for expert in experts])
    heads = nn.ModuleList([nn.Linear(1, 1), nn.Tanh()])  # of different classes
    model = nn.ModuleDict({"body": nn.ModuleDict({"layers": layers}), "heads": heads})
    assert list(transformer_blocks(model)) == list(layers)

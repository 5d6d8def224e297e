"""vLLM, held to the protocol of all engines."""

import pytest
from engine_protocol import *  # noqa: F403
from engine_protocol import PLACES
from tiny import llama

pytest.importorskip("vllm")

WIDE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}  # heads as vLLM has them on a CPU


@pytest.fixture
def policy():
    return lambda seed: llama(seed, num_hidden_layers=2, initializer_range=0.2, **WIDE)


@pytest.fixture
def make_engine(vllm_engine):
    return lambda model, **settings: vllm_engine(model, max_num_seqs=PLACES, **settings)

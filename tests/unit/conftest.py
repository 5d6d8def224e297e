"""Models small enough to check by hand: 11 tokens, 16 dimensions, one or two layers, seeded."""

import pytest
import torch

from coati.cpu import set_up_cpu

VOCABULARY = 11


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    set_up_cpu(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def llama_config():
    from transformers import LlamaConfig  # here, so that tests of pure maths start without it

    def make(**changes):
        settings = {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 64,
            "initializer_range": 0.5,  # far from uniform, so that wrong tokens have clearly wrong log-probs
            "bos_token_id": None,
            "eos_token_id": 2,
            "pad_token_id": 0,
        }
        return LlamaConfig(**{**settings, **changes})

    return make


@pytest.fixture
def gpt2_config():
    from transformers import GPT2Config

    def make(**changes):
        settings = {
            "n_embd": 16,
            "n_layer": 1,
            "n_head": 2,
            "vocab_size": VOCABULARY,
            "n_positions": 64,
            "initializer_range": 0.5,
            "bos_token_id": None,
            "eos_token_id": 2,
            "pad_token_id": 0,
        }
        return GPT2Config(**{**settings, **changes})

    return make


@pytest.fixture
def llama(llama_config):
    from transformers import LlamaForCausalLM

    def make(seed=0, **changes):
        torch.manual_seed(seed)
        return LlamaForCausalLM(llama_config(**changes)).eval()

    return make


@pytest.fixture
def gpt2(gpt2_config):
    from transformers import GPT2LMHeadModel

    def make(seed=0, **changes):
        torch.manual_seed(seed)
        return GPT2LMHeadModel(gpt2_config(**changes)).eval()

    return make


@pytest.fixture
def joined(monkeypatch):
    """The batches whose rows were joined end to end since."""
    from coati.models.packing import PackedRows

    batches, join = [], PackedRows._of.__func__
    monkeypatch.setattr(PackedRows, "_of", classmethod(lambda cls, *rows: (batches.append(rows), join(cls, *rows))[1]))
    return batches

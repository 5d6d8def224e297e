"""The vLLM engine without vLLM installed; tests/with_vllm need it."""

import sys

import pytest
import torch
from tiny import llama, samples_of

from coati.config import RolloutSettings
from coati.errors import ConfigError
from coati.rollout import GenerateOptions, VllmEngine, generate, make_engine


def test_missing_vllm_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_KVCACHE_SPACE"):
        monkeypatch.setenv(name, "1")  # so that monkeypatch restores them
    engine = make_engine(RolloutSettings(engine="vllm", vllm={"max_num_seqs": 4}), llama())
    assert isinstance(engine, VllmEngine)
    ids = torch.ones(1, 3, dtype=torch.long)
    request = samples_of(
        input_ids=ids,
        attention_mask=ids,
        sample_ids=torch.arange(1),
        seed=0,
        options=GenerateOptions(),
        max_new_tokens=1,
    )
    with pytest.raises(ConfigError, match=r"coati\[vllm\]"):
        generate(engine, request)

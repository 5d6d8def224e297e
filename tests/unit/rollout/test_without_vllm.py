"""The vLLM engine without vLLM installed; tests/with_vllm need it."""

import sys
from types import SimpleNamespace

import pytest
import torch
from tiny import llama, samples_of

from coati.config import RolloutSettings
from coati.errors import ConfigError
from coati.experience import Sample
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
    with pytest.raises(ConfigError, match=r"pip install '\.\[vllm\]'"):
        generate(engine, request)


def test_cancelling_other_samples_does_not_strand_one_that_waits_for_the_canary() -> None:
    engine = VllmEngine(llama())
    canary = SimpleNamespace(
        request_id="canary-1", prompt_token_ids=[3, 4], prompt_logprobs=[None, {4: SimpleNamespace(logprob=-1.0)}]
    )
    engine._engine = SimpleNamespace(step=lambda: [canary], abort_request=lambda _names: None)
    engine._canaries["canary-1"] = torch.tensor([-1.0])
    finished = Sample(0, [3, 4])
    engine._ended.append(finished)
    engine.cancel([1])
    assert engine.advance() == [finished]

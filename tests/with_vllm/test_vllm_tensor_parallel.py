"""vLLM in two worker processes, each with half of every layer: the protocol of all engines, updates, and what fails."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from engine_protocol import *  # noqa: F403
from engine_protocol import PLACES, PROMPTS, assert_exact, finish, request_of
from tiny import llama

from coati.config import LoRASettings
from coati.errors import EngineFailed, WeightUpdateError
from coati.models import Actor
from coati.rollout import vllm as vllm_module

pytest.importorskip("vllm")

SETTINGS = {"tensor_parallel_size": 2, "worker_extension_cls": "keep_vllm_bits.KeepBits"}
WIDE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 40}  # the first has 32
MAKER = """
import time
import test_vllm_tensor_parallel as tests
from coati.rollout import VllmEngine

if __name__ == "__main__":
    engine = VllmEngine(tests.make_policy(0), max_num_seqs=tests.PLACES, **tests.SETTINGS)
    tests.write(engine)
    print("ready", flush=True)
    time.sleep(600)
"""


def make_policy(seed):
    return llama(seed, num_hidden_layers=2, initializer_range=0.2, max_position_embeddings=512, **WIDE)


@pytest.fixture
def policy():
    return make_policy


@pytest.fixture
def make_engine(vllm_engine):
    return lambda model, **settings: vllm_engine(model, max_num_seqs=PLACES, **SETTINGS, **settings)


def write(engine):
    engine.submit(request_of(range(len(PROMPTS))))
    return finish(engine, len(PROMPTS))


def shared_files(processes):
    """The files in shared memory that these processes use."""
    maps = "".join(Path(f"/proc/{process.pid}/maps").read_text() for process in processes)
    return {file for file in map(Path, re.findall(r"/dev/shm/\S+", maps)) if file.exists()}


def wait_until_gone(processes, files):
    assert psutil.wait_procs(processes, timeout=60)[1] == []
    deadline = time.monotonic() + 30
    while left := [file for file in files if file.exists()]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


@pytest.mark.parametrize("chunk_bytes", [10_000, 2**28])  # less than a layer; everything
def test_adapters_are_merged_into_the_shards(make_engine, monkeypatch, chunk_bytes):
    monkeypatch.setattr("coati.rollout.vllm._CHUNK_BYTES", chunk_bytes)
    actor = Actor(make_policy(0), lora=LoRASettings(rank=4))
    engine = make_engine(actor)
    for version in range(2):
        for one, response in write(engine).items():
            assert_exact(actor, PROMPTS[one], response)
        assert engine._keeps_bits
        with torch.no_grad():
            for name, parameter in actor.named_parameters():
                if "lora_" in name:
                    parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.3)
        engine.commit(version + 1)


def test_a_weight_that_does_not_arrive_is_noticed_by_its_bits(make_engine, monkeypatch):
    model = make_policy(0)
    engine = make_engine(model)
    write(engine)
    in_chunks = vllm_module.in_chunks
    # Split by rows, by columns, not at all, and by tokens.
    for name in ("layers.1.self_attn.q_proj", "layers.0.mlp.down_proj", "layers.1.input_layernorm", "embed_tokens"):
        weight = model.get_parameter(f"model.{name}.weight")
        old = weight.detach().clone()
        with torch.no_grad():
            weight.view(-1)[-1] += 1e-6  # the canary cannot tell it from rounding

        def without(weights, max_bytes, name=name, old=old):
            return in_chunks(((one, old if name in one else tensor) for one, tensor in weights), max_bytes)

        with monkeypatch.context() as patch:
            patch.setattr(vllm_module, "in_chunks", without)
            with pytest.raises(WeightUpdateError, match="copied"):
                write(engine)
        engine.cancel(range(len(PROMPTS)))
    for one, response in write(engine).items():
        assert_exact(model, PROMPTS[one], response)


def test_a_worker_that_dies_is_an_error(make_engine):
    engine = make_engine(make_policy(0))
    engine.submit(request_of(range(3), eos_token_id=[]))
    engine.advance()
    workers = [psutil.Process(worker.proc.pid) for worker in engine._engine.model_executor.workers]
    workers[1].kill()
    begun = time.monotonic()
    with pytest.raises(EngineFailed, match="worker process"):
        finish(engine, 3)
    assert time.monotonic() - begun < 60
    wait_until_gone(workers, [])
    engine.cancel(range(3))
    with pytest.raises(EngineFailed):
        write(engine)


def test_nothing_is_left_of_a_maker_that_is_killed(tmp_path):
    (tmp_path / "maker.py").write_text(MAKER)
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])
    maker = subprocess.Popen(
        [sys.executable, "maker.py"], cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE
    )
    try:
        assert any(line == b"ready\n" for line in maker.stdout)
        children = psutil.Process(maker.pid).children()
        workers = [child for child in children if "Worker_TP" in child.name()]
        files = shared_files(workers)
        assert len(workers) == 2
        assert files
        for child in children:
            if child not in workers:
                child.kill()  # Python's own tracker of shared memory: Ray ends it, too
    finally:
        maker.kill()
        maker.wait()
    wait_until_gone(workers, files)

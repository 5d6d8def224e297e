"""The vLLM engine without vLLM installed; tests/with_vllm need it."""

import sys
from types import SimpleNamespace

import pytest
import torch
from tiny import llama, samples_of

from coati.config import RolloutSettings
from coati.errors import ConfigError, EngineFailed
from coati.experience import Sample
from coati.rollout import GenerateOptions, VllmEngine, generate, make_engine
from coati.rollout import vllm as vllm_module


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


class Workers:
    """Two workers behind vLLM's interface; `fails` maps the name of a call to what it raises."""

    def __init__(self, fails: dict[str, Exception], *, is_alive: bool = True) -> None:
        self.fails, self.calls, self.is_stopped = fails, [], False
        process = SimpleNamespace(is_alive=lambda: is_alive and not self.is_stopped)
        self.model_executor = SimpleNamespace(workers=[SimpleNamespace(proc=process)] * 2)
        self.engine_core = SimpleNamespace(shutdown=self.stop)

    def stop(self) -> None:
        self.is_stopped = True

    def step(self) -> list[object]:
        return self._called("step")

    def collective_rpc(self, function, **_arguments) -> list[object]:
        return self._called(function.__name__)

    def _called(self, name: str) -> list[object]:
        self.calls.append(name)
        if name in self.fails:
            raise self.fails[name]
        return []


def engine_with(workers: Workers) -> VllmEngine:
    engine = VllmEngine(llama(), tensor_parallel_size=2)
    engine._engine = workers
    engine._canaries["canary-1"] = torch.tensor([-1.0])  # so that there is something to do
    return engine


@pytest.mark.parametrize(
    ("error", "is_alive"),
    [
        (RuntimeError("Worker failed with error 'no such layer'"), True),
        (TimeoutError("RPC call to step timed out."), True),
        (AttributeError("'NoneType' object has no attribute 'enqueue'"), False),  # vLLM had stopped the other worker
    ],
)
@pytest.mark.parametrize("call", ["step", "begin_update", "load_chunk", "end_update", "sums_of_bits"])
def test_an_error_of_a_worker_or_its_absence_ends_the_engine(call, error, is_alive) -> None:
    workers = Workers({call: error}, is_alive=is_alive)
    engine = engine_with(workers)
    with pytest.raises(EngineFailed, match="worker process of vLLM") as failure:
        engine.advance() if call == "step" else engine._copy_weights([1, 2, 3])
    assert failure.value.__cause__ is error
    assert workers.calls[-1] == call
    assert workers.is_stopped


@pytest.mark.parametrize("place", ["_merged_weights", "specs_of", "copy_all", "sum_of_bits"])
@pytest.mark.parametrize("error", [RuntimeError("of torch"), TimeoutError("of a disk")])
def test_an_error_while_weights_are_prepared_is_not_blamed_on_the_workers(monkeypatch, place, error) -> None:
    def fail(*_arguments):
        raise error

    workers = Workers({})
    engine = engine_with(workers)
    monkeypatch.setattr(vllm_module, place, fail)
    with pytest.raises(type(error)) as failure:
        engine._copy_weights([1, 2, 3])
    assert failure.value is error
    assert not workers.is_stopped


def test_an_error_of_the_scheduler_is_not_blamed_on_workers_that_run() -> None:
    error = KeyError("no such request")
    workers = Workers({"step": error})
    with pytest.raises(KeyError) as failure:
        engine_with(workers).advance()
    assert failure.value is error
    assert not workers.is_stopped

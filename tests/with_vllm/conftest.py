"""Engines for these tests, one at a time: vLLM's engines share state of the process, which ends with any of them."""

import gc

import pytest

from coati.rollout import VllmEngine


@pytest.fixture(scope="module")
def vllm_engine():
    """`vllm_engine(model, **settings)`: makes an engine, and ends the one before."""
    made = []

    def end():
        if made and (vllm := made.pop()._engine) is not None:
            vllm.engine_core.shutdown()
        gc.collect()

    def make(model, **settings):
        end()
        made.append(VllmEngine(model, **settings))
        return made[0]

    yield make
    end()

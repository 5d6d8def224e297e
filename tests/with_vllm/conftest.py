"""vLLM engines for these tests, one at a time, because they share process state that ends with any of them."""

import gc

import pytest

from coati.models.actor import unwrap
from coati.models.packing import base_of
from coati.rollout import VllmEngine


@pytest.fixture(scope="session")
def vllm_engine():
    """`vllm_engine(model, **settings)` makes an engine; the one before must not be used any more.

    Starting vLLM takes most of the time of these tests. Engines for models of one shape use the same vLLM: it stops
    what it was writing and forgets its prompts, and the new engine, which knows nothing of it, copies its own weights.
    """
    start, running, made = VllmEngine._new_engine, {}, []

    def started(engine):
        shape = repr((base_of(unwrap(engine.model)).config.to_dict(), engine._settings))
        if shape not in running:
            end()
            running[shape] = start(engine), engine  # whose end would be that of its workers
        return running[shape][0]

    def end():
        while running:
            running.popitem()[1][0].engine_core.shutdown()
        gc.collect()

    def make(model, **settings):
        if made and (last := made.pop())._engine is not None:
            last.cancel([written.sample.id for written in last._writing.values()])
            assert last._engine.reset_prefix_cache()
        made.append(VllmEngine(model, **settings))
        return made[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VllmEngine, "_new_engine", started)
        yield make
    end()

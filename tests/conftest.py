"""For all tests: which run first, how many examples they try, and a garbage collector that skips what imports left."""

import contextlib
import gc

with contextlib.suppress(ImportError):  # tests/gpu runs without it
    from hypothesis import settings

    settings.register_profile("quick", max_examples=20, deadline=None)
    settings.register_profile("long", max_examples=300, deadline=None)  # make test-long
    settings.load_profile("quick")

gc.set_threshold(50_000, 20, 100)

# Slow folders first, so that the workers of `pytest -n` end together.
ORDER = ("e2e", "ray", "ranks", "gpu", "unit")


def pytest_collection_modifyitems(config, items):
    here = config.rootpath / "tests"
    items.sort(key=lambda item: ORDER.index(item.path.relative_to(here).parts[0]))


def pytest_collection_finish():
    gc.collect()
    gc.freeze()

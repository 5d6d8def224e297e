"""For all tests: which run first, and a garbage collector that passes over what imports have left."""

import gc

gc.set_threshold(50_000, 20, 100)

# Slow folders first, so that the workers of `pytest -n` end together.
ORDER = ("e2e", "ray", "ranks", "gpu", "unit")


def pytest_collection_modifyitems(config, items):
    here = config.rootpath / "tests"
    items.sort(key=lambda item: ORDER.index(item.path.relative_to(here).parts[0]))


def pytest_collection_finish():
    gc.collect()
    gc.freeze()

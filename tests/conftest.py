"""For all tests: the garbage collector passes over what imports have left, which no test makes garbage of."""

import gc

gc.set_threshold(50_000, 20, 100)


def pytest_collection_finish():
    gc.collect()
    gc.freeze()

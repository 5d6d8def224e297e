import doctest
import importlib
import inspect

import pytest

MODULES = ["advantages", "importance", "logprobs", "losses", "masked"]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_run(name):
    result = doctest.testmod(importlib.import_module(f"coati.algos.{name}"))
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize("name", MODULES)
def test_public_functions_are_documented(name):
    module = importlib.import_module(f"coati.algos.{name}")
    public = [
        thing
        for label, thing in vars(module).items()
        if inspect.isfunction(thing) and thing.__module__ == module.__name__ and not label.startswith("_")
    ]
    assert public
    assert all(thing.__doc__ for thing in public)

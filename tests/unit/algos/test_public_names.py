import doctest
import importlib
from typing import Literal, get_origin

import pytest

import coati.algos


@pytest.mark.parametrize(
    "name",
    [
        "advantages",
        "importance",
        "kl",
        "logprobs",
        "losses",
        "masked",
    ],
)
def test_docstring_examples_run(name):
    result = doctest.testmod(importlib.import_module(f"coati.algos.{name}"))
    assert result.attempted > 0
    assert result.failed == 0


def test_all_names_exist_and_are_documented():
    for name in coati.algos.__all__:
        thing = getattr(coati.algos, name)
        # A Literal is an alias, which has no docstring of its own.
        assert get_origin(thing) is Literal or thing.__doc__, name

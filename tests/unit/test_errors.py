"""Errors pickle, so that they can cross process boundaries, and keep their type, message and notes."""

import inspect
import pickle

import pytest

from coati import errors
from coati.config import Deadlines
from coati.errors import CoatiError, ConfigError
from coati.experience_maker import AllSamplesDropped

DEFINED = [value for _, value in inspect.getmembers(errors, inspect.isclass) if value.__module__ == errors.__name__]
CLASSES = [*DEFINED, AllSamplesDropped]


def test_all_errors_have_one_base_class():
    assert len(CLASSES) > 8
    assert all(issubclass(error_class, CoatiError) for error_class in CLASSES)


@pytest.mark.parametrize("error_class", CLASSES, ids=lambda error_class: error_class.__name__)
def test_an_error_survives_pickling_with_its_message_notes_and_type(error_class):
    error = error_class("train.batch_size must be 1 or more, got 0. Use 16.")
    error.add_note("raised in maker-0")
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is error_class
    assert str(back) == "train.batch_size must be 1 or more, got 0. Use 16."
    assert back.__notes__ == ["raised in maker-0"]


@pytest.mark.parametrize(
    ("error_class", "builtin"),
    [
        (errors.ConfigError, ValueError),
        (errors.DataError, ValueError),
        (errors.GenerateOptionError, TypeError),
        (errors.DeadlineExceeded, TimeoutError),
        (errors.ActorNotFound, LookupError),
        (errors.RewardError, RuntimeError),
    ],
)
def test_errors_are_subclasses_of_builtin_exceptions(error_class, builtin):
    assert issubclass(error_class, builtin)


@pytest.mark.parametrize("name", ["start_seconds", "batch_seconds", "update_seconds", "grace_seconds"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_deadlines_must_be_positive_and_finite(name, value):
    with pytest.raises(ConfigError, match=rf"deadlines\.{name} must be (greater than 0|a finite number)"):
        Deadlines(**{name: value})

"""Calls beside their caller, and in turn."""

import threading

import pytest

from coati.beside import InTurn

SECONDS = 30


def test_a_call_begins_when_the_one_before_has_ended():
    in_turn, may_end, second_called = InTurn(), threading.Event(), threading.Event()
    first = in_turn.run(lambda: may_end.wait(SECONDS), name="first")
    second = in_turn.run(second_called.set, name="second")
    assert not second_called.wait(0.01)  # in vain, however long
    assert not first.done()
    may_end.set()
    second.result(timeout=SECONDS)
    assert first.result(timeout=0)
    assert second_called.is_set()


def fail():
    raise ZeroDivisionError("of nothing")


def test_a_failure_takes_along_what_came_before_it_was_known():
    in_turn, called = InTurn(), []
    first = in_turn.run(fail, name="first")
    second = in_turn.run(lambda: called.append(2), name="second")
    for future in (first, second):
        with pytest.raises(ZeroDivisionError, match="of nothing"):
            future.result(timeout=SECONDS)
    assert called == []


def test_a_failure_that_somebody_has_seen_is_over():
    in_turn = InTurn()
    first = in_turn.run(fail, name="first")
    assert isinstance(first.exception(timeout=SECONDS), ZeroDivisionError)
    in_turn.has_seen(first)
    assert in_turn.run(lambda: 7, name="second").result(timeout=SECONDS) == 7

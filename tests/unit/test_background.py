"""Background calls run in the order of submission."""

import copy
import doctest
import threading

import pytest

from coati import background
from coati.background import BackgroundThread, run_in_background

SECONDS = 30


def test_docstring_examples_run():
    result = doctest.testmod(background)
    assert result.attempted > 0
    assert result.failed == 0


def fail():
    raise ZeroDivisionError("of nothing")


def test_calls_run_in_order_on_one_thread():
    worker, may_end, order = BackgroundThread(name="worker"), threading.Event(), []
    first = worker.run(lambda: (may_end.wait(SECONDS), order.append(1)))
    second = worker.run(lambda: order.append(2))
    assert not second.done()
    may_end.set()
    second.result(timeout=SECONDS)
    assert first.done()
    assert order == [1, 2]
    assert len({worker.run(threading.get_ident).result(timeout=SECONDS) for _ in range(3)}) == 1


def test_an_error_is_raised_by_result_and_later_calls_still_run():
    worker = BackgroundThread(name="worker")
    with pytest.raises(ZeroDivisionError):
        worker.run(fail).result(timeout=SECONDS)
    assert worker.run(lambda: 7).result(timeout=SECONDS) == 7
    with pytest.raises(ZeroDivisionError):
        run_in_background(fail, name="once").result(timeout=SECONDS)


def test_closing_ends_the_thread_after_its_calls():
    worker = BackgroundThread(name="worker")
    threads = [worker.run(threading.current_thread), worker.run(threading.current_thread)]
    worker.close()
    first, second = (one.result(timeout=SECONDS) for one in threads)
    assert first is second
    first.join(SECONDS)
    assert not first.is_alive()


def test_a_hundred_calls_start_one_thread(monkeypatch):
    started, start = [], threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda self: (started.append(self), start(self)))
    worker = BackgroundThread(name="worker")
    for _ in range(100):
        worker.run(int).result(timeout=SECONDS)
    assert len(started) == 1


def test_a_copy_has_its_own_thread():
    worker = BackgroundThread(name="worker")
    idents = {one.run(threading.get_ident).result(timeout=SECONDS) for one in (worker, copy.deepcopy(worker))}
    assert len(idents) == 2

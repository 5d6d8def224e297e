"""The loader of a maker, exchanged between two batches."""

import threading
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from coati.background import run_in_background
from coati.errors import DataError, DeadlineExceeded
from coati.prompts import source as source_module
from coati.prompts.source import PromptSource


def test_passes_and_steps():
    assert list(PromptSource("m").batches(lambda: [1, 2], num_epochs=2)) == [1, 2, 1, 2]
    assert list(PromptSource("m").batches(lambda: [1, 2], num_steps=3)) == [1, 2, 1]
    with pytest.raises(DataError, match=r"dataloader_fn.* maker m"):
        list(PromptSource("m").batches(list))


def test_it_returns_the_first_position_that_was_not_drawn():
    source = PromptSource("m")
    batches = source.batches(lambda: [{"group_ids": torch.tensor([6, 2])}, {"group_ids": [4]}, torch.zeros(1)])
    assert source.hold() == 0
    source.switch(None)
    positions = []
    for _ in batches:
        positions.append(source.hold())
        source.switch(None)
    assert positions == [7, 7, 7]


class Loader(list):
    """Batches, of which two prompts were skipped."""

    def __init__(self, batches):
        super().__init__(batches)
        self.skipped = Counter({"no tokens": 2})


def test_what_was_skipped_adds_up_over_loaders():
    source = PromptSource("m")
    batches = source.batches(lambda: Loader([1, 2]))
    next(batches)
    assert source.skipped == {"no tokens": 2}
    source.switch(lambda: Loader([3]))
    assert list(batches) == [3]
    assert source.skipped == {"no tokens": 4}


def test_while_a_loader_is_made_the_one_before_counts_once():
    seen = []

    def make_loader():
        seen.append(source.skipped["no tokens"])
        return Loader([1])

    source = PromptSource("m")
    assert list(source.batches(make_loader, num_epochs=3)) == [1, 1, 1]
    assert seen == [0, 2, 4]


def test_what_was_skipped_can_be_asked_while_a_batch_is_drawn():
    asked, drawn = threading.Event(), threading.Event()

    def loader():
        drawn.set()
        yield asked.wait(60)

    source, got = PromptSource("m"), []
    thread = threading.Thread(target=lambda: got.extend(source.batches(loader)))
    thread.start()
    assert drawn.wait(60)
    assert source.skipped == {}
    asked.set()
    thread.join(timeout=60)
    assert got == [True]


def test_nothing_is_drawn_while_it_is_held():
    drawn = []

    def loader():
        for number in range(4):
            drawn.append(number)
            yield number

    source = PromptSource("m")
    batches = source.batches(loader)
    assert next(batches) == 0
    source.hold()
    got = []
    thread = threading.Thread(target=lambda: got.append(next(batches)))
    thread.start()
    source._changed.acquire()  # what the thread draws under
    assert drawn == [0]
    source._changed.release()
    source.switch(lambda: [70])
    thread.join(timeout=60)
    assert got == [70]
    assert drawn == [0], "the rest of the old loader belongs to other makers"


def test_a_stop_ends_the_wait_and_so_does_the_deadline(monkeypatch):
    monkeypatch.setattr("coati.prompts.source._SLICE_SECONDS", 0.001)
    stop = SimpleNamespace(is_set=False)
    source = PromptSource("m", deadline_seconds=0.002, should_stop=lambda: stop.is_set)
    batches = source.batches(lambda: [1])
    source.hold()
    with pytest.raises(DeadlineExceeded, match=r"maker m .*0\.002 s"):
        next(batches)
    stop.is_set = True
    assert list(source.batches(lambda: [1])) == []


def test_a_loader_that_hangs_is_not_held_and_the_caller_gets_an_error(monkeypatch):
    monkeypatch.setattr(source_module, "_HOLD_SECONDS", 0.02)
    asked, answers = threading.Event(), threading.Event()

    def loader():
        asked.set()
        answers.wait(30)
        yield {"group_ids": [4]}
        yield {"group_ids": [5]}

    source = PromptSource("maker-0")
    batches = source.batches(loader)
    drawn = run_in_background(lambda: next(batches), name="draw")
    asked.wait(30)
    with pytest.raises(DeadlineExceeded, match=r"maker-0.*0\.02 s"):
        source.hold()
    answers.set()
    assert drawn.result(timeout=30) == {"group_ids": [4]}
    again = run_in_background(lambda: next(batches), name="draw")
    assert again.result(timeout=10) == {"group_ids": [5]}  # it is not held
    assert source.hold() == 6


def test_a_batch_that_is_drawn_during_a_switch_stays_and_the_next_is_the_new_loaders():
    asked, answers = threading.Event(), threading.Event()

    def loader():
        asked.set()
        answers.wait(30)
        yield "old"
        yield "older"

    source = PromptSource("maker-0")
    batches = source.batches(loader)
    drawn = run_in_background(lambda: next(batches), name="draw")
    asked.wait(30)
    source.switch(lambda: ["new"])
    answers.set()
    assert [drawn.result(timeout=30), *batches] == ["old", "new"]


def test_a_loader_that_fails_can_be_held_afterwards():
    def loader():
        yield {"group_ids": [1]}
        raise OSError("the disk is gone")

    source = PromptSource("maker-0")
    batches = source.batches(loader)
    assert next(batches) == {"group_ids": [1]}
    with pytest.raises(OSError, match="the disk is gone"):
        next(batches)
    assert source.hold() == 2

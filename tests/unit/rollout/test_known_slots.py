"""What the host knows of slots that it looks at one look behind, by hand."""

import torch

from coati.rollout.native.loop import _Known, _Look


def look(*alive):
    return _Look(torch.tensor(alive))


def test_the_oldest_look_counts_when_enough_are_under_way():
    known = _Known(2)
    known.filled([0, 1], steps_left=20)
    assert (known.alive, known.free(3)) == ([True, True], [2])
    known.ran(4, look(True, False))
    known.look()
    assert known.alive == [True, True]  # one is under way, and may be looked at later
    known.ran(4, look(False, False))
    known.look()
    assert (known.alive, known.num_alive, known.steps_left) == ([True, False], 1, 12)


def test_a_look_is_what_was_alive_then():
    alive = torch.tensor([True, True])
    first = _Look(alive)
    alive[0] = False
    assert first.result() == [True, True]


def test_looks_at_slots_that_were_filled_or_moved_since_are_forgotten():
    known = _Known(2)
    known.filled([0, 1, 2, 3], steps_left=20)
    known.ran(4, look(True, False, False, True))
    known.ran(4, look(False, False, False, True))
    known.look()
    assert known.free(4) == [1, 2]
    known.packed_to(2)  # slots 0 and 3 lie in front now; the look under way saw the first of them dead
    assert known.alive == [True, True]
    known.ran(4, look(False, True))
    known.look()
    assert known.alive == [True, True]
    known.ran(4, look(False, True))
    known.look()
    assert known.alive == [False, True]
    known.filled([0], steps_left=20)  # which the look under way saw empty
    known.ran(4, look(True, True))
    known.look()
    assert known.alive == [True, True]


def test_slots_that_nobody_used_are_not_alive():
    known = _Known(1)
    known.filled([0, 1, 2], steps_left=9)
    known.packed_to(4)
    assert (known.alive, known.count) == ([True, True, True, False], 4)


def test_after_the_longest_response_none_is_alive_whatever_is_under_way():
    known = _Known(2)
    known.filled([0], steps_left=4)
    known.ran(4, look(True))
    known.look()
    assert known.num_alive == 0

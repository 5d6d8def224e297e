"""What the host knows of slots from copies that are on their way, by hand."""

import torch

from coati.rollout.native.slots import AliveCopy, HostView


def copy(*alive):
    return AliveCopy(torch.tensor(alive))


def test_the_oldest_copy_counts_when_enough_are_under_way():
    view = HostView(2)
    view.fill([0, 1], steps_left=20)
    assert (view.alive, view.free(3)) == ([True, True], [2])
    view.add(4, copy(True, False))
    view.update()
    assert view.alive == [True, True]  # one is under way, and may be looked at later
    view.add(4, copy(False, False))
    view.update()
    assert (view.alive, view.num_alive, view.steps_left) == ([True, False], 1, 12)


def test_a_copy_is_what_was_alive_then():
    alive = torch.tensor([True, True])
    first = AliveCopy(alive)
    alive[0] = False
    assert first.result() == [True, True]


def test_copies_of_slots_that_were_filled_or_moved_since_are_forgotten():
    view = HostView(2)
    view.fill([0, 1, 2, 3], steps_left=20)
    view.add(4, copy(True, False, False, True))
    view.add(4, copy(False, False, False, True))
    view.update()
    assert view.free(4) == [1, 2]
    view.resize(2)  # slots 0 and 3 lie in front now; the look under way saw the first of them dead
    assert view.alive == [True, True]
    view.add(4, copy(False, True))
    view.update()
    assert view.alive == [True, True]
    view.add(4, copy(False, True))
    view.update()
    assert view.alive == [False, True]
    view.fill([0], steps_left=20)  # which the look under way saw empty
    view.add(4, copy(True, True))
    view.update()
    assert view.alive == [True, True]


def test_slots_that_nobody_used_are_not_alive():
    view = HostView(1)
    view.fill([0, 1, 2], steps_left=9)
    view.resize(4)
    assert (view.alive, view.count) == ([True, True, True, False], 4)


def test_after_the_longest_response_none_is_alive_whatever_is_under_way():
    view = HostView(2)
    view.fill([0], steps_left=4)
    view.add(4, copy(True))
    view.update()
    assert view.num_alive == 0

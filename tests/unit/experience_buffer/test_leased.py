"""A trainer's buffer in a run: what it grants, accepts and returns."""

import errno
import functools
import os
import threading

import ledger_events
import pytest
from thread_peers import PATIENCE
from tiny import item

from coati.errors import DataError, DeadlineExceeded
from coati.experience_buffer.buffer import LeasedBuffer
from coati.ledger import Lease, LedgerRules
from coati.ledger.journal import Journal, read_journal
from coati.ledger.rules import Ending, LeaseRequest

VERSION = 4  # samples


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 1.0
        return self.now


class Story:
    """A buffer with batches of two, and makers that request leases from it."""

    def __init__(self, *, journal=None, batch_size=2, **rules):
        defaults = {"samples_per_version": VERSION, "total_samples": 10 * VERSION, "lead": 1, "max_staleness": 1}
        self.rules = LedgerRules(**defaults | rules)
        open_journal = journal and functools.partial(Journal, journal, self.rules, run="r")
        self.buffer = LeasedBuffer(self.rules, batch_size, open_journal=open_journal, clock=Clock())
        self._num_asked = 0

    def ask(self, wanted=VERSION, *, maker="a", version=0, endings=(), number=None):
        self._num_asked += 1
        number = self._num_asked if number is None else number
        return self.buffer.lease(LeaseRequest(maker, number, version, wanted, tuple(endings)))

    def deliver(self, leases):
        self.buffer.extend([one for lease in leases for one in self.made_for(lease)])

    def made_for(self, lease):
        """Return samples whose ids encode number and epoch of their lease."""
        size = self.rules.group_size
        made = [item(10_000 * lease.epoch + lease.number * size + index) for index in range(size)]
        for one in made:
            one.lease = tuple(lease)
        return made

    def sample(self):
        """Return the ids of the samples of the next batch; None if it is not complete."""
        batch = self.buffer.try_sample(0.0)
        return None if batch is None else batch.sample_ids.tolist()


def numbers(leases):
    return [lease.number for lease in leases]


@pytest.fixture
def story():
    return Story()


def test_delivered_groups_come_out_in_whole_batches(story):
    leases = story.ask(3)
    assert leases == [Lease(0, 0), Lease(1, 0), Lease(2, 0)]
    assert story.sample() is None
    story.deliver(leases)
    assert (story.buffer.get_length(), story.buffer.num_items_waiting) == (1, 3)
    assert story.sample() == [0, 1]
    assert story.sample() is None
    assert (story.buffer.get_length(), story.buffer.num_items_waiting) == (0, 1)
    story.deliver(story.ask(1))
    assert story.sample() == [2, 3]


def test_the_lead_limits_what_is_granted_until_a_version_is_trained(story):
    assert numbers(story.ask(100)) == list(range(2 * VERSION))
    assert story.ask(100) == []
    story.deliver([Lease(number, 0) for number in range(2 * VERSION)])
    assert [story.sample(), story.sample()] == [[0, 1], [2, 3]]
    assert story.ask(100) == [], "they are picked, and not trained on"
    story.buffer.mark_trained(1)
    assert numbers(story.ask(100, version=1)) == list(range(2 * VERSION, 3 * VERSION))


def test_a_retried_request_gets_the_same_answer(story):
    leases = story.ask(2, number=7)
    assert story.ask(2, number=7) == leases
    assert numbers(story.ask(2, number=8)) == [2, 3]


def test_the_leases_of_a_maker_that_is_gone_go_to_others_and_what_it_delivers_is_left_out(story):
    old = story.ask(2)
    assert story.buffer.release("a", "died") == [0, 1]
    new = story.ask(2, maker="b")
    assert numbers(new) == [0, 1]
    story.deliver(old)
    assert story.sample() is None
    story.deliver([old[0], *new, old[1]])  # together, in any order
    assert story.sample() == [20_000, 20_001]
    story.deliver(old + new)
    assert story.buffer.num_items_waiting == 0, "nothing twice"
    assert story.buffer.num_made == 2


def test_a_maker_whose_leases_were_released_may_get_them_again_and_only_the_new_ones_count(story):
    old = story.ask(2)
    story.buffer.release("a", "does not respond")
    new = story.ask(2)
    assert numbers(new) == numbers(old)
    story.deliver(old)
    assert story.sample() is None
    story.deliver(new)
    assert story.sample() == [20_000, 20_001]


def test_leases_granted_after_a_checkpoint_are_refused_after_every_restart(monkeypatch):
    distances = iter([7, 3])
    monkeypatch.setattr("secrets.randbits", lambda bits: next(distances))
    first, second, third = Story(), Story(), Story()
    first.deliver(first.ask(1, maker="a"))
    first.ask()
    second.buffer.restore(*first.buffer.state())
    assert second.buffer.num_made == 1
    between = second.buffer.state()  # returned leases with epochs of the second start
    held = second.ask(maker="b")
    third.buffer.restore(*between)
    again = third.ask(maker="c")
    assert numbers(held) == numbers(again)
    third.deliver(held)
    assert third.sample() is None
    third.deliver(again)
    assert third.sample() is not None


def test_a_dropped_lease_is_replaced_by_another(story):
    first = story.ask(100)
    endings = [Ending(first[0], "prompt skipped, too long"), Ending(first[1], "no reward", "quarantine")]
    assert numbers(story.ask(100, endings=endings)) == [2 * VERSION, 2 * VERSION + 1]
    story.deliver(first)
    assert story.sample() == [2, 3]


def test_a_retried_request_ends_a_lease_once(story):
    first = story.ask(100)
    ending = Ending(first[0], "skipped")
    again = [story.ask(100, number=50, endings=[ending]) for _ in range(2)]
    assert numbers(again[0]) == numbers(again[1]) == [2 * VERSION]
    assert story.ask(100) == []


def test_part_of_a_group_is_refused_and_all_that_came_with_it():
    story = Story(group_size=2)
    leases = story.ask(4)
    whole, torn = story.made_for(leases[0]), story.made_for(leases[1])[:1]
    with pytest.raises(DataError, match=r"2 samples.*\[1\]"):
        story.buffer.extend(whole + torn)
    assert story.buffer.num_items_waiting == 0
    story.deliver(leases)
    assert [story.sample(), story.sample()] == [[0, 1], [2, 3]]


def test_a_group_may_not_have_samples_of_two_grants():
    story = Story(group_size=2)
    (old,) = story.ask(2)
    story.buffer.release("a", "died")
    (new,) = story.ask(2)
    mixed = [story.made_for(old)[0], story.made_for(new)[1]]
    with pytest.raises(DataError, match="as a whole"):
        story.buffer.extend(mixed)


def test_samples_without_a_lease_are_refused(story):
    with pytest.raises(DataError, match="without a lease"):
        story.buffer.extend([item(0)])
    assert story.buffer.num_items_waiting == 0


def test_deliveries_for_leases_never_granted_are_refused(story):
    story.deliver([Lease(0, 0), Lease(77, 0)])
    assert story.buffer.num_items_waiting == 0


def test_a_batch_is_in_the_order_of_its_leases_whatever_the_order_of_delivery():
    story = Story(batch_size=4)
    leases = story.ask(4)
    for number in (2, 0, 3, 1):
        story.deliver([leases[number]])
    assert story.sample() == [0, 1, 2, 3]


def test_on_policy_batches_do_not_depend_on_the_speed_of_makers():
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 3, 0, 1]):
        story = Story(lead=0, max_staleness=0)
        leases = story.ask(4)
        batches = []
        for number in order:
            story.deliver([leases[number]])
            batches += [batch for batch in (story.sample(), story.sample()) if batch is not None]
        assert batches == [[0, 1], [2, 3]]


def test_a_group_may_be_split_over_two_batches():
    story = Story(group_size=4, batch_size=2)
    story.deliver(story.ask(4))
    assert [story.sample(), story.sample()] == [[0, 1], [2, 3]]


# Waiting and threads


def in_thread(function, *args):
    """Run a call in a thread, and return a function that waits for its result."""
    results = []
    thread = threading.Thread(target=lambda: results.append(function(*args)), daemon=True)
    thread.start()

    def result():
        thread.join(PATIENCE)
        assert results, "the call did not end"
        return results[0]

    return result


def test_a_consumer_is_woken_when_its_batch_is_complete(story):
    leases = story.ask(2)
    waiting = in_thread(story.buffer.try_sample, PATIENCE)
    story.deliver(leases[:1])
    story.deliver(leases[1:])
    assert waiting().sample_ids.tolist() == [0, 1]


def test_a_deadline_error_tells_how_many_samples_are_there(story):
    story.deliver(story.ask(1))
    with pytest.raises(DeadlineExceeded, match="1 samples"):
        story.buffer.sample(timeout_seconds=0.0)


def test_the_makers_that_block_the_next_batch_are_named():
    story = Story(lead=0, max_staleness=0)
    assert "none has requested leases" in story.buffer.describe_wait()
    story.ask(2, maker="slow")
    story.deliver(story.ask(2, maker="quick"))
    assert story.sample() is None
    assert "slow holds 2" in story.buffer.describe_wait()
    assert "quick" not in story.buffer.describe_wait()
    story.buffer.release("slow", "died")
    assert story.buffer.describe_wait() == "2 wait for a maker"


def test_makers_on_threads_and_a_trainer_make_every_sample_once():
    total = 60 * VERSION
    story = Story(total_samples=total, group_size=2, lead=1, max_staleness=2)
    is_over, errors = threading.Event(), []

    def make(maker):
        try:
            number = 0
            while not is_over.is_set():
                number += 1
                request = LeaseRequest(maker, number, trained["version"], VERSION)
                leases = story.buffer.lease(request)
                story.deliver(leases)
                story.deliver(leases)  # its acknowledgement was lost
                if number % 10 == 0:
                    story.buffer.release(maker, "stalled")
        except BaseException as error:
            errors.append(error)

    trained, ids = {"version": 0}, []
    makers = [threading.Thread(target=make, args=(f"maker-{index}",), daemon=True) for index in range(3)]
    for one in makers:
        one.start()
    for _ in range(total // VERSION):
        for _ in range(VERSION // 2):
            ids += [number % 10_000 for number in story.buffer.sample(timeout_seconds=PATIENCE).sample_ids.tolist()]
        story.buffer.mark_trained(trained["version"] + 1)
        trained["version"] += 1
    is_over.set()
    for one in makers:
        one.join(PATIENCE)
    assert errors == []
    assert sorted(ids) == list(range(total))
    assert story.buffer.num_items_waiting == 0


# The journal


class Disk:
    """A disk that is full while `is_full` is set."""

    def __init__(self, monkeypatch):
        self.is_full = False
        write = os.pwrite

        def pwrite(*args):
            if self.is_full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(*args)

        monkeypatch.setattr(os, "pwrite", pwrite)


def replayed(path):
    content = read_journal(path)
    return ledger_events.replayed(content.rules, content.events)


def test_the_journal_records_all_events(tmp_path):
    path = tmp_path / "journal"
    story = Story(journal=path)
    leases = story.ask(4)
    story.deliver(leases[:3])
    story.sample()
    story.buffer.release("a", "died")
    assert replayed(path).state() == story.buffer._ledger.state()
    story.deliver(story.ask(1, maker="b"))
    story.sample()
    story.buffer.mark_trained(1)
    assert replayed(path).state() == story.buffer._ledger.state()
    story.buffer.close()


def test_on_a_full_disk_training_goes_on_and_the_journal_is_written_when_there_is_room(tmp_path, monkeypatch, caplog):
    path = tmp_path / "journal"
    disk = Disk(monkeypatch)
    story = Story(journal=path)
    leases = story.ask(2)
    before = replayed(path).state()
    disk.is_full = True
    story.deliver(leases)
    assert story.sample() == [0, 1]
    story.ask(2)
    assert replayed(path).state() == before
    assert sum("journal is behind" in record.getMessage() for record in caplog.records) == 1
    disk.is_full = False
    story.ask(1)
    assert replayed(path).state() == story.buffer._ledger.state()
    disk.is_full = True
    story.ask(1)
    assert sum("journal is behind" in record.getMessage() for record in caplog.records) == 2, "once for each time"
    disk.is_full = False
    story.buffer.close()
    assert replayed(path).state() == story.buffer._ledger.state(), "the last words are written at the end"

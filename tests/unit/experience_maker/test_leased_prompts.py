"""A maker's side of leases: its requests, its deliveries, and the endings that it reports."""

import pytest
import tiny
from thread_peers import PATIENCE, ThreadPeers

from coati.config import Deadlines
from coati.errors import ConfigError, DeadlineExceeded
from coati.experience_buffer.buffer import LeasedBuffer
from coati.experience_maker.base import AllSamplesDropped, MakerBatch
from coati.experience_maker.work_source import LeasedPrompts
from coati.ledger import LeaseRequest, LedgerRules


class Trainer:
    """The part of a trainer that grants leases and accepts items."""

    def __init__(self, rules):
        self.buffer, self.requests, self.error = (
            LeasedBuffer(rules, rules.samples_per_version, clock=lambda: 0.0),
            [],
            None,
        )

    def lease(self, request):
        if self.error is not None:
            raise self.error
        self.requests.append(request)
        return self.buffer.lease(request)


class Story:
    """A maker with batches of four samples, and its trainers, which need four per version."""

    def __init__(self, *, trainers=1, unusable=(), seconds=PATIENCE, **options):
        names = [f"trainer-{rank}" for rank in range(trainers)]
        defaults = {"samples_per_version": 4, "total_samples": 40, "lead": 1, "max_staleness": 1}
        rules = [LedgerRules(**defaults | options, stream=rank, num_streams=trainers) for rank in range(trainers)]
        self.trainers = [Trainer(one) for one in rules]
        self.peers = ThreadPeers(**dict(zip(names, self.trainers, strict=True)))
        self.version, self.incarnation, self.is_stopped = 0, 0, False  # like those of `ServedModels`
        self.prompts = LeasedPrompts(
            tiny.NumberStream(4, unusable=unusable),
            names,
            rules[0],
            self,
            peers=self.peers,
            maker_name="maker",
            deadlines=Deadlines(update_seconds=seconds, batch_seconds=seconds),
            should_stop=lambda: self.is_stopped,
        )

    def wait_for_version(self, at_least, *, deadline_seconds):
        pass

    def settle(self, batch, *, without=(), dropped=None):
        """Make items for a batch, without the samples `without`, and return those to deliver."""
        made = [] if dropped is not None else [tiny.item(one) for one in ids(batch) if one not in without]
        return self.prompts.close_leases(MakerBatch(batch, drop_error=dropped), made)

    def deliver(self, items):
        for rank, trainer in enumerate(self.trainers):
            trainer.buffer.extend([item for item in items if item.lease[0] % len(self.trainers) == rank])

    @property
    def waiting(self):
        return [trainer.buffer.num_items_waiting for trainer in self.trainers]

    def endings(self):
        return [(end.lease.number, end.reason) for end in self.trainers[0].requests[-1].endings]


def ids(batch):
    return None if batch is None else [sample.id for sample in batch]


def test_a_batch_holds_the_leased_prompts_and_its_items_carry_the_leases():
    story = Story()
    batch = story.prompts.poll(4)
    assert ids(batch) == [0, 1, 2, 3]
    items = story.settle(batch)
    assert [item.lease for item in items] == [(0, 0), (1, 0), (2, 0), (3, 0)]
    story.deliver(items)
    assert story.waiting == [4]
    assert ids(story.prompts.poll(4)) == [4, 5, 6, 7]
    assert story.prompts.poll(4) is None, "all that may be ahead is granted"


def test_several_trainers_are_asked_for_equal_shares():
    story = Story(trainers=2)
    first, second = story.prompts.poll(4), story.prompts.poll(4)
    assert (ids(first), ids(second)) == ([0, 1, 2, 3], [4, 5, 6, 7])
    story.deliver(story.settle(first) + story.settle(second))
    assert story.waiting == [4, 4]


def test_weights_that_arrive_during_a_request_end_the_wait_for_the_next_one():
    story = Story(lead=0)
    story.prompts.poll(4)
    grant = story.trainers[0].lease

    def lease(request):
        answer = grant(request)
        story.version += 1  # after the answer, which therefore grants nothing
        return answer

    def wait_for_version(at_least, *, deadline_seconds):
        assert at_least <= story.version, "it would wait for weights after those that have just arrived"
        story.is_stopped = True

    story.trainers[0].lease, story.wait_for_version = lease, wait_for_version
    assert story.prompts.wait_for_work(4) is None
    assert story.is_stopped


def test_a_request_that_waits_asks_for_slots_that_become_free_meanwhile():
    story = Story(lead=0)
    story.prompts.poll(4)

    def wait_for_version(at_least, *, deadline_seconds):
        story.is_stopped, story.prompts.room = story.prompts.room == 3, 3

    story.wait_for_version = wait_for_version
    assert story.prompts.wait_for_work(1) is None
    assert [request.wanted for request in story.trainers[0].requests] == [4, 1, 3]


def test_a_group_with_a_missing_sample_is_dropped_whole_and_the_trainer_is_told_why():
    story = Story(group_size=2)
    items = story.settle(story.prompts.poll(4), without=[3])
    assert [int(item.sample_ids) for item in items] == [0, 1]
    assert ids(story.prompts.poll(4)) == [4, 5, 6, 7]
    assert story.endings() == [(1, "dropped by the maker")]
    story.prompts.poll(4)
    assert story.endings() == [], "endings are reported once"


def test_a_dropped_batch_delivers_nothing_and_its_leases_are_replaced():
    story = Story(lead=0)
    batch = story.prompts.poll(4)
    assert story.prompts.poll(4) is None
    assert story.settle(batch, dropped=AllSamplesDropped("no reward was finite")) == []
    assert ids(story.prompts.poll(4)) == [4, 5, 6, 7]
    assert story.endings() == [(number, "no reward was finite") for number in range(4)]


def test_endings_can_be_reported_without_requesting_leases():
    story = Story(lead=0)
    story.settle(story.prompts.poll(4), dropped=AllSamplesDropped("no reward was finite"))
    story.prompts.report_endings()
    assert [number for number, _ in story.endings()] == [0, 1, 2, 3]
    assert story.trainers[0].requests[-1].wanted == 0
    assert ids(story.prompts.poll(4)) == [4, 5, 6, 7], "nothing was granted meanwhile"


def test_unusable_prompts_end_their_leases_with_the_reason():
    story = Story(lead=0, unusable=[0, 2, 4])
    assert ids(story.prompts.poll(4)) == [1, 3]
    assert ids(story.prompts.poll(4)) == [5]
    assert story.endings() == [(0, "prompt skipped, too long"), (2, "prompt skipped, too long")]
    assert ids(story.prompts.poll(4)) == [6]


@pytest.mark.parametrize("drop", ["drop_call", "drop_reply"])
def test_a_request_whose_answer_is_lost_is_retried_and_grants_nothing_twice(drop):
    story = Story(unusable=[0])
    story.prompts.poll(4)
    getattr(story.peers, drop)("trainer-0", "lease")
    assert ids(story.prompts.poll(4)) == [4, 5, 6, 7]
    assert story.prompts.poll(4) is not None, "one more for the one that was given back"
    assert story.prompts.poll(4) is None


def test_a_lease_regranted_to_the_maker_still_working_on_it_counts_for_the_new_grant():
    """The maker stalled: its leases were released, and it gets them again before its old batch is finished."""
    story = Story()
    old = story.prompts.poll(4)
    story.trainers[0].buffer.release("maker", "does not respond")
    new = story.prompts.poll(4)
    assert ids(old) == ids(new)
    items = story.settle(old)
    assert {item.lease[1] for item in items} == {0}
    story.deliver(items)
    assert story.waiting == [0]
    items = story.settle(new)
    assert {item.lease[1] for item in items} == {2}
    story.deliver(items)
    assert story.waiting == [4]


def test_a_regranted_lease_may_be_dropped_both_times():
    story = Story()
    old = story.prompts.poll(4)
    story.trainers[0].buffer.release("maker", "does not respond")
    new = story.prompts.poll(4)
    story.settle(old, without=[0])
    story.settle(new, without=[0, 1])
    story.prompts.poll(4)
    leases = [tuple(end.lease) for end in story.trainers[0].requests[-1].endings]
    assert leases == [(0, 0), (0, 2), (1, 2)]


def test_a_dead_or_missing_trainer_grants_nothing():
    story = Story(trainers=2)
    story.peers.kill_at("trainer-1", "lease")
    assert ids(story.prompts.poll(4)) == [0, 2]
    assert ids(story.prompts.poll(4)) == [4, 6]


def test_a_trainer_that_does_not_answer_is_named():
    story = Story(seconds=0.05)
    held = story.peers.hold("trainer-0", "lease")
    with pytest.raises(DeadlineExceeded, match=r"trainer-0.*lease"):
        story.prompts.poll(4)
    held.release()


def test_an_error_of_a_trainer_is_raised_with_its_name():
    story = Story()
    story.trainers[0].error = ConfigError("no leases here")
    with pytest.raises(ConfigError, match="no leases here") as caught:
        story.prompts.poll(4)
    assert "trainer-0" in caught.value.__notes__[0]


def test_batches_come_until_a_stop_with_waits_for_new_weights_in_between():
    story = Story(lead=0, max_staleness=0)
    seen = []

    def train(at_least, *, deadline_seconds):  # called when the maker waits, because everything is granted
        buffer = story.trainers[0].buffer
        buffer.try_sample(0.0)
        story.version += 1
        buffer.mark_trained(story.version)
        story.is_stopped = story.version == 3

    story.wait_for_version = train
    while (batch := story.prompts.wait_for_work(4)) is not None:
        seen.append((story.version, ids(batch)))
        story.deliver(story.settle(batch))
    assert seen == [(0, [0, 1, 2, 3]), (1, [4, 5, 6, 7]), (2, [8, 9, 10, 11])]
    assert [request.version for request in story.trainers[0].requests] == [0, 0, 1, 1, 2, 2]


def test_requests_name_the_maker_and_the_number_of_samples():
    story = Story(trainers=3, group_size=2)
    story.version = 0
    story.prompts.poll(4)
    assert story.trainers[1].requests == [LeaseRequest("maker", 1, 0, 2)], "at least one group of each"


def test_answers_of_trainers_are_recorded_and_other_work_sends_heartbeats(monkeypatch):
    now = [7.0]
    monkeypatch.setattr("coati.experience_maker.work_source.time.monotonic", lambda: now[0])
    story = Story(trainers=2)
    for trainer in story.trainers:
        trainer.buffer._clock = lambda: now[0]
    story.prompts.poll(4)
    assert story.prompts.last_answer == 7.0
    assert [trainer.buffer.last_progress for trainer in story.trainers] == [0.0, 0.0]
    now[0] = 8.0
    story.prompts.report_endings()
    assert [trainer.buffer.last_progress for trainer in story.trainers] == [8.0, 8.0]
    now[0] = 9.0
    for name in ("trainer-0", "trainer-1"):
        story.peers.kill(name)
    story.prompts.poll(4)
    assert story.prompts.last_answer == 8.0

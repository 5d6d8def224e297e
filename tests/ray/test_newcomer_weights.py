"""Weights for makers that join: what goes wrong with one of them is its own affair. A real channel, fake makers."""

from types import SimpleNamespace

import pytest
import torch
from ray_testing import PATIENCE, Method

from coati.config import Deadlines
from coati.errors import DeadlineExceeded, PeerDied, WeightUpdateError
from coati.ray import peers
from coati.ray.weight_channel import WeightChannel
from coati.weights import ShareProbe, new_header, weight_messages

LONG = Deadlines(start_seconds=PATIENCE, batch_seconds=PATIENCE, update_seconds=PATIENCE)
SHORT = Deadlines(start_seconds=0.4, batch_seconds=0.4, update_seconds=0.4)


class Taker:
    """A maker that takes updates as the test says."""

    def __init__(self):
        self.versions, self.whole = [], []
        self.take = lambda: None
        self.can_open = lambda: ""
        self.update_experience_maker = Method(self._update)
        self.why_not_shared = Method(lambda probe: self.can_open())

    def _update(self, *, update=None, fully_update=False, **_):
        if update is not None:
            self.versions.append(update.version)
            self.whole.append(fully_update)
        return self.take()


class Channel:
    """A channel to `old` and, once it has joined, to `new`."""

    def __init__(self, monkeypatch, *, first=("old",), deadlines=LONG):
        self.takers = {"old": Taker(), "new": Taker()}
        self.lookups = []
        monkeypatch.setattr(peers, "ray", SimpleNamespace(get_actor=self._get_actor))
        self.channel = WeightChannel(first, deadlines=deadlines)
        self._version = 0

    def _get_actor(self, name):
        self.lookups.append(name)
        if name not in self.takers:
            raise ValueError(name)
        return self.takers[name]

    def send(self, *, fully_update=True, **options):
        self._version += 1
        header = new_header(version=self._version, source="the test")
        messages = weight_messages(header, [("actor", {"w": torch.zeros(1)})])
        self.channel.send(header, messages, fully_update=fully_update, **options)

    @property
    def old(self):
        return self.takers["old"]

    @property
    def new(self):
        return self.takers["new"]


def joined(monkeypatch, deadlines):
    channel = Channel(monkeypatch, deadlines=deadlines)
    channel.send()
    channel.channel.change_makers(["old", "new"])
    return channel


@pytest.fixture
def channel(monkeypatch, cluster):
    return joined(monkeypatch, LONG)


@pytest.fixture
def impatient_channel(monkeypatch, cluster):
    return joined(monkeypatch, SHORT)


def test_the_list_of_updated_makers_changes_between_updates(monkeypatch, cluster):
    channel = Channel(monkeypatch)
    assert not channel.channel.has_newcomers, "those who were there at first are synced by whoever made them"
    channel.send(fully_update=False)
    channel.channel.change_makers(["old", "new"])
    assert channel.channel.has_newcomers
    channel.send(fully_update=False)  # it was on its way already
    assert channel.channel.has_newcomers
    channel.send()
    assert not channel.channel.has_newcomers
    channel.channel.change_makers(["new"])
    assert not channel.channel.has_newcomers
    channel.send(fully_update=False)
    assert (channel.old.versions, channel.old.whole) == ([1, 2, 3], [False, False, True])
    assert (channel.new.versions, channel.new.whole) == ([2, 3, 4], [False, True, False])


def reject():
    raise ValueError("the head is wider here")


def test_a_newcomer_that_rejects_an_update_misses_it_and_gets_the_next(channel):
    channel.new.take = reject
    channel.send()
    assert channel.channel.faults == {"new": "the head is wider here"}
    assert channel.channel.has_newcomers
    channel.new.take = lambda: None
    channel.send()
    assert channel.channel.faults == {}
    assert not channel.channel.has_newcomers
    assert (channel.old.versions, channel.new.versions) == ([1, 2, 3], [2, 3])
    channel.new.take = reject  # it is a maker like any other now
    with pytest.raises(WeightUpdateError, match="maker new: the head is wider here"):
        channel.send()


def test_a_newcomer_that_is_not_there_is_not_waited_for(channel):
    new = channel.takers.pop("new")
    channel.send()
    assert channel.channel.faults == {"new": "no actor has this name"}
    channel.takers["new"] = new
    channel.send()
    assert channel.channel.faults == {}
    assert not channel.channel.has_newcomers
    assert (channel.old.versions, new.versions) == ([1, 2, 3], [3])


def test_makers_that_stay_are_not_looked_up_again(channel):
    del channel.takers["old"]  # as an actor that died: its name is gone, its handle says why
    channel.send()
    assert channel.lookups == ["old", "new"]


def test_a_newcomer_that_is_late_is_left_out_and_what_it_was_lent_is_not_written_again(impatient_channel, answers):
    channel = impatient_channel
    channel.new.take = answers.never
    events = []
    lender = SimpleNamespace(lend_to=events.append, retire=lambda: events.append("retired"), is_one_check_enough=True)
    channel.send(snapshots=lender)
    assert events == [["old"], "retired"]
    assert "did not take a weight update within 0.2 s" in channel.channel.faults["new"]
    channel.send(snapshots=lender)
    assert events[2:] == [["old"]]
    assert (channel.old.versions, channel.new.versions) == ([1, 2, 3], [2])
    assert not channel.channel.has_newcomers, "nobody waits for a full update"


def test_a_newcomer_that_was_late_gets_weights_again_as_soon_as_it_has_work(impatient_channel, answers):
    """It has to finish what it was dealt, and may need the next version for that."""
    channel = impatient_channel
    channel.channel.change_makers(["old", "new"], newcomers=["new"])
    channel.send()
    channel.new.take = answers.never
    channel.send()
    channel.new.take = lambda: None
    channel.send()
    assert (channel.new.versions, channel.channel.faults.keys()) == ([2, 3], {"new"})
    channel.channel.change_makers(["old", "new"])
    assert channel.channel.faults.keys() == {"new"}, "whoever dealt it in can still see it"
    channel.send()
    assert (channel.new.versions, channel.channel.faults) == ([2, 3, 5], {})


def test_a_maker_that_is_late_is_still_an_error(impatient_channel, answers):
    channel = impatient_channel
    channel.old.take = channel.new.take = answers.never
    with pytest.raises(DeadlineExceeded, match="makers old did not take a weight update in time"):
        channel.send()


def test_a_newcomer_that_dies_is_left_out_even_if_it_is_all_that_a_trainer_has(monkeypatch, answers):
    channel = Channel(monkeypatch, first=())
    channel.channel.change_makers(["new"])
    channel.new.take = answers.dead
    for _ in range(2):
        channel.send()
    assert channel.new.versions == [1]
    assert channel.channel.faults.keys() == {"new"}
    channel.channel.change_makers([])
    channel.channel.change_makers(["new"])
    channel.new.take = lambda: None
    channel.send()
    channel.new.take = answers.dead
    with pytest.raises(PeerDied, match=r"every maker \(new\) is gone"):
        channel.send()


def test_a_newcomer_is_on_trial_for_as_long_as_it_has_no_work(channel):
    channel.channel.change_makers(["old", "new"], newcomers=["new"])
    channel.send()
    assert not channel.channel.has_newcomers, "it has all weights"
    channel.new.take = reject
    channel.send()
    assert channel.channel.faults == {"new": "the head is wider here"}
    channel.channel.change_makers(["old", "new"])
    assert channel.channel.faults == {"new": "the head is wider here"}, "whoever deals it in can still see it"
    with pytest.raises(WeightUpdateError, match="maker new: the head is wider here"):
        channel.send()
    channel.channel.change_makers(["old"])
    assert channel.channel.faults == {}


PROBE = ShareProbe("memory", None, 0)


def test_where_weights_go_is_not_decided_by_a_newcomer_that_does_not_answer(impatient_channel, answers):
    channel = impatient_channel
    assert channel.channel.all_can_open(PROBE, instead="the long way")
    channel.new.can_open = answers.dead
    assert channel.channel.all_can_open(PROBE, instead="the long way")
    new = channel.takers.pop("new")
    channel.channel.change_makers(["old"])
    channel.channel.change_makers(["old", "new"])
    assert channel.channel.all_can_open(PROBE, instead="the long way")
    channel.takers["new"] = new
    new.can_open = lambda: "it sits elsewhere"
    assert not channel.channel.all_can_open(PROBE, instead="the long way")
    new.can_open = answers.never
    assert channel.channel.all_can_open(PROBE, instead="the long way")
    channel.send()
    assert new.versions == [], "who did not answer in time is left out"
    channel.old.can_open = answers.never
    with pytest.raises(DeadlineExceeded, match="maker old did not say in time"):
        channel.channel.all_can_open(PROBE, instead="the long way")

"""A sender and its makers on threads: which maker commits which update if some are slow, die, reject or join."""

import dataclasses
import inspect
import itertools
import logging
import threading
import weakref
from concurrent.futures import Future, wait

import pytest
import torch
from thread_peers import PATIENCE, ThreadCall, ThreadPeers
from weight_testing import Maker, PlainStrategy, deliver, header_of, make_sender, messages_of

from coati.errors import ActorNotFound, PeerUnavailable, WeightUpdateError
from coati.peers import LocalPeer, LocalPeers, Peer, remote_error
from coati.weights import sender as sender_module
from coati.weights.message import BufferHandle, SharedGpuMemory, WeightMessage, checksum_of
from coati.weights.sender import MAX_CHUNKS_IN_FLIGHT, UpdateCalls, _Maker

UPDATE = "update_experience_maker"


class Rejecting:
    """A maker that rejects updates while `rejects` is set, and accepts any others."""

    def __init__(self):
        self.versions, self.full = [], []
        self.rejects = False

    def update_experience_maker(self, *, message):
        if message.is_start:
            self.versions.append(message.header.version)
        if message.manifest is not None:
            self.full.append(message.manifest.is_full)
        if self.rejects:
            raise ValueError("the head is wider here")

    def sharing_fault(self, probe):
        return None


def in_background(function, *args, **kwargs):
    """Run a call in a thread; return a function that waits for its result."""
    outcome = []

    def run():
        try:
            outcome.append((function(*args, **kwargs), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def result():
        thread.join(PATIENCE)
        assert outcome, "the background call did not end"
        value, error = outcome[0]
        if error is not None:
            raise error
        return value

    result.is_running = thread.is_alive
    return result


@pytest.fixture
def trained(make_models):
    return make_models(7)


class Lent(SharedGpuMemory):
    """Shared memory on the CPU, with small chunks."""

    least_chunk_mib = 0.0

    def __init__(self):
        super().__init__(torch.device("cpu"))


# Delivery.


@pytest.mark.parametrize("make_shared", [None, Lent], ids=["by value", "shared memory"])
def test_all_makers_serve_what_was_sent(make_shared, make_models, fingerprint):
    makers = {name: Maker(make_models(0)) for name in ("a", "b")}
    models = make_models(1)
    shared = None if make_shared is None else make_shared()
    # A handle of CPU memory is valid only in this process and must not be pickled.
    peers = LocalPeers(**makers) if isinstance(shared, SharedGpuMemory) else ThreadPeers(**makers)
    sender = make_sender(models, peers, list(makers), shared=shared)
    for version in range(5):
        with torch.no_grad():
            models["critic"].bias.fill_(version)
        sender.send(version, fully_update=version == 0)
        for maker in makers.values():
            assert fingerprint(maker.models) == fingerprint(models)
            assert maker.served.version == version


def test_floats_are_sent_in_the_learners_compute_dtype(trained, make_models):
    strategy = PlainStrategy()
    strategy.compute_dtype = torch.bfloat16
    with torch.no_grad():
        trained["critic"].weight.fill_(1.00390625)  # 1 + 2⁻⁸: bfloat16 rounds it to 1
    maker = Maker(make_models(0))
    make_sender(trained, ThreadPeers(maker=maker), ["maker"], strategy=strategy).send(1)
    assert maker.models["critic"].weight.unique().tolist() == [1.0]
    assert maker.models["actor"].num_seen.item() == trained["actor"].num_seen.item()


def test_adapter_updates_hold_only_trained_weights(trained, make_models):
    trained["actor"].requires_grad_(False)
    maker = Maker(make_models(0))
    sender = make_sender(trained, ThreadPeers(maker=maker), ["maker"], only_trained=True)
    sizes = []
    sender.send(1, on_arrival=lambda _, num_bytes: sizes.append(num_bytes))
    assert maker.models["critic"].weight.equal(trained["critic"].weight)
    assert maker.models["actor"].body.weight.equal(make_models(0)["actor"].body.weight)
    sender.send(1, fully_update=True, on_arrival=lambda _, num_bytes: sizes.append(num_bytes))
    assert maker.models["actor"].body.weight.equal(trained["actor"].body.weight)
    assert sizes == [20, 40 + 80 + 8 + 2 + 20]


def test_weights_are_read_even_without_makers(trained):
    # In a sharded group, gathering is collective; if one rank skipped it, the others would wait forever.
    read = []

    class Gathering(PlainStrategy):
        def get_model_state_dict_shard(self, model, **options):
            for shard in super().get_model_state_dict_shard(model, **options):
                read.extend(shard)
                yield shard

    make_sender(trained, ThreadPeers(), [], strategy=Gathering()).send(1)
    assert {"body.weight", "weight"} < set(read)


def test_every_chunk_has_its_checksum_and_none_is_read_ahead(make_models, monkeypatch):
    drawn, ahead = [], []

    class Counting(PlainStrategy):
        def get_model_state_dict_shard(self, model, **options):
            for index in range(5):
                drawn.append(index)
                yield {f"w{index}": torch.zeros(1)}

    class Noting(Rejecting):
        def update_experience_maker(self, *, message):
            checksums = [checksum_of(chunk.info, torch.from_numpy(chunk.data.copy())) for chunk in message.chunks]
            assert [chunk.info.checksum for chunk in message.chunks] == checksums

    monkeypatch.setattr(sender_module, "MAX_CHUNKS_IN_FLIGHT", 0)  # each chunk is answered before the next is sent
    peers = ThreadPeers(maker=Noting())
    peers["maker"].at(UPDATE, "before", lambda _: ahead.append(len(drawn)), None)
    make_sender({"actor": torch.nn.Identity()}, peers, ["maker"], strategy=Counting()).send(1)
    assert ahead[1:] == [1, 2, 3, 4, 5, 5]  # after the start: five chunks and the manifest


class WaitedPeer(Peer):
    def call(self, method, *args, **kwargs):
        return Future()


def test_a_bounded_number_of_chunks_is_in_flight(trained, monkeypatch):
    open_at_wait = []

    def end_one(calls, timeout, until):
        open_at_wait.append(len(calls))
        next(iter(calls)).set_result(None)
        return wait(calls, timeout, until)

    monkeypatch.setattr(sender_module, "wait", end_one)
    peers = ThreadPeers()
    peers.add("a", None), peers.add("b", None)
    peers._lookup = WaitedPeer
    make_sender(trained, peers, ["a", "b"], chunk_mib=8 / 2**20).send(1)
    assert max(open_at_wait) == 2 * MAX_CHUNKS_IN_FLIGHT + 2


# Successive updates.


class Slow:
    """A sender and a maker whose answer to a manifest can be held back."""

    def __init__(self, models, sent):
        self.maker, self.sent = Maker(models), sent
        self.peers = ThreadPeers(maker=self.maker)
        self.sender = make_sender(sent, self.peers, ["maker"], chunk_mib=1.0)

    def hold_manifest(self):
        return self.peers.hold("maker", UPDATE, nth=4)  # the start, the actor, the critic, the manifest


@pytest.fixture
def slow(make_models, trained):
    return Slow(make_models(0), trained)


def test_publish_returns_once_the_weights_are_read_and_may_change(slow, make_models, fingerprint):
    held = slow.hold_manifest()
    slow.sender.publish(1)
    held.reached()
    assert slow.maker.served.version == 0
    with torch.no_grad():
        slow.sent["critic"].weight.zero_()
    held.release()
    slow.sender.wait_until_idle()
    assert fingerprint(slow.maker.models) == fingerprint(make_models(7))


def test_at_most_one_update_is_in_flight(slow):
    held = slow.hold_manifest()
    slow.sender.publish(1)
    held.reached()
    second = in_background(slow.sender.publish, 2)
    assert len(slow.peers["maker"].calls) == 4
    held.release()
    second()
    slow.sender.wait_until_idle()
    assert slow.maker.served.version == 2


def test_all_updates_share_one_thread(slow):
    slow.sender.send(1)
    before = threading.active_count()
    seen = set()
    for version in range(2, 6):
        slow.sender.publish(version, on_arrival=lambda *_: seen.add(threading.get_ident()))
    slow.sender.wait_until_idle()
    assert threading.active_count() == before
    assert len(seen) == 1


def test_a_sender_that_is_dropped_is_freed_with_its_memory_and_its_thread(make_models, trained):
    before = set(threading.enumerate())
    maker = Maker(make_models(0))
    sender = make_sender(trained, LocalPeers(maker=maker), ["maker"], shared=Lent())
    sender.send(1)
    (worker,) = set(threading.enumerate()) - before
    freed = weakref.ref(sender)
    del sender
    worker.join(PATIENCE)
    assert freed() is None
    assert not worker.is_alive()


@pytest.fixture
def rejecting(trained):
    target = Rejecting()
    peers = ThreadPeers(maker=target)
    return target, peers, make_sender(trained, peers, ["maker"], chunk_mib=1.0)


def test_a_failed_publish_is_raised_once_by_check_or_the_next_publish(rejecting):
    target, _, sender = rejecting
    target.rejects = True
    sender.publish(1)
    sender.wait_until_idle()
    with pytest.raises(WeightUpdateError, match=r"version 1 were rejected\. maker maker: the head is wider"):
        sender.check()
    sender.check()
    target.rejects = False
    sender.send(2)
    target.rejects = True
    sender.publish(3)
    with pytest.raises(WeightUpdateError, match="version 3"):
        sender.publish(4)
    assert target.versions == [1, 2, 3]  # the fourth was not started


def test_check_does_not_wait(rejecting):
    target, peers, sender = rejecting
    held = peers.hold("maker", UPDATE)
    target.rejects = True
    sender.publish(1)
    sender.check()
    held.release()
    sender.wait_until_idle()
    with pytest.raises(WeightUpdateError):
        sender.check()


def test_a_send_raises_only_its_own_failure_and_leaves_others_to_check(rejecting):
    target, _, sender = rejecting
    target.rejects = True
    sender.publish(1)
    sender.wait_until_idle()
    target.rejects = False
    sender.send(2)
    target.rejects = True
    with pytest.raises(WeightUpdateError, match="version 3"):
        sender.send(3)
    sender.change_makers(["maker"])
    with pytest.raises(WeightUpdateError, match="version 1"):
        sender.check()
    sender.check()


def test_a_new_maker_receives_the_next_version(make_models, trained):
    makers = {"early": Maker(make_models(0)), "late": Maker(make_models(0))}
    sender = make_sender(trained, ThreadPeers(**makers), ["early"])
    for version in (1, 2, 3):
        sender.send(version)
    sender.change_makers(["early", "late"])
    sender.send(4)
    assert [maker.served.version for maker in makers.values()] == [4, 4]


# Makers that fail.


@pytest.fixture(autouse=True)
def _all_messages(caplog):
    caplog.set_level(logging.INFO)  # that a dead maker missed an update is not a warning


def misses_of(name, caplog):
    """Return the versions that a maker missed, according to the log."""
    records = [record for record in caplog.records if "missed the weights of version" in record.msg]
    return [record.args[1] for record in records if record.args[0] == name]


def test_a_maker_that_does_not_exist_is_named(trained):
    sender = make_sender(trained, ThreadPeers(), ["no-such-maker"], seconds=0.01)
    with pytest.raises(ActorNotFound, match="no-such-maker"):
        sender.send(1)


def test_the_sender_does_not_wait_for_a_new_maker_that_died(trained):
    old = Rejecting()
    sender = make_sender(trained, ThreadPeers(old=old), ["old"])
    sender.change_makers(["old", "gone"])
    sender.send(1)
    assert old.versions == [1]


def test_a_rejected_update_names_maker_and_reason_and_the_maker_keeps_its_weights(make_models, fingerprint):
    maker = Maker(make_models(0))
    wider = {"critic": torch.nn.Linear(9, 1)}
    with pytest.raises(WeightUpdateError, match=r"maker maker: .*\[1, 9\]"):
        make_sender(wider, ThreadPeers(maker=maker), ["maker"]).send(1)
    assert fingerprint(maker.models) == fingerprint(make_models(0))


@pytest.mark.parametrize("shared", [None, Lent])
def test_dead_makers_are_skipped_and_fail_no_update(shared, make_models, trained, caplog):
    makers = {name: Maker(make_models(0)) for name in ("a", "b")}
    peers = ThreadPeers(**makers)
    sender = make_sender(trained, peers, list(makers), shared=shared and shared())
    sender.send(1)
    peers.kill("a")
    sender.send(2)
    sender.send(3)
    assert makers["b"].served.version == 3
    assert misses_of("a", caplog) == [2], "logged once, when its death was detected"
    peers.kill("b")
    sender.send(4)
    successor = Maker(make_models(0))
    peers.add("b", successor)
    sender.send(5)
    assert successor.served.version == 5


@pytest.mark.parametrize("nth", range(1, 5))
@pytest.mark.parametrize("point", ["before", "after"])
@pytest.mark.parametrize("shared", [None, Lent])
def test_wherever_a_maker_dies_the_other_serves_the_update(nth, point, shared, make_models, trained, fingerprint):
    makers = {name: Maker(make_models(0)) for name in ("a", "b")}
    peers = ThreadPeers(**makers)
    sender = make_sender(trained, peers, list(makers), shared=shared and shared())
    peers.kill_at("a", UPDATE, point, nth=nth)
    sender.send(1)
    assert fingerprint(makers["b"].models) == fingerprint(trained)
    assert fingerprint(makers["a"].models) in {fingerprint(make_models(0)), fingerprint(trained)}


def test_a_maker_killed_at_any_chunk_returns_with_a_full_update_and_the_other_commits_each(
    make_models, trained, fingerprint
):
    makers = {name: Maker(make_models(0)) for name in ("a", "b")}
    peers = ThreadPeers(**makers)
    sender = make_sender(trained, peers, list(makers))
    for version in itertools.count(1):  # also the number of the call at which the maker dies
        peers.kill_at("a", UPDATE, nth=version)
        sender.send(version)
        assert makers["b"].served.version == version
        if peers["a"].is_alive:  # the update had fewer calls
            break
        assert not makers["a"].served.wait_for_full_update(0.0)
        assert fingerprint(makers["a"].models) == fingerprint(make_models(0)), "no part of the update is served"
        makers["a"] = Maker(make_models(0))
        peers.add("a", makers["a"])
    assert version > 5
    assert makers["a"].served.wait_for_full_update(0.0)
    assert [fingerprint(maker.models) for maker in makers.values()] == [fingerprint(trained)] * 2


@pytest.mark.parametrize("drop", ["drop_call", "drop_reply"])
@pytest.mark.parametrize("nth", range(1, 3))  # the start; the chunks and the manifest
def test_a_maker_that_cannot_be_reached_misses_one_update_and_gets_the_next(drop, nth, make_models, trained):
    makers = {name: Maker(make_models(0)) for name in ("a", "b")}
    peers = ThreadPeers(**makers)
    sender = make_sender(trained, peers, list(makers), shared=Lent())
    getattr(peers, drop)("a", UPDATE, nth=nth)
    sender.send(1)
    sender.send(2)
    assert [maker.served.version for maker in makers.values()] == [2, 2]


def test_a_rejection_caused_by_a_lost_chunk_does_not_count():
    calls = []

    class Slow(Peer):
        def call(self, method, *args, **kwargs):
            calls.append(ThreadCall(self.name, method, args, kwargs))
            return calls[-1]

    update = UpdateCalls({"a": Slow("a")}, {"a": _Maker()}, seconds=PATIENCE)
    update.send(UPDATE, message="a chunk")
    update.send(UPDATE, message="the manifest")
    calls[1].settle(error=remote_error("a", WeightUpdateError("missing 1 of 2 chunks")))
    update.wait(until_in_flight=1)
    calls[0].settle(error=PeerUnavailable("the connection broke"))
    update.wait()
    assert isinstance(update.failed["a"], PeerUnavailable)


@pytest.mark.parametrize("nth", range(1, 4))
def test_a_sender_that_dies_between_chunks_blocks_nobody(nth, make_models, trained, fingerprint, maker):
    half = messages_of(make_models(5), header=header_of(1, "a trainer that dies"))
    for message in [half.start(), *map(half.part, half.chunks)][:nth]:
        maker.update_experience_maker(message=message)
    make_sender(trained, ThreadPeers(maker=maker), ["maker"]).send(1)
    assert fingerprint(maker.models) == fingerprint(trained)


def interleavings(first, second):
    """Yield every interleaving of two sequences of these lengths, as a list of which sequence is next."""
    for places in itertools.combinations(range(first + second), first):
        yield [0 if place in places else 1 for place in range(first + second)]


def test_two_senders_to_one_maker_never_mix_whatever_the_order(make_models, fingerprint):
    published = [make_models(5), make_models(6)]
    first, *others = map(fingerprint, (make_models(0), *published))
    for order in interleavings(4, 4):  # start, actor, critic, manifest of each
        maker = Maker(make_models(0))
        updates = [
            messages_of(models, header=header_of(1, f"trainer {rank}"), max_bytes=1000)
            for rank, models in enumerate(published)
        ]
        calls = [iter([sent.start(), *map(sent.part, sent.chunks), sent.end()]) for sent in updates]
        for rank in order:
            maker.update_experience_maker(message=next(calls[rank]))
            seen = fingerprint(maker.models)
            assert seen in {first, *others}
        assert seen == others[order[-1]]


# Shared GPU memory.


def test_of_updates_during_work_in_shared_memory_the_newest_is_committed(make_models, fingerprint):
    maker, models = Maker(make_models(0)), make_models(1)
    sender = make_sender(models, LocalPeers(maker=maker), ["maker"], shared=Lent())
    before = fingerprint(maker.models)
    with maker.served.use():
        for version in range(1, 5):
            with torch.no_grad():
                models["critic"].bias.fill_(version)
            sender.send(version)
        assert fingerprint(maker.models) == before
    assert maker.served.version == 4
    assert fingerprint(maker.models) == fingerprint(models)


class Damaged(Lent):
    """Shared memory in which one bit of a chunk flips after it was hashed."""

    def make_chunk(self, index, module, tensors):
        chunk = super().make_chunk(index, module, tensors)
        if index == 1:
            self._buffers[index][0][0] ^= 1
        return chunk


def test_no_maker_serves_a_chunk_damaged_in_shared_memory(make_models, trained, fingerprint):
    makers = {name: Maker(make_models(0)) for name in ("a", "b")}
    with pytest.raises(WeightUpdateError) as caught:
        make_sender(trained, ThreadPeers(**makers), list(makers), shared=Damaged()).send(1)
    assert all(f"maker {name}: chunk 1 of" in str(caught.value) for name in makers)
    assert [maker.served.version for maker in makers.values()] == [0, 0]
    make_sender(trained, ThreadPeers(**makers), list(makers), shared=Lent()).send(1)
    assert all(fingerprint(maker.models) == fingerprint(trained) for maker in makers.values())


def handles_in(peers, name):
    """Return the handles of the chunks that a maker was sent, in order."""
    messages = [kwargs["message"] for method, _, kwargs in peers[name].calls if method == UPDATE]
    messages = [getattr(message, "value", message) for message in messages]
    return [chunk.handle for message in messages if isinstance(message, WeightMessage) for chunk in message.chunks]


class Elsewhere(Maker):
    def sharing_fault(self, probe):
        return "it sits elsewhere"


class PlainOnly:
    def __init__(self, models):
        self._maker = Maker(models)

    def update_experience_maker(self, *, message):
        self._maker.update_experience_maker(message=message)


class TakesNoMessage:
    def update_experience_maker(self, new_actor_state_dict=None, chunk_start=None, chunk_end=None):
        raise AssertionError("it was called")


class CheckingPeer(LocalPeer):
    """Checks the arguments of a call against the signature first, as a Ray handle does."""

    def call(self, method, *args, **kwargs):
        inspect.signature(getattr(self._target, method)).bind(*args, **kwargs)
        return super().call(method, *args, **kwargs)


@pytest.mark.parametrize("peer_class", [LocalPeer, CheckingPeer])
def test_a_maker_that_does_not_accept_messages_is_refused_with_the_reason(peer_class, make_models, trained, caplog):
    good = Maker(make_models(0))
    peers = LocalPeers(good=good)
    peers._known["mine"] = peer_class("mine", TakesNoMessage())
    sender = make_sender(trained, peers, ["mine", "good"], shared=Lent())
    with pytest.raises(WeightUpdateError, match=r"maker mine: .*'message'"):
        sender.send(1)
    assert good.served.version == 1
    assert "plain updates" not in caplog.text


@pytest.mark.parametrize("other", [Elsewhere, PlainOnly])
def test_weights_are_sent_by_value_if_one_maker_cannot_open_the_senders_memory(other, make_models, trained, caplog):
    peers = ThreadPeers(near=Maker(make_models(0)), far=other(make_models(0)))
    sender = make_sender(trained, peers, ["near", "far"], shared=Lent())
    sender.send(1)
    sender.send(2)
    assert set(handles_in(peers, "near")) == {None}
    assert sum("maker far" in record.getMessage() for record in caplog.records) == 1
    sender.change_makers(["near"])  # asked again
    sender.send(3)
    assert None not in handles_in(peers, "near")[-3:]
    assert [method for method, *_ in peers["near"].calls].count("sharing_fault") == 2


def test_without_shared_memory_weights_are_sent_by_value_with_a_warning(trained, make_models, monkeypatch, caplog):
    def refuse(buffer):
        raise RuntimeError("IPC is not supported")

    monkeypatch.setattr("coati.weights.message.BufferHandle.of", refuse)
    peers = ThreadPeers(maker=Maker(make_models(0)))
    sender = make_sender(trained, peers, ["maker"], shared=Lent())
    sender.send(1)
    sender.send(2)
    assert set(handles_in(peers, "maker")) == {None}
    assert sum("IPC is not" in record.getMessage() for record in caplog.records) == 1


# Makers that join, and makers that missed an update.


class Run:
    """A sender of adapters with two makers, `old` and `new`."""

    def __init__(self, models, *, seconds=60.0, first=("old", "new"), shared=None):
        self.old, self.new = Rejecting(), Rejecting()
        self.peers = ThreadPeers(old=self.old, new=self.new)
        self.sender = make_sender(models, self.peers, first, seconds=seconds, only_trained=True, shared=shared)
        self._version = 0
        self.send()

    def send(self, **options):
        self._version += 1
        self.sender.send(self._version, **options)

    @property
    def recipients(self):
        return self.sender.recipients


@pytest.fixture
def run(trained):
    return Run(trained)


def test_a_maker_that_joins_gets_all_weights_with_the_next_version(trained):
    run = Run(trained, first=["old"])
    run.sender.change_makers(["old", "new"])
    assert run.recipients.need_all
    run.send()
    assert not run.recipients.need_all
    run.sender.change_makers(["new"])
    assert not run.recipients.need_all
    run.send()
    assert (run.old.versions, run.old.full) == ([1, 2], [False, True])
    assert (run.new.versions, run.new.full) == ([2, 3], [True, False])


def be_unreachable(run):
    run.peers.drop_reply("new", UPDATE)
    return lambda: None


def be_unreachable_before(run):
    run.peers.drop_call("new", UPDATE)
    return lambda: None


def die_and_be_replaced(run):
    run.peers.kill_at("new", UPDATE)

    def replace():
        run.peers.add("new", run.new)

    return replace


def be_abandoned(run):
    held = run.peers.hold("new", UPDATE)
    run.recipients.abandon("new")

    def answer():
        held.release()
        run.peers["new"].drain()

    return answer


MISSES = [be_unreachable, be_unreachable_before, die_and_be_replaced, be_abandoned]


@pytest.mark.parametrize("miss", MISSES, ids=[miss.__name__ for miss in MISSES])
def test_a_maker_that_misses_an_update_gets_all_weights_next(miss, run, caplog):
    """It gets all weights with the next update, which would otherwise hold only adapters."""
    come_back = miss(run)
    run.send()
    assert misses_of("new", caplog) == [2]
    come_back()
    assert run.recipients.need_all
    run.new.full.clear()
    run.send()
    assert (run.new.versions[-1], run.new.full) == (3, [True])
    run.send()
    assert (run.new.versions[-1], run.new.full) == (4, [True, False])
    assert (run.old.versions, run.old.full) == ([1, 2, 3, 4], [False, False, True, False])
    assert misses_of("new", caplog) == [2]
    run.new.rejects = True  # now a rejection counts again
    with pytest.raises(WeightUpdateError, match="maker new: the head is wider here"):
        run.send()


def test_a_late_maker_delays_one_update_and_gets_all_weights_when_it_answers(trained, caplog):
    run = Run(trained, seconds=0.5)
    held = run.peers.hold("new", UPDATE)
    run.send()
    assert misses_of("new", caplog) == [2]
    assert not run.recipients.need_all, "no maker could receive them"
    num_calls = len(run.peers["new"].calls)
    run.send()
    run.send()
    assert len(run.peers["new"].calls) == num_calls, "it gets no calls before it has answered"
    assert (run.old.versions, run.old.full) == ([1, 2, 3, 4], [False] * 4)
    held.release()
    run.peers["new"].drain()
    assert run.recipients.need_all
    run.send()
    assert (run.new.versions[-1], run.new.full[-1]) == (5, True)
    assert not run.recipients.need_all


def test_the_sender_stops_waiting_for_a_maker_abandoned_during_an_update(run, caplog):
    held = run.peers.hold("new", UPDATE)
    sending = in_background(run.send)
    held.reached()
    run.recipients.abandon("new")
    sending()
    assert misses_of("new", caplog) == [2]
    assert run.old.versions == [1, 2]
    held.release()


def test_a_healthy_maker_that_was_abandoned_misses_at_most_one_update(run):
    run.recipients.abandon("new")
    run.send()
    run.peers["new"].drain()
    run.send()
    assert run.new.versions[-1] == 3
    assert not run.recipients.need_all
    held = run.peers.hold("new", UPDATE)
    sending = in_background(run.send)
    held.reached()
    held.release()
    sending()
    assert not run.recipients.need_all, "the sender waited for it again"


def test_a_rejection_is_an_error_unless_the_maker_was_behind(run, caplog):
    run.new.rejects = True
    with pytest.raises(WeightUpdateError, match="maker new: the head is wider here"):
        run.send()
    assert run.recipients.need_all
    run.send()
    assert misses_of("new", caplog) == [3]
    assert run.old.versions == [1, 2, 3]
    run.new.rejects = False
    run.send()
    assert run.new.full[-1] is True
    run.new.rejects = True
    with pytest.raises(WeightUpdateError, match="maker new"):
        run.send()


def test_a_new_maker_that_rejects_its_first_weights_fails_no_update(trained, caplog):
    run = Run(trained, first=["old"])
    run.new.rejects = True
    run.sender.change_makers(["old", "new"])
    run.send()
    assert misses_of("new", caplog) == [2]
    run.sender.change_makers(["old"])
    assert not run.recipients.need_all
    run.send()
    assert run.old.full == [False, True, False]


def test_makers_that_are_behind_can_be_sent_the_current_version(run):
    run.peers.drop_call("new", UPDATE)
    run.send()
    assert run.new.versions == [1]
    run.sender.send(2, fully_update=True, only_behind=True)
    assert (run.old.versions, run.new.versions) == ([1, 2], [1, 2])
    assert run.new.full == [False, True]
    assert not run.recipients.need_all
    run.sender.send(2, fully_update=True, only_behind=True)
    assert (run.old.versions, run.new.versions) == ([1, 2], [1, 2])


def test_a_maker_that_returns_during_an_adapter_update_still_needs_all_weights(run, monkeypatch):
    run.peers.kill("new")
    run.send()
    successor = Rejecting()

    def decided(condition):
        run.peers.add("new", successor)  # when the sender decided, no maker needed all weights
        return condition

    with monkeypatch.context() as patch:
        patch.setattr(run.sender.strategy, "any_rank", decided)
        run.send()
    assert successor.full == [False]
    assert run.recipients.need_all
    run.send()
    assert successor.full == [False, True]
    assert not run.recipients.need_all


def test_a_successor_of_the_same_name_is_a_new_maker_even_without_an_update_in_between(run):
    run.peers.kill("new")
    run.sender.change_makers(["old"])
    successor = Rejecting()
    run.peers.add("new", successor)
    run.sender.change_makers(["old", "new"])
    assert run.recipients.need_all
    run.sender.send(1, fully_update=True, only_behind=True)
    assert (successor.versions, successor.full) == ([1], [True])
    assert run.old.versions == [1]


def test_without_makers_updates_succeed_and_the_first_maker_gets_all_weights(trained):
    run = Run(trained, first=())
    run.sender.change_makers(["new"])
    run.peers.kill("new")
    run.send()
    run.send()
    assert not run.recipients.need_all
    successor = Rejecting()
    run.peers.add("new", successor)
    run.send()
    assert (successor.versions, successor.full) == ([4], [True])


BUFFERS = {}


def opened(index):
    return BUFFERS[index]


class Shared(Lent):
    """Shared memory whose handles survive pickling, as those of GPU memory do."""

    def make_chunk(self, index, module, tensors):
        chunk = super().make_chunk(index, module, tensors)
        BUFFERS[index] = self._buffers[index][0]
        handle = BufferHandle("cpu", index, opened, (index,))
        return dataclasses.replace(chunk, handle=handle)


def test_a_maker_rejects_a_chunk_that_a_later_update_has_overwritten(make_models, trained, fingerprint):
    makers = {"old": Maker(make_models(0)), "new": Maker(make_models(0))}
    peers = ThreadPeers(**makers)
    sender = make_sender(trained, peers, list(makers), shared=Shared())
    sender.send(1)
    held = peers.hold("new", UPDATE, nth=2)  # the first chunk: it is about to copy
    sending = in_background(sender.send, 2)
    held.reached()
    sender.recipients.abandon("new")
    sending()
    with torch.no_grad():
        for model in trained.values():
            for weight in model.parameters():
                weight.add_(1)
    sender.send(3)
    held.release()
    peers["new"].drain()
    assert [maker.served.version for maker in makers.values()] == [3, 1]
    assert not makers["new"].open_updates
    sender.send(4)
    assert [maker.served.version for maker in makers.values()] == [4, 4]
    assert fingerprint(makers["new"].models) == fingerprint(trained)


@pytest.mark.parametrize("is_abandoned", [False, True])
def test_an_unresponsive_maker_does_not_decide_the_transport_and_is_not_called(is_abandoned, trained):
    run = Run(trained, seconds=60.0 if is_abandoned else 0.5)
    probe = Lent().probe()
    assert run.recipients.all_can_open(probe)
    held = run.peers.hold("new", "sharing_fault")
    if is_abandoned:
        run.recipients.abandon("new")
    assert run.recipients.all_can_open(probe)
    run.send()
    assert (run.old.versions, run.new.versions) == ([1, 2], [1])
    held.release()
    run.peers["new"].drain()
    run.send()
    assert (run.new.versions, run.new.full) == ([1, 3], [False, True])


def test_all_ranks_send_all_weights_if_one_ranks_maker_needs_them(make_models, trained):
    trained["actor"].requires_grad_(False)

    class Group(PlainStrategy):
        world_size, others = 2, False

        def any_rank(self, condition):
            return condition or self.others

    maker, group = Maker(make_models(0)), Group()
    sender = make_sender(trained, ThreadPeers(maker=maker), ["maker"], strategy=group, only_trained=True)
    sender.send(1)
    assert maker.models["actor"].body.weight.equal(make_models(0)["actor"].body.weight)
    group.others = True
    sender.send(2)
    assert maker.models["actor"].body.weight.equal(trained["actor"].body.weight)


def test_a_hand_made_update_equals_a_senders(make_models, trained, fingerprint, maker):
    """This checks the helpers with which other tests damage updates."""
    deliver(messages_of(trained), maker)
    assert fingerprint(maker.models) == fingerprint(trained)

"""Fake makers and trainers on threads, for tests of the driver."""

import threading
from types import SimpleNamespace

from thread_peers import PATIENCE, ThreadPeers

from coati.actors.host import Progress, Report
from coati.monitor.records import RecordLog
from coati.ray.actor_factory import ActorFactory


class Actor:
    """Works until it is stopped, or made to fail with an error."""

    def __init__(self):
        self.records, self.spans, self.ended = RecordLog(), RecordLog(), threading.Event()
        self.error, self.has_weights = None, True

    def report(self, record_cursor, span_cursor):
        progress = Progress(
            "working", version=0, num_samples=0, num_waiting=3, has_weights=self.has_weights, num_made=8
        )
        return Report(progress, self.records.since(record_cursor), self.spans.since(span_cursor))

    def stop(self):
        self.ended.set()

    def fail(self, error):
        self.error = error
        self.ended.set()

    def _work(self):
        assert self.ended.wait(PATIENCE)
        if self.error is not None:
            raise self.error


class Maker(Actor):
    def workingloop(self, prompts):
        self._work()

    workingloop.__ray_concurrency_group__ = "compute"


class Trainer(Actor):
    def __init__(self):
        super().__init__()
        self.saved, self.is_synced, self.num_full_disks = [], False, 0
        self.makers, self.released = None, []
        self.story = []  # the calls that it received about makers

    def fit(self, total_steps, update_steps, epochs):
        assert self.is_synced
        self._work()

    fit.__ray_concurrency_group__ = "compute"

    def step(self, batch):
        self.records.append({"batch": batch, "version": batch, "metrics": {"policy/loss": float(batch)}})

    def sync_models_to_remote_makers(self):
        self.is_synced = True

    def change_makers(self, names):
        self.makers = names
        self.story.append(("told", *names))

    def release_maker(self, maker, reason):
        self.released.append(maker)
        self.story.append(("release", maker, reason.split(":")[0]))

    def strategy_save_actor(self, path, only_rank0=False):
        if self.num_full_disks > 0:
            self.num_full_disks -= 1
            raise OSError("no space left")
        self.saved.append(path)


class Host:
    """Creates actors on threads, in place of Ray."""

    def __init__(self):
        self.peers, self.started, self.killed, self.on_start = ThreadPeers(), [], [], lambda name: None

    def start(self, actor_class, ray_options, /, **arguments):
        name = ray_options["name"]
        peer = self.peers.add(name, Trainer() if name.startswith("trainer") else Maker())
        peer.target.arguments = arguments
        self.started.append(name)
        self.on_start(name)
        return peer

    def kill(self, peer):
        self.killed.append(peer.name)
        peer.kill()

    def __getitem__(self, name):
        return self.peers[name].target


class Factory(ActorFactory):
    """Creates its actors on a `Host`."""

    def __init__(self, config, *, host, parts=None):
        super().__init__(config, parts=parts)
        self._start, self.kill = host.start, host.kill

    def _find_rendezvous(self, name, num_gpus):
        return SimpleNamespace(result=lambda seconds: ("ab" * 28, "127.0.0.1", 4711))

"""Peers that are plain objects in this process, for tests of the calls between actors.

    peers = ThreadPeers(trainer=Sink())
    sender = ItemSender(["trainer"], peers=peers, …)

Each peer runs its calls on threads, one per concurrency group (of `ray.method`) and in order, as a Ray actor does.
Arguments and results are pickled. Tests inject faults at two points of the n-th call of a method: "before" it runs, and
"after" it has run but before its result is sent:

    held = peers.hold("trainer", "buffer_extend", "before", nth=2)
    held.reached()    # waits until the call is held
    held.release()
    peers.kill_at("trainer", "buffer_extend", "after")
    peers.drop_reply("trainer", "buffer_extend")    # the method runs; the caller gets PeerUnavailable
    peers.drop_call("trainer", "buffer_extend")     # the method never runs; the caller gets PeerUnavailable
    peers.kill("trainer")
"""

import pickle
import queue
import threading
from concurrent.futures import Future, InvalidStateError, wait

from coati.errors import PeerDied, PeerUnavailable
from coati.peers import Peer, Peers, remote_error

PATIENCE = 60.0  # timeout in seconds for events that should happen at once, generous for busy machines


class ThreadCall(Future):
    def __init__(self, name, method, args, kwargs):
        super().__init__()
        self.name, self.method = name, method
        self.args, self.kwargs = args, kwargs

    def settle(self, value=None, error=None):
        """Set the outcome if there is none yet, so that a killed peer's late result is dropped."""
        try:
            self.set_exception(error) if error is not None else self.set_result(value)
        except InvalidStateError:
            assert self.done()


class Hold:
    """Holds a call at a point until it is released."""

    def __init__(self):
        self._reached, self._released = threading.Event(), threading.Event()

    def __call__(self, peer):
        self._reached.set()
        self._released.wait(PATIENCE)

    def reached(self, timeout=PATIENCE):
        assert self._reached.wait(timeout), "no call reached the point at which to hold it"

    @property
    def is_reached(self):
        return self._reached.is_set()

    def release(self):
        self._released.set()


class _Dropped(Exception):
    pass


def lose(peer):
    """Drop a call or its result; an action for `ThreadPeer.at`."""
    raise _Dropped


class ThreadPeer(Peer):
    def __init__(self, name, target):
        super().__init__(name)
        self.target = target
        self.is_alive = True
        self.calls = []  # (method, args, kwargs) of all calls, as sent
        self._queues = {}
        self._counts = {}
        self._actions = {}  # (method, point) -> {nth: action}
        self._lock = threading.Lock()
        self._open = set()

    def call(self, method, *args, **kwargs):
        function = getattr(self.target, method)  # AttributeError, as of a Ray handle
        sent = pickle.dumps((args, kwargs))
        call = ThreadCall(self.name, method, *pickle.loads(sent))
        with self._lock:
            self.calls.append((method, *pickle.loads(sent)))
            if not self.is_alive:
                call.settle(error=PeerDied(f"{self.name} was killed by the test"))
                return call
            self._open.add(call)
            group = getattr(function, "__ray_concurrency_group__", "default")
            if group not in self._queues:
                self._queues[group] = queue.SimpleQueue()
                threading.Thread(target=self._serve, args=(self._queues[group],), daemon=True).start()
            self._queues[group].put(call)
        return call

    def kill(self):
        with self._lock:
            self.is_alive = False
            lost, self._open = self._open, set()
        for call in lost:
            call.settle(error=PeerDied(f"{self.name} was killed by the test"))

    def drain(self):
        """Wait until all calls made so far have ended."""
        wait(list(self._open), PATIENCE)

    def at(self, method, point, action, nth):
        """Run `action(peer)` at a point of the nth call of a method from now on, or of every call if `nth` is None."""
        seen = self._counts.get(method, 0)
        self._actions.setdefault((method, point), {})[None if nth is None else seen + nth] = action

    def _serve(self, calls):
        while self.is_alive:
            self._run(calls.get())

    def _run(self, call):
        if not self.is_alive:
            return
        number = self._counts[call.method] = self._counts.get(call.method, 0) + 1
        try:
            self._pass(call.method, "before", number)
            if not self.is_alive:
                return
            try:
                kwargs = {key: _resolved(value) for key, value in call.kwargs.items()}
                value = getattr(self.target, call.method)(*map(_resolved, call.args), **kwargs)
                value, error = pickle.loads(pickle.dumps(value)), None
            except Exception as raised:
                value, error = None, remote_error(self.name, raised)
            self._pass(call.method, "after", number)
        except _Dropped:
            value, error = None, PeerUnavailable(f"the connection to {self.name} broke")
        with self._lock:
            self._open.discard(call)
        if self.is_alive:
            call.settle(value, error)

    def _pass(self, method, point, number):
        actions = self._actions.get((method, point), {})
        action = actions.get(number) or actions.get(None)
        if action is not None:
            action(self)


class _Shared:
    def __init__(self, value):
        self.value = value


def _resolved(value):
    return value.value if isinstance(value, _Shared) else value


class ThreadPeers(Peers):
    def __init__(self, **targets):
        super().__init__()
        self._peers = {}
        for name, target in targets.items():
            self.add(name, target)

    def add(self, name, target):
        """Make `target` the peer of this name; return the peer."""
        self._peers[name] = ThreadPeer(name, target)
        return self._peers[name]

    def __getitem__(self, name):
        return self._peers[name]

    def __contains__(self, name):
        return name in self._peers

    def _lookup(self, name):
        peer = self._peers.get(name)
        return peer if peer is not None and peer.is_alive else None

    def _names(self):
        return [name for name, peer in self._peers.items() if peer.is_alive]

    def share(self, value):
        return _Shared(value)

    def kill(self, name):
        self._peers[name].kill()

    def hold(self, name, method, point="before", *, nth=1):
        held = Hold()
        self._peers[name].at(method, point, held, nth)
        return held

    def kill_at(self, name, method, point="before", *, nth=1):
        self._peers[name].at(method, point, ThreadPeer.kill, nth)

    def drop_reply(self, name, method, *, nth=1):
        self._peers[name].at(method, "after", lose, nth)

    def drop_call(self, name, method, *, nth=1):
        self._peers[name].at(method, "before", lose, nth)


class LocalQueue:
    """A replay buffer's queue in this process. Entries are pickled, as for an actor."""

    def __init__(self):
        self._entries = []

    def size(self):
        return len(self._entries)

    def put_all(self, entries):
        self._entries += [pickle.dumps(entry) for entry in entries]

    def get(self):
        return pickle.loads(self._entries.pop(0)) if self._entries else None

    def close(self):
        pass

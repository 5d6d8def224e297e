"""Ray actors as peers: every outcome of a call."""

from concurrent.futures import FIRST_COMPLETED, wait

import pytest
import ray

from coati.errors import ActorNotFound, PeerDied, RemoteError
from coati.ray.peers import RayPeers

PATIENCE = 60.0


@ray.remote(num_cpus=0)
class Echo:
    def hear(self, value):
        return value

    def fail(self):
        raise KeyError("no such thing")

    async def hang(self):
        import asyncio

        await asyncio.sleep(3600)


def test_a_call_ends_in_a_value_an_error_a_deadline_or_the_death_of_the_peer(keep, unique):
    name = unique("echo")
    actor = keep(Echo.options(name=name).remote())
    peers = RayPeers()
    peer = peers.find(name, role="echo", timeout=PATIENCE)
    assert peer.call("hear", peers.share([1, 2])).result(PATIENCE) == [1, 2]
    with pytest.raises(AttributeError):
        peer.call("speak")
    with pytest.raises(RemoteError) as caught:
        peer.call("fail").result(PATIENCE)
    assert type(caught.value.cause) is KeyError
    with pytest.raises(ActorNotFound, match=rf"'nobody'.*{name}"):  # lists the existing actors
        peers.find("nobody", role="echo", timeout=0.1)
    hanging, quick = peer.call("hang"), peer.call("hear", 3)
    assert wait([hanging, quick], PATIENCE, FIRST_COMPLETED).done == {quick}
    both = [peer.call("hear", value) for value in range(2)]
    assert [call.result(PATIENCE) for call in both] == [0, 1]
    with pytest.raises(TimeoutError):
        hanging.result(0.01)
    ray.kill(actor)
    with pytest.raises(PeerDied):  # ray.kill returns before the actor has ended; this waits for its end
        hanging.result(PATIENCE)
    with pytest.raises(PeerDied):
        peer.call("hear", 4).result(PATIENCE)
    assert peers.find_now(name) is peer

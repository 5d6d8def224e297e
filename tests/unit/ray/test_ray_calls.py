"""How Ray's errors are mapped to coati's."""

from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    GetTimeoutError,
    ObjectLostError,
    OutOfDiskError,
    RayTaskError,
)

from coati.errors import PeerDied, PeerUnavailable, RemoteError
from coati.ray.peers import ray_call

RAISED_BY_THE_METHOD = RayTaskError("method", "traceback", GetTimeoutError("inside of the method"))


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (ActorDiedError(), PeerDied),
        (ActorUnavailableError("busy", None), PeerUnavailable),
        # The actor is alive and may have run the method: the caller retries with the same ids.
        (ObjectLostError("00" * 28, None, ""), PeerUnavailable),
        (OutOfDiskError("full"), PeerUnavailable),
        (RAISED_BY_THE_METHOD.as_instanceof_cause(), RemoteError),
    ],
)
def test_only_the_death_of_an_actor_is_reported_as_a_death(answer, expected):
    answered = Future()
    call = ray_call("trainer-0", SimpleNamespace(future=lambda: answered))
    assert not call.done()
    answered.set_exception(answer)
    with pytest.raises(expected):
        call.result(0.0)

"""What an answer of Ray means for a caller."""

import pytest
import ray
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    GetTimeoutError,
    ObjectLostError,
    OutOfDiskError,
    RayTaskError,
)

from coati.errors import DeadlineExceeded, PeerDied, PeerUnavailable, RemoteError
from coati.ray.peers import RayCall

RAISED_BY_THE_METHOD = RayTaskError("method", "traceback", GetTimeoutError("inside of the method"))


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (GetTimeoutError("late"), DeadlineExceeded),
        (ActorDiedError(), PeerDied),
        (ActorUnavailableError("busy", None), PeerUnavailable),
        # The actor lives and may have done what was asked: the caller asks again with the same ids.
        (ObjectLostError("00" * 28, None, ""), PeerUnavailable),
        (OutOfDiskError("full"), PeerUnavailable),
        (RAISED_BY_THE_METHOD.as_instanceof_cause(), RemoteError),
    ],
)
def test_only_the_death_of_an_actor_counts_as_one(monkeypatch, answer, expected):
    def get(ref, timeout):
        raise answer

    monkeypatch.setattr(ray, "get", get)
    with pytest.raises(expected):
        RayCall("trainer-0", "buffer_extend", ref=None).result(1.0)

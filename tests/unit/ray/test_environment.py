"""The environment of an actor, and the reason of an actor's death."""

import os
import re

import pytest
from ray.exceptions import ActorDiedError, ActorDiedErrorContext, RayActorError

from coati.actors.host import apply_env_info
from coati.errors import ConfigError
from coati.ray.detached_trainer_base import DetachedTrainer
from coati.ray.experience_maker_holder import MakerHolder
from coati.ray.peers import death_reason


def test_env_info_touches_five_names_and_refuses_others(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "before")
    before = dict(os.environ)
    info = {"rank": 1, "local_rank": 0, "world_size": "2", "master_addr": "10.0.0.1", "master_port": 29500}
    apply_env_info(info)
    changed = {name: value for name, value in os.environ.items() if before.get(name) != value}
    assert changed == {
        "RANK": "1",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
    }
    now = dict(os.environ)
    with pytest.raises(ConfigError, match=r"env_info may hold local_rank, .* got 'aws_secret'"):
        apply_env_info({"rank": "7", "aws_secret": "hush"})
    assert dict(os.environ) == now, "nothing is set if any name is refused"
    apply_env_info(None)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (
            "The actor died because its node has died. Node Id: f6c8\n\tthe actor's node was terminated unexpectedly: "
            "health check failed due to missing too many heartbeats",
            "The actor died because its node has died. Node Id: f6c8 the actor's node was terminated unexpectedly: "
            "health check failed due to missing too many heartbeats",
        ),
        ("its worker process has died. Worker exit type: SYSTEM_ERROR", "its worker process has died. .*SYSTEM_ERROR"),
        (
            "its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits "
            "with a connection error code 2. End of file. Some common causes include: (1) the process was killed by "
            "the OOM killer due to high memory usage, (2) ray stop --force was called.",
            "its worker process has died. .* code 2. End of file",
        ),
        ("", "its node is gone or its process was killed; Ray gives no reason .*See the log."),
    ],
)
def test_an_actor_that_died_has_a_reason(said, reason):
    # Ray 2.60 wrote this text about a node when its raylet was killed.
    context = ActorDiedErrorContext(
        class_name="Maker", actor_id=b"1" * 16, pid=10193, name="maker-0", node_ip_address="192.0.2.2"
    )
    context.error_message = said
    assert re.fullmatch(reason, death_reason(ActorDiedError(context)))
    assert death_reason(ActorDiedError()).startswith("its node is gone or its process was killed; ")


def test_the_reason_of_a_constructor_is_what_it_raised_with_all_its_lines():
    text = "in its creation task\n  File 'a.py', line 1\n    fail()\ncoati.errors.ConfigError: 2 are wrong:\n  a\n  b"
    assert death_reason(RayActorError(error_msg=text)) == "2 are wrong: a b"


def test_the_groups_of_makers_are_not_those_of_trainers():
    assert MakerHolder.report.__ray_concurrency_group__ == "experience_io"
    assert not hasattr(DetachedTrainer.report, "__ray_concurrency_group__")

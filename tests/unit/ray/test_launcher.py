"""The driver of a run: it starts, polls, stops, fails and saves. Makers and trainers are threads."""

import contextlib
import functools
import json
from types import SimpleNamespace

import pytest
from fake_actors import Factory, Host
from ray_testing import Background
from thread_peers import PATIENCE, ThreadCall

from coati.config import build_config, load_config
from coati.errors import (
    ConfigError,
    DataError,
    DeadlineExceeded,
    PeerDied,
    RewardError,
    RunStopped,
    StartFailed,
)
from coati.monitor.run_log import RunLog
from coati.ray import launcher, run_actor, supervisor
from coati.ray.launcher import DetachedRun
from coati.trainer import checkpoints


class Stage:
    """A run before its start; `on_turn(host)` is called in every turn of the driver's loop."""

    def __init__(self, folder, *, makers=1, trainers=1, train=None, topology=None, seconds=PATIENCE):
        self.host, self.folder, self.snapshots, self.should_stop = Host(), folder, [], False
        self.on_turn = lambda host: None
        config = build_config(
            {
                "run": {"output": str(folder)},
                "model": {"path": "m"},
                "prompts": {"path": "p.jsonl"},
                "reward": {"function": "module:function"},
                "train": {"total_steps": 6, "batch_size": 2, **(train or {})},
                "topology": {"makers": makers, "trainers": trainers, **(topology or {})},
                "deadlines": {"start_seconds": seconds, "stall_seconds": 30.0},
            }
        )
        self.log = RunLog(folder, total_steps=6)
        self.run = DetachedRun(
            config,
            self.log,
            on_progress=self._turn,
            should_stop=lambda: self.should_stop,
            make_factory=functools.partial(Factory, host=self.host),
        )

    def _turn(self, snapshot):
        self.snapshots.append(snapshot)
        is_training = snapshot.message == "" or snapshot.message.endswith("working")
        if is_training and "trainer-0" in self.host.peers:
            self.on_turn(self.host)

    def go(self):
        try:
            self.run.run(str(self.folder / "model"))
        finally:
            self.log.flush()


@pytest.fixture
def stage(tmp_path, monkeypatch):
    @contextlib.contextmanager
    def here(config, **_):
        yield False

    monkeypatch.setattr(launcher, "connected", here)
    monkeypatch.setattr(launcher, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(run_actor, "_FIRST_BACKOFF_SECONDS", 0.0)
    monkeypatch.setattr(supervisor, "NAME_SECONDS", 0.0)
    monkeypatch.setattr(launcher.build.tempfile, "gettempdir", lambda: str(tmp_path / "elsewhere"))
    (tmp_path / "out").mkdir()
    return functools.partial(Stage, tmp_path / "out")


def end_training(host):
    host["trainer-0"].ended.set()


def test_a_run_starts_trains_stops_its_makers_saves_and_kills_all_actors(stage):
    one = stage(makers=2)
    one.on_turn = end_training
    one.go()
    assert one.host["trainer-0"].saved == [str(one.folder / "model")]
    assert all(one.host[name].ended.is_set() for name in ("maker-0", "maker-1"))
    assert sorted(one.host.killed) == ["maker-0", "maker-1", "trainer-0"]


def test_all_actors_are_polled_at_once_and_a_busy_one_delays_none(stage, monkeypatch):
    one = stage(makers=3)
    holds, one.num_asked = [], []
    waited_for = []
    wait = supervisor.wait

    def watched_wait(calls, timeout, *until):
        if not until:
            waited_for.append({call.name for call in calls})
        return wait(calls, timeout, *until)

    monkeypatch.setattr(supervisor, "wait", watched_wait)

    def begin(host):
        holds.extend(host.peers.hold(f"maker-{index}", "report") for index in range(3))
        one.on_turn = train_when_all_are_busy

    def train_when_all_are_busy(host):
        if all(held.is_reached for held in holds):
            host["trainer-0"].step(1)
            one.on_turn = wait_for_the_trainers_row

    def wait_for_the_trainers_row(host):
        one.num_asked.append(sum(call[0] == "report" for call in host.peers["maker-0"].calls))
        assert waited_for[-1] == {"trainer-0", "maker-0", "maker-1", "maker-2"}, "a single wait for all actors"
        if one.snapshots[-1].step == 1:  # while every maker is busy
            for held in holds:
                held.release()
            one.on_turn = lambda host: None
            end_training(host)

    one.on_turn = begin
    one.go()
    assert len(set(one.num_asked)) == 1, "a pending call is not repeated"
    assert (one.snapshots[-1].buffer_batches, one.snapshots[-1].num_made) == (3, 8)
    assert json.loads((one.folder / "metrics.jsonl").read_text().splitlines()[0])["policy/loss"] == 1


def test_a_warning_of_an_actor_is_shown(stage, caplog):
    one = stage(makers=2)

    def warn(host):
        for name in ("maker-0", "maker-1"):
            host[name].records.append({"warning": "the reference engine", "kind": "engine"})
        one.on_turn = end_training

    one.on_turn = warn
    one.go()
    assert [one for one in caplog.messages if "engine" in one] == [f"maker-{n}: the reference engine" for n in (0, 1)]


def test_an_exception_in_an_actor_ends_the_run_with_its_name(stage):
    one = stage(makers=2)

    def fail(host):
        host["maker-1"].error = RewardError("no such judge")
        host["maker-1"].ended.set()

    one.on_turn = fail
    with pytest.raises(RewardError, match="no such judge") as caught:
        one.go()
    assert "raised in maker-1" in caught.value.__notes__
    assert sorted(one.host.killed) == ["maker-0", "maker-1", "trainer-0"]


@pytest.mark.parametrize("step", [0, 2], ids=["no checkpoint", "a checkpoint"])
def test_when_a_trainer_dies_all_trainers_restart_and_makers_survive(stage, step, monkeypatch, caplog):
    one = stage(makers=2, trainers=2)
    checkpoint = one.folder / "checkpoints" / f"version-{step}"
    if step:
        checkpoint.mkdir(parents=True)
        state = {"version": step, "counters": {"batches": step}, "ranks": []}
        monkeypatch.setattr(checkpoints, "find_checkpoint", lambda folder: (checkpoint, state))

    def train(host):
        for batch in (1, 2, 3):
            host["trainer-0"].step(batch)
        one.on_turn = die_when_read

    def die_when_read(host):
        if one.snapshots[-1].step == 3:
            one.first = [host.peers[f"trainer-{rank}"] for rank in range(2)]
            host["trainer-0"].error = RuntimeError("connection closed by peer")  # the driver may see this first
            host["trainer-0"].ended.set()
            host.peers.kill("trainer-1")
            one.on_turn = train_again

    def train_again(host):
        assert one.snapshots[-1].step == step
        for batch in (3, 4):
            host["trainer-0"].step(batch)
        one.on_turn = end_when_read

    def end_when_read(host):
        if one.snapshots[-1].step == 4:
            for rank in range(2):
                host[f"trainer-{rank}"].ended.set()

    one.on_turn = train
    one.go()
    assert one.host.started == ["trainer-0", "trainer-1", "maker-0", "maker-1", "trainer-0", "trainer-1"]
    assert not any(peer.is_alive for peer in one.first), "the surviving rank is killed too"
    for rank, makers in enumerate((["maker-0"], ["maker-1"])):
        trainer = one.host[f"trainer-{rank}"]
        options = trainer.arguments["options"]
        assert (options.incarnation, options.resume) == (1, checkpoint if step else None)
        assert trainer.arguments["experience_maker_holder_name_list"] == trainer.makers == makers
        assert trainer.is_synced
    rows = [json.loads(line) for line in (one.folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [*range(1, step + 1), 3, 4]
    assert one.snapshots[-1].restarts["trainers"] == rows[-1]["restarts/trainers"] == 1
    assert ("from its beginning" in caplog.text) == (step == 0)


def test_a_trainer_that_dies_while_reloading_is_restarted_again(stage):
    one = stage()
    left = [2]

    def die(host):
        host.peers.kill("trainer-0")
        one.on_turn = end_training

    def die_in_the_constructor(name):
        if name == "trainer-0" and len(one.host.started) > 2 and left[0]:
            left[0] -= 1
            one.host.peers.kill(name)

    one.on_turn, one.host.on_start = die, die_in_the_constructor
    one.go()
    assert one.host["trainer-0"].arguments["options"].incarnation == 3


def test_new_trainers_hear_of_a_maker_that_does_not_answer(stage, clock):
    one = stage(makers=2)

    def begin(host):
        one.held = host.peers.hold("maker-1", "report")
        one.on_turn = stall

    def stall(host):
        if one.held.is_reached:
            clock.now += 31.0
            one.on_turn = die_when_released

    def die_when_released(host):
        if "maker-1" in host["trainer-0"].released:
            one.first = host["trainer-0"]
            host.peers.kill("trainer-0")
            one.on_turn = end_when_the_new_one_was_told

    def end_when_the_new_one_was_told(host):
        if host["trainer-0"] is not one.first and "maker-1" in host["trainer-0"].released:
            one.held.release()
            end_training(host)

    one.on_turn = begin
    one.go()
    assert one.host.started.count("trainer-0") == 2


def test_a_rank_that_cannot_start_because_another_died_does_not_end_the_run(stage):
    one = stage(trainers=2)

    def die(host):
        host.peers.kill("trainer-0")
        one.host.on_start, one.on_turn = fail_to_start, end

    def fail_to_start(name):
        peer = one.host.peers[name]
        if name == "trainer-0":
            peer.call = lambda *_: failed_call(StartFailed("connection closed by peer"))
        else:
            one.host.on_start = lambda name: None
            one.held = one.host.peers.hold(name, "report")
            one.killing = Background(lambda: one.held.reached() or peer.kill())

    def end(host):
        for rank in range(2):
            host[f"trainer-{rank}"].ended.set()

    one.on_turn = die
    one.go()
    one.held.release()
    assert one.host["trainer-0"].arguments["options"].incarnation == 2


def failed_call(error):
    call = ThreadCall("trainer-0", "report", (), {})
    call.settle(error=error)
    return call


def test_when_trainers_die_too_often_the_run_ends(stage):
    one = stage(topology={"max_restarts": 2})
    one.on_turn = lambda host: host.peers.kill("trainer-0")
    with pytest.raises(PeerDied, match=r"trainer-0 died.*max_restarts allows 2 restarts"):
        one.go()
    assert one.host.started.count("trainer-0") == 3


@pytest.mark.parametrize("error", [DataError("no such sample"), ValueError("their own code"), RuntimeError("theirs")])
def test_an_exception_in_a_trainer_causes_no_restart(stage, error, monkeypatch):
    monkeypatch.setattr(supervisor, "_DEATH_SECONDS", 0.1)  # the other rank is alive and waiting for this one
    one = stage(trainers=2)

    def fail(host):
        host["trainer-1"].error = error
        host["trainer-1"].ended.set()

    one.on_turn = fail
    with pytest.raises(type(error), match=str(error)) as caught:
        one.go()
    assert "raised in trainer-1" in caught.value.__notes__
    assert one.host.started.count("trainer-1") == 1


def test_a_stop_while_trainers_restart_saves_no_model(stage):
    one = stage()

    def die(host):
        host.peers.kill("trainer-0")
        one.host.on_start = stop

    def stop(name):
        one.host.peers.hold(name, "report")
        one.should_stop = True

    one.on_turn = die
    with pytest.raises(RunStopped, match="was not saved"):
        one.go()
    assert "maker-0" in one.host.killed


def test_a_maker_that_dies_while_trainers_restart_is_replaced(stage):
    one = stage(makers=2)

    def die(host):
        one.on_turn = lambda host: None
        one.host.on_start = kill_a_maker
        host.peers.kill("trainer-0")

    def kill_a_maker(name):
        if name == "trainer-0":
            one.held = one.host.peers.hold(name, "report")
            one.host.peers.kill("maker-1")
        elif name == "maker-1":
            one.held.release()
            one.on_turn = end_when_told

    def end_when_told(host):
        if host["trainer-0"].makers == ["maker-0", "maker-1"]:
            end_training(host)

    one.on_turn = die
    one.go()
    assert one.host.started.count("maker-1") == one.host.started.count("trainer-0") == 2


def test_a_maker_that_dies_is_replaced_and_its_successor_is_read_from_the_beginning(stage, caplog):
    one = stage(makers=2)

    def warn(host):
        host["maker-1"].records.append({"warning": "the first life", "kind": ""})
        one.first, one.on_turn = host.peers["maker-1"], die_when_read

    def die_when_read(host):
        if "the first life" in caplog.text:
            host.peers.kill("maker-1")
            one.on_turn = wait_for_the_successor

    def wait_for_the_successor(host):
        if host.peers["maker-1"] is not one.first:
            host["maker-1"].records.append({"warning": "the second life", "kind": ""})
            one.on_turn = end_when_read

    def end_when_read(host):
        if "the second life" in caplog.text:
            end_training(host)

    one.on_turn = warn
    one.go()
    trainer = one.host["trainer-0"]
    assert trainer.released == ["maker-1"]
    assert trainer.makers == ["maker-0", "maker-1"]
    questions = [args for method, args, _ in one.host.peers["maker-1"].calls if method == "report"]
    assert questions[0] == (0, 0)
    assert one.host["maker-1"].ended.is_set(), "it is stopped at the end like all others"


@pytest.mark.parametrize("lose", ["drop_call", "drop_reply"])
def test_calls_of_the_driver_that_are_lost_are_made_again(stage, lose):
    one = stage(makers=2)
    lost = {
        "maker": ("report", "stop"),
        "trainer": (
            "report",
            "sync_models_to_remote_makers",
            "release_maker",
            "change_makers",
            "strategy_save_actor",
        ),
    }

    def lose_first_calls(name):
        for method in lost[name.partition("-")[0]]:
            getattr(one.host.peers, lose)(name, method)

    def die(host):
        one.first, one.on_turn = host.peers["maker-1"], end_when_it_is_known
        host.peers.kill("maker-1")

    def end_when_it_is_known(host):
        trainer = host["trainer-0"]
        if host.peers["maker-1"] is not one.first and trainer.released and trainer.makers == ["maker-0", "maker-1"]:
            end_training(host)

    one.host.on_start, one.on_turn = lose_first_calls, die
    one.go()
    trainer = one.host["trainer-0"]
    assert trainer.is_synced
    assert set(trainer.released) == {"maker-1"}
    assert set(trainer.saved) == {str(one.folder / "model")}
    assert all(one.host[name].ended.is_set() for name in ("maker-0", "maker-1"))


def test_when_makers_die_too_often_the_run_ends_with_the_name_of_the_last(stage):
    one = stage(makers=2, topology={"max_restarts": 2})
    killed = []

    def kill_each_successor(host):
        peer = host.peers["maker-1"]
        if peer not in killed:
            killed.append(peer)
            peer.kill()

    one.on_turn = kill_each_successor
    with pytest.raises(PeerDied, match=r"maker-1 died.*topology\.max_restarts allows 2 restarts"):
        one.go()
    assert len(killed) == 3


@pytest.fixture
def clock(monkeypatch):
    """A clock for the driver that only tests advance."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now, sleep=lambda seconds: None)
    for module in (launcher, supervisor, run_actor):
        monkeypatch.setattr(module, "time", clock)
    return clock


def test_a_maker_that_does_not_answer_has_its_work_given_to_others_once_until_it_answers_again(stage, clock, caplog):
    one = stage(makers=2)
    later = []

    def begin(host):
        one.held = host.peers.hold("maker-1", "report")
        one.on_turn = wait_for_the_question

    def wait_for_the_question(host):
        if one.held.is_reached:
            clock.now += 29.0
            one.on_turn = stall

    def stall(host):
        assert host["trainer-0"].released == []
        clock.now += 2.0
        one.on_turn = watch

    def watch(host):
        clock.now += 31.0
        if "maker-1" in host["trainer-0"].released:
            later.append(host)
        if len(later) == 5:  # turns
            one.held.release()
            one.on_turn = hold_when_it_answers

    def hold_when_it_answers(host):
        if "maker-1 is answering again" in caplog.text:
            one.held = host.peers.hold("maker-1", "report")
            one.on_turn = stall_again

    def stall_again(host):
        if one.held.is_reached:
            clock.now += 31.0
            one.on_turn = end_when_released_again

    def end_when_released_again(host):
        if host["trainer-0"].released.count("maker-1") == 2:
            one.held.release()
            end_training(host)

    one.on_turn = begin
    one.go()
    released = one.host["trainer-0"].released
    assert released.count("maker-1") == caplog.text.count("maker-1 has not answered") == 2


def test_a_maker_that_stalled_and_died_is_not_reported_as_answering(stage, clock, caplog):
    one = stage(makers=2)

    def begin(host):
        one.held, one.first = host.peers.hold("maker-1", "report"), host.peers["maker-1"]
        one.on_turn = stall

    def stall(host):
        if one.held.is_reached:
            clock.now += 31.0
            one.on_turn = kill_when_released

    def kill_when_released(host):
        if "maker-1" in host["trainer-0"].released:
            host.peers.kill("maker-1")
            one.on_turn = end_when_replaced

    def end_when_replaced(host):
        if host.peers["maker-1"] is not one.first and any(
            method == "report" for method, *_ in host.peers["maker-1"].calls
        ):
            end_training(host)

    one.on_turn = begin
    one.go()
    one.held.release()
    assert "maker-1 is answering again" not in caplog.text


def test_makers_join_and_leave_a_run_on_request(stage):
    one, left, seen = stage(makers=1), [3, 2, 3], []

    def ask(host):
        names = [name for name in host.peers["trainer-0"].target.makers or () if host.peers[name].is_alive]
        if one.snapshots[-1].message or (seen and len(names) != seen[-1]):
            return  # not reached yet
        if left:
            seen.append(left.pop(0))
            (one.folder / "control.json").write_text(json.dumps({"makers": seen[-1]}))
        else:
            one.on_turn = lambda host: None
            end_training(host)

    one.on_turn = ask
    one.go()
    trainer = one.host["trainer-0"]
    assert trainer.makers == ["maker-0", "maker-1", "maker-2"]
    assert trainer.released == ["maker-2"]
    assert one.host.killed[0] == "maker-2"
    assert {"1 of 3 makers working", ""} <= {snapshot.message for snapshot in one.snapshots}
    assert load_config(one.folder / "config.toml").topology.makers == 3, "the number applies after a resume"


def test_a_constructor_that_fails_ends_the_run_with_its_name(stage):
    one = stage()
    one.host.on_start = lambda name: name == "maker-0" and one.host.peers.kill(name)
    with pytest.raises(PeerDied, match="maker-0 died"):
        one.go()


def test_an_actor_that_does_not_start_in_time_is_named(stage):
    one = stage(seconds=0.1)
    one.host.on_start = lambda name: name == "maker-0" and one.host.peers.hold(name, "report")
    with pytest.raises(DeadlineExceeded, match="maker-0"):
        one.go()


def test_a_failed_trainer_ends_the_run_without_waiting_for_the_others(stage):
    one = stage(trainers=2)

    def break_one(name):
        if name == "trainer-1":
            one.host[name].sync_models_to_remote_makers = lambda: 1 / 0
        elif name == "trainer-0":
            one.host.peers.hold(name, "sync_models_to_remote_makers")  # it is waiting for the other rank

    one.host.on_start = break_one
    with pytest.raises(ZeroDivisionError):
        one.go()


def test_a_stop_before_training_saves_nothing(stage):
    one = stage()
    one.should_stop = True
    with pytest.raises(RunStopped, match="nothing to save"):
        one.go()
    assert one.host["trainer-0"].saved == []


def test_a_stop_ends_all_loops_and_saves_the_model(stage):
    one = stage(makers=2)
    one.on_turn = lambda host: setattr(one, "should_stop", True)
    one.go()
    assert one.host["trainer-0"].saved == [str(one.folder / "model")]


@pytest.mark.parametrize("num_full_disks", [0, 1, 2])
def test_the_model_is_saved_elsewhere_if_the_runs_disk_is_full(stage, num_full_disks, tmp_path):
    one = stage()

    def learn_and_fail(host):
        host["trainer-0"].num_full_disks = num_full_disks
        host["trainer-0"].step(7)
        one.on_turn = fail

    def fail(host):
        if one.snapshots[-1].step == 7:
            host["maker-0"].error = ConfigError("the run failed")
            host["maker-0"].ended.set()

    one.on_turn = learn_and_fail
    with pytest.raises(ConfigError, match="the run failed") as caught:
        one.go()
    saved, notes = one.host["trainer-0"].saved, " ".join(caught.value.__notes__)
    if num_full_disks == 2:
        assert saved == []
        assert "could not be saved" in notes
        assert "was saved" not in notes
    else:
        (place,) = saved
        assert notes.count("was saved") == notes.count(f"was saved to {place}") == 1
        assert place.startswith(str(tmp_path / "elsewhere")) == (num_full_disks == 1)


def test_a_group_that_failed_saves_no_model(stage):
    one = stage(trainers=2)

    def fail(host):
        host["trainer-0"].step(7)
        if one.snapshots[-1].step == 7:
            host["trainer-1"].fail(DataError("no such sample"))

    one.on_turn = fail
    with pytest.raises(DataError, match="no such sample") as caught:
        one.go()
    assert "cannot save the model" in " ".join(caught.value.__notes__)

"""Makers that join and leave while a run trains, over Ray."""

import json
from collections import Counter

import pytest
import ray
from ray_testing import PATIENCE

from coati.errors import PeerDied
from coati.monitor import read_jsonl
from coati.monitor.run_log import RunLog

PACED = """
import ray

def paced(completions, **_):
    ray.get(ray.get_actor("pace", namespace="tests").step.remote())
    return [float(len(text)) for text in completions]
"""


@ray.remote(num_cpus=0)
class Pace:
    """Lets as many batches be scored as the test says, and then any number."""

    def __init__(self):
        import asyncio

        self._permits = asyncio.Semaphore(0)
        self._is_free = False

    async def step(self):
        if not self._is_free:
            await self._permits.acquire()

    async def permit(self, number):
        for _ in range(number):
            self._permits.release()

    async def set_free(self):
        self._is_free = True
        await self.permit(1000)


class SampleLog(RunLog):
    """Notes the id of every sample that any maker has made."""

    def maker_records(self, records):
        self.sample_ids = getattr(self, "sample_ids", [])
        self.sample_ids += [sample["sample_id"] for record in records for sample in record["samples"]]
        super().maker_records(records)
        SampleLog.last = self


class Director:
    """Asks a run for makers, one request after the other, from inside its loop; training goes on only as needed."""

    def __init__(self, folder, pace, wanted):
        self._folder, self._pace, self._wanted = folder, pace, list(wanted)
        self._asked = 0
        self.states = []

    def __call__(self):
        path = self._folder / "state.json"
        if not path.exists():
            return False
        state = json.loads(path.read_text())
        self.states.append(state)
        if state["status"] == "running":
            is_first = not self._asked
            if is_first or (state["request_id"] == str(self._asked) and state["answer"] in ("done", "refused")):
                self._ask_next()
            elif "weights" in state["message"] or "finishing" in state["message"]:
                ray.get(self._pace.permit.remote(2), timeout=PATIENCE)
        return False

    def _ask_next(self):
        if not self._wanted:
            ray.get(self._pace.set_free.remote(), timeout=PATIENCE)
            return
        self._asked += 1
        request = {"request_id": str(self._asked), "makers": self._wanted.pop(0)}
        (self._folder / "control.json").write_text(json.dumps(request))


@pytest.fixture
def paced_config(make_config, tmp_path, keep):
    (tmp_path / "paced.py").write_text(PACED)
    pace = keep(Pace.options(name="pace").remote())

    def make(**settings):
        return make_config(function="paced:paced", **settings), pace

    return make


def test_one_maker_then_three_then_two_and_every_sample_is_trained_once(run, paced_config, tmp_path):
    config, pace = paced_config(makers=1, trainers=2, max_staleness=1, train={"total_steps": 30})
    director = Director(tmp_path / "out", pace, [3, 2])
    progress = run(config, should_stop=director, log_class=SampleLog, makers=["maker-0", "maker-1"])
    for trainer in (progress[f"trainer-{rank}"] for rank in range(2)):
        assert (trainer.state, trainer.num_batches, trainer.num_samples, trainer.version) == ("finished", 30, 60, 30)
    ids = SampleLog.last.sample_ids
    assert len(ids) == 120
    assert max(Counter(ids).values()) == 1, "no two samples share an id, whoever made them"
    assert all(progress[name].num_delivered > 0 for name in ("maker-0", "maker-1"))
    # maker-2 is gone, and the three delivered all there is to train on.
    assert 0 < sum(progress[name].num_delivered for name in ("maker-0", "maker-1")) < 120
    assert {progress[name].version for name in ("maker-0", "maker-1")} == {30}
    ages = [row["train/age_max"] for row in read_jsonl(tmp_path / "metrics.jsonl") if "train/age_max" in row]
    assert len(ages) == 30
    assert max(ages) <= 1
    answers = [(state["request_id"], state["answer"], state["makers"]) for state in director.states]
    assert ("1", "done", 3) in answers
    assert ("2", "done", 2) in answers
    state = json.loads((tmp_path / "out" / "state.json").read_text())
    assert (state["status"], state["makers"], state["message"]) == ("ended", 2, "all is trained")


def test_a_newcomer_that_finds_no_room_is_refused_and_the_run_goes_on(run, paced_config, tmp_path):
    config, pace = paced_config(makers=1, trainers=1, max_staleness=0, train={"total_steps": 3})
    director = Director(tmp_path / "out", pace, [60])
    progress = run(config, should_stop=director)
    assert progress["trainer-0"].num_samples == 6
    refused = [state for state in director.states if state["answer"] == "refused"]
    assert "59 more makers need 59 CPUs, but 4 are free" in refused[0]["message"]
    assert refused[0]["makers"] == 1


def test_a_maker_that_dies_when_work_is_dealt_anew_ends_the_run_by_name(run, paced_config, tmp_path):
    config, pace = paced_config(makers=2, trainers=1, max_staleness=0, train={"total_steps": 100})
    director = Director(tmp_path / "out", pace, [1])

    def kill_and_direct():
        if (tmp_path / "out" / "state.json").exists() and not director._asked:
            state = json.loads((tmp_path / "out" / "state.json").read_text())
            if state["status"] == "running":
                ray.kill(ray.get_actor("maker-1"))
        return director()

    with pytest.raises(PeerDied, match="maker-1 died"):
        run(config, should_stop=kill_and_direct)
    assert json.loads((tmp_path / "out" / "state.json").read_text())["status"] == "ended"

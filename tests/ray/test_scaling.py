"""Makers that join and leave while a run trains, over Ray."""

import json
from collections import Counter

import pytest
import ray
from ray_testing import PATIENCE

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

    async def permit_one(self):
        if self._permits.locked():  # the last one was used
            self._permits.release()

    async def set_free(self):
        self._is_free = True
        for _ in range(1000):
            self._permits.release()


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
                ray.get(self._pace.permit_one.remote(), timeout=PATIENCE)
        return False

    def _ask_next(self):
        if not self._wanted:
            ray.get(self._pace.set_free.remote(), timeout=PATIENCE)
            return
        self._asked += 1
        request = {"request_id": str(self._asked), "makers": self._wanted.pop(0)}
        (self._folder / "control.json").write_text(json.dumps(request))

    def answer(self, number):
        """What the run said in the end to its n-th request."""
        mine = [state for state in self.states if state["request_id"] == str(number)]
        return next(state for state in mine if state["answer"] in ("done", "refused"))


@pytest.fixture
def paced_config(make_config, tmp_path, keep):
    (tmp_path / "paced.py").write_text(PACED)
    pace = keep(Pace.options(name="pace").remote())

    def make(**settings):
        return make_config(function="paced:paced", **settings), pace

    return make


def test_makers_are_refused_come_and_go_and_every_sample_is_trained_once(run, paced_config, tmp_path):
    """There is no room for 60. Then there are two, and then one."""
    config, pace = paced_config(makers=1, trainers=1, max_staleness=1, train={"total_steps": 12})
    director = Director(tmp_path / "out", pace, [60, 2, 1])
    progress = run(config, should_stop=director, log_class=SampleLog, makers=["maker-0"])
    no_room, two, one = (director.answer(number) for number in range(1, 4))
    assert (no_room["answer"], no_room["makers"]) == ("refused", 1)
    assert "59 CPUs" in no_room["message"]
    assert (two["answer"], two["makers"]) == ("done", 2)
    assert (one["answer"], one["makers"]) == ("done", 1)
    trainer = progress["trainer-0"]
    assert (trainer.state, trainer.num_batches, trainer.num_samples, trainer.version) == ("finished", 12, 24, 12)
    ids = SampleLog.last.sample_ids
    assert len(ids) == 24
    assert max(Counter(ids).values()) == 1, "no two samples share an id, whoever made them"
    assert 0 < progress["maker-0"].num_delivered <= 24
    assert progress["maker-0"].version == 12
    ages = [row["train/age_max"] for row in read_jsonl(tmp_path / "metrics.jsonl")]
    assert len(ages) == 12
    assert max(ages) <= 1
    state = json.loads((tmp_path / "out" / "state.json").read_text())
    assert (state["status"], state["makers"], state["message"]) == ("ended", 1, "completed")
    assert [row["actor"] for row in read_jsonl(tmp_path / "spans.jsonl") if row["what"] == "leave"] == ["maker-1"]

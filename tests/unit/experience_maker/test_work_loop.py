"""A maker's loop: rewards of one batch while the next is generated; nothing lost, doubled or out of order."""

import threading
import time
from concurrent.futures import wait
from types import SimpleNamespace

import pytest

from coati.config import Deadlines
from coati.errors import DeadlineExceeded, RewardError
from coati.experience_maker import NaiveExperienceMaker, work_loop
from coati.experience_maker.pipeline import ExperiencePipeline
from coati.experience_maker.work_loop import WorkLoop
from coati.experience_maker.work_source import WorkSource
from coati.models import Actor, Critic
from coati.monitor.records import RecordLog
from coati.prompts.batch import parse_prompts
from coati.rewards import FunctionReward, PendingScores, RewardScorer, WeightedSum
from coati.rollout import ReferenceEngine
from coati.weights.served import ServedModels, VerifiedUpdate

SECONDS = 30  # far longer than anything here takes
SIZE = 2


class Nothing:
    """A tokenizer for tests in which responses do not matter; prompts come as text."""

    def decode(self, ids, skip_special_tokens):
        return ""


class WatchedEngine(ReferenceEngine):
    """Records when it starts and ends, and calls a hook of the test before each token but the first."""

    def __init__(self, model, story, before_token):
        super().__init__(model)
        self._story, self._before_token = story, before_token

    def submit(self, samples):
        self._first = samples[0].id
        self._story.append(f"generate {self._first}")
        super().submit(samples)

    def advance(self):
        responses = super().advance()
        if responses:
            self._story.append(f"generated {self._first}")
        else:
            self._before_token(self._first)
        return responses


class Source(WorkSource):
    """Batches that a test provides."""

    def __init__(self):
        self.batches, self.settled, self.num_kept_back = iter(()), [], 0

    def wait_for_work(self, room):
        batch = next(self.batches, None)
        return batch and parse_prompts(batch)

    def close_leases(self, batch, items):
        self.settled.append((batch.samples[0].id, len(items)))
        return items[self.num_kept_back :]


class Rig:
    """A loop over real models, and a record of everything around it. Batches have `SIZE` samples.

    `reward(first)` returns the scores of the batch whose first sample has id `first`; None stands for scores of 1.0.
    """

    def __init__(
        self,
        llama,
        reward,
        *,
        terms=False,
        before_token=lambda _: None,
        maker_class=NaiveExperienceMaker,
        prompts_seconds=SECONDS,
    ):
        self.story, self.sent, self.begun, self.delivered_rewards = [], [], [], []
        self.has_room, self.stop, self.log = True, threading.Event(), RecordLog()

        def scores_of(prompts):
            return reward(int(prompts[0])) or [1.0] * len(prompts)

        self.reward = FunctionReward(scores_of)
        scorer = RewardScorer(WeightedSum([(self.reward, 1.0)]) if terms else self.reward, Nothing())
        actor = Actor(llama(seed=1))
        engine = WatchedEngine(actor, self.story, before_token)
        maker = maker_class(actor, Critic(llama(seed=2)), scorer, Actor(llama(seed=3)), engine=engine)
        self.score, maker.score_complete = maker.score_complete, self._score
        self.finish, maker.finalize = maker.finalize, self._finish
        self.finishing = threading.Event()
        self.served = ServedModels(maker.trained_models)
        self.pipeline = ExperiencePipeline(
            maker, self.served, generate_kwargs={"max_new_tokens": 2, "eos_token_id": []}
        )
        self.source = Source()
        sender = SimpleNamespace(send=self._send, has_room=lambda: self.has_room, collect=lambda: None)
        self.loop = WorkLoop(
            self.pipeline,
            self.source,
            sender,
            deadlines=Deadlines(batch_seconds=prompts_seconds),
            stop=self.stop,
            notify=lambda hook, *_: self.story.append(hook),
            record=lambda record: self.log.append(record),
        )

    @property
    def records(self):
        return self.log.since(0).records

    def run(self, num_batches=3, *, prompts=None):
        self.source.batches = iter(prompts or self.prompts(num_batches))
        self.loop.run()
        return [step for step in self.story if not step.startswith("on_")]

    def prompts(self, num_batches):
        for first in range(0, SIZE * num_batches, SIZE):
            yield self.batch(first)

    def batch(self, first):
        ids = list(range(first, first + SIZE))
        return {"input_ids": [[3, 4]] * SIZE, "sample_ids": ids, "prompt": list(map(str, ids))}

    def offer(self, version):
        weights = {
            ("actor", name): tensor for name, tensor in self.pipeline.experience_maker.actor.state_dict().items()
        }
        self.served.offer(VerifiedUpdate(version=version, tensors=weights, is_full=False))

    def _score(self):
        self.begun.append(self.score())
        return self.begun[-1]

    def _finish(self, batch):
        self.finishing.set()
        return self.finish(batch)

    def _send(self, items):
        ids = [int(item.sample_ids) for item in items]
        self.sent += ids
        self.delivered_rewards += [float(item.reward) for item in items]
        self.story.append(f"deliver {ids[0]}")


def test_the_next_batch_is_generated_during_the_reward_and_the_last_one_delivered_between_tokens(llama):
    second_begun = threading.Event()

    def reward(first):
        return None if first or second_begun.wait(SECONDS) else [-1.0, -1.0]

    def before_token(first):
        if first == SIZE:
            second_begun.set()
            rig.begun[0].scores.wait(SECONDS)

    rig = Rig(llama, reward, before_token=before_token)
    told = rig.run(2)
    assert told[:5] == ["generate 0", "generated 0", "generate 2", "deliver 0", "generated 2"]
    assert told[5:] == ["deliver 2"]
    assert rig.delivered_rewards[0] == 1.0  # not -1: the batch had started


def test_nothing_that_would_block_is_delivered_between_tokens(llama):
    # The models are in use there, so a wait would block commits of new weights.
    second_begun = threading.Event()

    def before_token(first):
        if first == SIZE:
            second_begun.set()
            rig.begun[0].scores.wait(SECONDS)

    rig = Rig(
        llama, lambda first: None if first or second_begun.wait(SECONDS) else [-1.0, -1.0], before_token=before_token
    )
    rig.has_room = False
    assert rig.run(2)[2:] == ["generate 2", "generated 2", "deliver 0", "deliver 2"]


def test_ready_batches_are_delivered_before_the_next_batch_starts(llama):
    rig = Rig(llama, lambda _: None)
    rig.reward.is_host_work = False  # so it is ready as soon as it is scored
    assert rig.run(2)[:3] == ["generate 0", "generated 0", "deliver 0"]


def test_batches_and_hooks_keep_their_order(llama):
    events = {first: threading.Event() for first in range(0, 8, 2)}

    def reward(first):  # each waits until the next batch is being generated, the last until its scores are used
        assert events[first + 2].wait(SECONDS) if first < 4 else rig.finishing.wait(SECONDS)

    rig = Rig(llama, reward, before_token=lambda first: events[first].set())
    told = rig.run(3)
    assert rig.sent == [0, 1, 2, 3, 4, 5]
    assert told.index("generate 2") < told.index("deliver 0") < told.index("deliver 2") < told.index("deliver 4")
    made = ["on_make_experience_start", "on_make_experience_end", "on_send_start", "deliver", "on_send_end"]
    one = ["on_batch_start", *made, "on_batch_end"]
    hooks = [step.split()[0] for step in rig.story if step.startswith(("on_", "deliver"))]
    assert hooks == one * 3


def test_the_source_accounts_for_every_batch_and_decides_what_is_sent(llama):
    rig = Rig(llama, lambda first: None if first else [float("nan")] * SIZE)
    rig.source.num_kept_back = 1
    rig.run(2)
    assert rig.source.settled == [(0, 0), (2, 2)]  # all of the first batch was dropped
    assert rig.sent == [3]


def test_prompts_are_requested_when_the_previous_batch_is_scored(llama):
    # The first batch has no scores until they are used.
    rig = Rig(llama, lambda _: rig.finishing.wait(SECONDS) and None)
    made_when_drawn = []

    def prompts():
        for first in (0, 2):
            made_when_drawn.append((len(rig.begun), list(rig.sent)))
            yield rig.batch(first)

    rig.run(prompts=prompts())
    assert made_when_drawn == [(0, []), (1, [])]


def test_at_a_stop_pending_batches_are_delivered_and_no_others_start(llama):
    scored = threading.Event()

    def reward(_):
        scored.set()
        rig.finishing.wait(SECONDS)

    rig = Rig(llama, reward)

    def prompts():
        yield rig.batch(0)
        assert scored.wait(SECONDS)
        rig.stop.set()
        yield rig.batch(2)

    assert rig.run(prompts=prompts()) == ["generate 0", "generated 0", "deliver 0"]


def test_an_error_of_a_pending_reward_ends_the_run_with_its_message(llama):
    second_begun = threading.Event()

    def reward(first):
        assert second_begun.wait(SECONDS)
        raise ZeroDivisionError("of nothing")

    def before_token(first):
        if first:
            second_begun.set()

    rig = Rig(llama, reward, before_token=before_token)
    with pytest.raises(RewardError, match="scores_of"):
        rig.run(3)
    assert "generate 2" in rig.story
    assert "generate 4" not in rig.story
    assert rig.sent == []


def test_prompts_may_wait_for_what_is_pending(llama):
    delivered, asked = threading.Event(), threading.Event()
    rig = Rig(llama, lambda first: None if first or asked.wait(SECONDS) else [-1.0, -1.0])
    rig.log.append = lambda record: delivered.set()

    def prompts():
        yield rig.batch(0)
        asked.set()
        assert delivered.wait(SECONDS)
        yield rig.batch(2)

    assert [step for step in rig.run(prompts=prompts()) if "generated" not in step] == [
        "generate 0",
        "deliver 0",
        "generate 2",
        "deliver 2",
    ]


def test_a_stop_ends_the_wait_for_prompts_that_do_not_come(llama, monkeypatch):
    run_is_over, answers = threading.Event(), []

    def prompts():
        yield rig.batch(0)
        answers.append(run_is_over.wait(SECONDS))

    def wait_and_stop(futures, timeout):
        if rig.sent:  # called inside the wait, with nothing pending
            rig.stop.set()
        return wait(futures, timeout)

    monkeypatch.setattr(work_loop, "wait", wait_and_stop)
    monkeypatch.setattr(work_loop, "_SLICE_SECONDS", 0.001)
    rig = Rig(llama, lambda _: None)
    rig.run(prompts=prompts())
    assert answers == []
    assert rig.sent == [0, 1]
    run_is_over.set()


def test_prompts_that_do_not_come_are_waited_for_until_the_deadline(llama, monkeypatch):
    monkeypatch.setattr(work_loop, "_SLICE_SECONDS", 0.01)
    end = threading.Event()
    rig = Rig(llama, lambda _: None, prompts_seconds=0.05)

    def prompts():
        yield rig.batch(0)
        end.wait(SECONDS)

    with pytest.raises(DeadlineExceeded, match="batch_seconds"):
        rig.run(prompts=prompts())
    end.set()
    assert rig.sent == [0, 1]  # finished work is not lost


def test_answers_of_trainers_extend_the_deadline_for_prompts(llama, monkeypatch):
    monkeypatch.setattr(work_loop, "_SLICE_SECONDS", 0.001)
    rig = Rig(llama, lambda _: None, prompts_seconds=1e-9)
    rig.source.last_answer = time.monotonic() + SECONDS  # as if trainers kept answering
    looks = threading.Semaphore(0)
    rig.loop.sender.collect = looks.release

    def prompts():
        for first in (0, 2):
            assert all(looks.acquire(timeout=SECONDS) for _ in range(3))  # long after the deadline
            yield rig.batch(first)

    rig.run(prompts=prompts())
    assert rig.sent == [0, 1, 2, 3]


def test_a_failure_after_an_error_does_not_hide_it(llama):
    def before_token(first):
        if first == 2:
            raise ZeroDivisionError("the cause")

    def reward(_):
        assert rig.finishing.wait(SECONDS)
        raise KeyError("the consequence")

    rig = Rig(llama, reward, before_token=before_token)
    with pytest.raises(ZeroDivisionError, match="the cause") as caught:
        rig.run(2)
    assert "the consequence" in "".join(caught.value.__notes__)
    assert rig.sent == []


def test_an_error_of_the_next_prompts_comes_after_the_batch_before(llama):
    rig = Rig(llama, lambda _: rig.finishing.wait(SECONDS) and None)  # no scores until they are used

    def prompts():
        yield rig.batch(0)
        raise ZeroDivisionError("no such prompt")

    with pytest.raises(ZeroDivisionError, match="no such prompt"):
        rig.run(prompts=prompts())
    assert rig.sent == [0, 1]


def test_an_error_of_the_next_batch_comes_after_the_batch_before(llama):
    def before_token(first):
        if first == SIZE:
            raise ZeroDivisionError("no such token")

    # The first batch has no scores until they are used, so it is pending when the second one fails.
    rig = Rig(llama, lambda _: rig.finishing.wait(SECONDS) and None, before_token=before_token)
    with pytest.raises(ZeroDivisionError, match="no such token"):
        rig.run(2)
    assert rig.sent == [0, 1]


def test_all_prompts_are_requested_on_one_thread(llama):
    # For example, some database connections must be used on the thread that opened them.
    threads, second_begun = set(), threading.Event()

    def prompts():
        for batch in rig.prompts(3):
            threads.add(threading.get_ident())
            yield batch

    rig = Rig(
        llama,
        lambda first: None if first or second_begun.wait(SECONDS) else [-1.0, -1.0],
        before_token=lambda first: first and second_begun.set(),
    )
    told = rig.run(prompts=prompts())
    assert told.index("generate 2") < told.index("deliver 0")  # it was pending when the second batch was requested
    assert len(threads) == 1
    assert threading.get_ident() not in threads


def test_each_record_describes_its_own_batch(llama):
    third_begun, offered = threading.Event(), threading.Event()

    def reward(first):
        if first == 2:
            rig.offer(7)  # for the third batch, which starts before this one ends
            offered.set()
            assert third_begun.wait(SECONDS)
        return [float(first), float(first)]

    def prompts():
        yield rig.batch(0)
        yield rig.batch(2)
        assert offered.wait(SECONDS)
        yield rig.batch(4)

    def before_token(first):
        if first == 4:
            third_begun.set()

    rig = Rig(llama, reward, terms=True, before_token=before_token)
    told = rig.run(prompts=prompts())
    assert told.index("generate 4") < told.index("deliver 2")
    metrics = [record["metrics"] for record in rig.records]
    assert [record["version"] for record in rig.records] == [0, 0, 7]
    assert [one["reward/term_scores_of"].value for one in metrics] == [0.0, 2.0, 4.0]
    assert [one["rollout/logprob_gap"].weight for one in metrics if "rollout/logprob_gap" in one] == [4, 4]
    assert [one["maker/samples"].value for one in metrics] == [2.0, 2.0, 2.0]


def test_waiting_for_a_reward_is_an_activity_of_its_own(llama, monkeypatch):
    waiting, wait = threading.Event(), PendingScores.wait
    monkeypatch.setattr(PendingScores, "wait", lambda self, seconds: (waiting.set(), wait(self, seconds)))
    rig = Rig(llama, lambda _: waiting.wait(SECONDS) and None)
    rig.run(1)
    assert rig.pipeline.timeline.read().seconds["wait_rewards"] > 0
    assert "wait/rewards_share" in rig.records[0]["metrics"]

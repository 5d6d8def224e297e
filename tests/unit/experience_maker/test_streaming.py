"""Continuous batching: groups are delivered as they end, free slots refilled at once, weights committed between tokens.

The models are real. The engine follows a script: the length of each response, and what happens between tokens.
"""

import dataclasses
import threading
from concurrent.futures import Future, wait
from types import SimpleNamespace

import pytest
import torch
from tiny import llama

from coati.config import AlgorithmSettings, Deadlines
from coati.experience import Sample
from coati.experience_maker import NaiveExperienceMaker
from coati.experience_maker.pipeline import ExperiencePipeline
from coati.experience_maker.work_loop import WorkLoop
from coati.experience_maker.work_source import WorkSource
from coati.models import Actor, Critic
from coati.rewards import FunctionReward, RewardScorer
from coati.weights.served import ServedModels, VerifiedUpdate

SECONDS = 30  # far longer than anything here takes


class Nothing:
    """A tokenizer for tests in which texts do not matter."""

    def decode(self, ids, skip_special_tokens):
        return ""


class ScriptedEngine:
    """Generates `length(sample)` tokens for each sample, one per step, in a fixed number of slots."""

    def __init__(self, model, length, on_step, places=64):
        self.model, self._length, self._on_step, self._places = model, length, on_step, places
        self.version, self.num_steps, self.most, self.cancelled = 0, 0, 0, []
        self._samples, self._writing = {}, {}

    @property
    def room(self):
        return self._places - len(self._writing)

    def submit(self, samples):
        self._samples |= {sample.id: sample for sample in samples}
        self._writing |= {sample.id: [] for sample in samples}
        assert len(self._writing) <= self._places

    def commit(self, version):
        self.version = version

    def advance(self):
        self.num_steps += 1
        self.most = max(self.most, len(self._writing))
        for versions in self._writing.values():
            versions.append(self.version)
        ended = [one for one, versions in self._writing.items() if len(versions) == self._length(one)]
        responses = [self._response(one, self._writing.pop(one)) for one in ended]
        self._on_step(self.num_steps)
        return responses

    def cancel(self, sample_ids):
        self.cancelled += [one for one in sample_ids if self._writing.pop(one, None) is not None]

    def _response(self, one, versions):
        return dataclasses.replace(
            self._samples.pop(one),
            response=torch.full((len(versions),), 3),
            log_probs=torch.full((len(versions),), -1.0),
            versions=torch.tensor(versions),
            is_cut=False,
        )


class Source(WorkSource):
    """Groups of samples with consecutive ids, as many as there is room for."""

    def __init__(self, total, capacity, group_size):
        self.capacity, self.min_samples, self._total, self._size = capacity, group_size, total, group_size
        self.asked, self.settled, self.extra, self._first = [], [], [], 0

    def wait_for_work(self, room):
        self.asked.append(room)
        if self._first and self.extra:
            return self.extra.pop(0)
        if self._first == self._total:
            return None
        first = self._first
        self._first = min(self._total, first + max(1, room // self._size) * self._size)
        return self.batch(range(first, self._first))

    def batch(self, ids):
        return [Sample(one, [4, 4], group=one // self._size, columns={"prompt": str(one)}) for one in ids]

    def close_leases(self, batch, items):
        self.settled += [sample.id for sample in batch.samples]
        return items


class Rig:
    def __init__(
        self,
        length,
        *,
        total=12,
        capacity=4,
        group_size=1,
        reward=lambda _: None,
        on_step=lambda _: None,
        in_flight=True,
        maker_class=NaiveExperienceMaker,
        while_scoring=lambda _: None,
    ):
        self.sent, self.stop, self.items, self.story = [], threading.Event(), {}, []

        def scores_of(prompts):
            reward(list(map(int, prompts)))
            return [float(int(prompt) % 5) for prompt in prompts]

        actor = Actor(llama(seed=1))
        self.engine = ScriptedEngine(actor, length, lambda step: (self._await_prompts(), on_step(step)))
        algorithm = AlgorithmSettings(name="grpo" if group_size > 1 else "ppo")
        scorer = RewardScorer(FunctionReward(scores_of), Nothing())
        models = actor, Critic(llama(seed=2)), scorer, Actor(llama(seed=3))
        for model, name in zip(models, ("actor", "critic", "", "reference"), strict=True):
            if name:
                model.register_forward_pre_hook(lambda *_, name=name: while_scoring(name))
        self.maker = maker_class(*models, algorithm=algorithm, engine=self.engine)
        self.served = ServedModels(self.maker.trained_models)
        self.pipeline = ExperiencePipeline(self.maker, self.served, commit_between_tokens=in_flight)
        self.source = Source(total, capacity, group_size)
        self.accounts = []  # calls that report to trainers before other work
        self.source.report_endings = lambda: self.accounts.append("report")
        sender = SimpleNamespace(
            send=self._send,
            has_room=lambda: True,
            collect=lambda: None,
            flush=lambda: self.accounts.append("flush"),
        )
        self.loop = WorkLoop(
            self.pipeline,
            self.source,
            sender,
            deadlines=Deadlines(batch_seconds=SECONDS),
            stop=self.stop,
            notify=lambda hook, *_: self.story.append(hook),
        )

    def run(self):
        self.loop.run()
        return self.sent

    def _await_prompts(self):
        """Wait for requested work, so that the test does not depend on the timing of the background thread."""
        if self.loop._requested is not None:
            wait([self.loop._requested], timeout=SECONDS)

    def offer(self, version):
        weights = {("actor", name): tensor for name, tensor in self.maker.actor.state_dict().items()}
        self.served.offer(VerifiedUpdate(version=version, tensors=weights, is_full=False))

    def _send(self, items):
        for item in items:
            self.sent.append((int(item.sample_ids), self.engine.num_steps))
            self.items[int(item.sample_ids)] = item

    def versions(self, one):
        return self.items[one].policy_versions.tolist()


def wait_for_rewards(rig):
    """Make rewards ready before the next step, so that deliveries depend on the script alone."""
    for batch in rig.loop._pending:
        batch.scores.wait(SECONDS)


def test_groups_are_delivered_as_they_end_and_their_slots_are_refilled():
    rig = Rig(lambda one: 40 if one == 0 else 4, on_step=lambda _: wait_for_rewards(rig))
    sent = rig.run()
    assert sorted(one for one, _ in sent) == list(range(12))
    assert sent[-1][0] == 0  # the long sample did not delay the others
    assert all(step < 30 for one, step in sent if one != 0)
    assert rig.engine.num_steps == 40
    assert rig.engine.most == 4
    assert rig.source.settled == [one for one, _ in sent]


def test_stragglers_leave_no_slots_idle():
    lengths = [2, 3, 5, 16] * 8
    rig = Rig(lengths.__getitem__, total=32, capacity=8, on_step=lambda _: wait_for_rewards(rig))
    rig.run()
    in_batches = 16 * 4
    assert rig.engine.num_steps < 0.75 * in_batches  # 30 if no slot was ever idle
    assert rig.engine.most == 8


def test_the_longest_sample_of_a_group_leaves_no_slots_idle():
    lengths = [2, 3, 5, 16] * 8
    rig = Rig(lengths.__getitem__, total=32, capacity=8, group_size=4, on_step=lambda _: wait_for_rewards(rig))
    rig.run()
    in_batches = 16 * 4
    assert rig.engine.num_steps < 0.8 * in_batches  # 30 if no slot was ever idle
    assert rig.engine.most == 8


def test_samples_that_wait_for_their_group_are_bounded():
    most = 0

    def count(_):
        nonlocal most
        wait_for_rewards(rig)
        most = max(most, rig.maker.num_in_progress)

    # The first sample of each group is long, so that the others wait for it.
    rig = Rig(lambda one: 60 if one % 8 == 0 else 1, total=512, capacity=16, group_size=8, on_step=count)
    assert len(rig.run()) == 512
    assert rig.engine.most == 16
    assert 32 < most <= 3 * 16, "a slot is not idle, and at most twice as many samples wait"


def test_a_group_is_scored_and_sent_whole():
    lengths = [9 if one == 5 else 1 + one % 3 for one in range(12)]
    rig = Rig(lengths.__getitem__, group_size=4, capacity=8, on_step=lambda _: wait_for_rewards(rig))
    sent = [one for one, _ in rig.run()]
    groups = [sent[first : first + 4] for first in range(0, 12, 4)]
    assert sorted(map(sorted, groups)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert groups[-1] == [4, 5, 6, 7]
    assert all(room >= 4 for room in rig.source.asked)  # a whole group fits


def test_prompts_are_requested_when_enough_slots_are_free():
    rig = Rig(lambda one: 1 + one % 7, total=200, capacity=32)
    rig.run()
    assert rig.source.asked[0] == 32
    assert all(room >= 4 for room in rig.source.asked)
    assert rig.engine.most == 32


def test_slots_that_become_free_while_a_request_waits_are_requested_too():
    rig = Rig(lambda one: 2 + one, capacity=8)
    rig._await_prompts = lambda: None
    requests = []  # none of them is answered, so that no other thread takes part
    thread = SimpleNamespace(run=lambda request: requests.append(request) or Future())
    rig.pipeline.add_samples(rig.source.batch(range(6)))
    rooms = []
    while rig.maker.num_generating:
        rig.loop._request_work(thread)
        rooms.append(rig.source.room)
        rig.pipeline.generate_and_score()
    requests[0]()
    assert (len(requests), rig.source.asked) == (1, [2])
    assert rooms == sorted(rooms)
    assert (rooms[0], rooms[-1]) == (0, 7)


class Watched(NaiveExperienceMaker):
    """Records the batches that it scores."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.scored = []

    def score_complete(self):
        batch = super().score_complete()
        self.scored.append((self.policy_version, batch))
        return batch


def test_a_pass_scores_half_of_the_samples_in_progress_and_the_last_one_the_rest():
    rig = Rig(lambda one: 1 + one % 7, total=64, capacity=16, maker_class=Watched)
    rig.run()
    sizes = [len(batch.samples) for _, batch in rig.maker.scored]
    assert sum(sizes) == 64
    assert min(sizes[:-1]) >= 8  # also while the slots run empty at the end


def test_slow_rewards_get_large_batches():
    asked, is_over = [], threading.Event()

    def reward(ids):
        asked.append(len(ids))
        assert is_over.wait(SECONDS)

    class Second(Watched):
        def score_complete(self):
            batch = super().score_complete()
            if len(self.scored) == 2:
                is_over.set()
            return batch

    rig = Rig(lambda one: 1 + one % 7, total=32, capacity=8, reward=reward, maker_class=Second)
    rig.run()
    assert sum(asked) == 32
    assert asked[0] < 8 <= asked[1]  # half at first, then all that completes while the reward is busy


def test_samples_are_requested_before_complete_groups_are_scored():
    num_requests_at_scoring, is_requested = [], threading.Event()

    class Waiting(NaiveExperienceMaker):
        def score_complete(self):
            assert is_requested.wait(SECONDS), "no request while complete groups waited for scoring"
            num_requests_at_scoring.append(len(rig.source.asked))
            return super().score_complete()

    # At step 1 three samples are complete, too few to be scored, but enough slots for a request.
    rig = Rig(lambda one: 1 if one < 3 else 4, total=32, capacity=8, maker_class=Waiting)
    request = rig.source.wait_for_work

    def wait_for_work(room):
        work = request(room)
        if len(rig.source.asked) == 2:
            is_requested.set()
        return work

    rig.source.wait_for_work = wait_for_work
    rig.run()
    assert rig.source.asked[:2] == [8, 3]
    assert num_requests_at_scoring[0] == 2
    assert rig.engine.most == 8


def test_samples_requested_during_scoring_start_together_with_those_that_wait():
    requests = []

    class Scoring(NaiveExperienceMaker):
        def score_complete(self):
            requests.append(rig.loop._requested is not None)
            rig._await_prompts()
            return super().score_complete()

    rig = Rig(lambda _: 4, total=32, capacity=8, maker_class=Scoring, on_step=lambda _: wait_for_rewards(rig))
    rig.run()
    assert requests[:3] == [True, True, True]  # requested before the scoring
    assert rig.engine.num_steps == 4 * 32 // 8  # no step with some of the slots only


def test_a_few_complete_groups_do_not_wait_long():
    rig = Rig(lambda one: 3 if one == 0 else 60, total=8, capacity=8, on_step=lambda _: wait_for_rewards(rig))
    sent = dict(rig.run())
    assert sent[0] < 3 + 20


def test_the_engine_is_checked_once_for_each_version():
    rig = Rig(lambda one: 2, total=24, maker_class=Watched, on_step=lambda step: step == 7 and rig.offer(1))
    rig.run()
    measured = [version for version, batch in rig.maker.scored if "rollout/logprob_gap" in batch.metrics]
    assert measured == [0, 1]
    assert len(rig.maker.scored) > 4


def test_new_weights_generate_the_next_token_of_every_sample_and_versions_record_it():
    rig = Rig(lambda one: 6 if one < 4 else 3, total=8, on_step=lambda step: step == 2 and rig.offer(7))
    rig.run()
    for one in range(4):
        assert rig.versions(one) == [0, 0, 7, 7, 7, 7]
    for one in range(4, 8):
        assert rig.versions(one) == [7, 7, 7]


def test_a_complete_group_is_scored_by_the_newest_of_the_weights_that_wrote_it():
    rig = Rig(lambda one: 3 + one, total=8, capacity=8, on_step=lambda step: rig.offer(step), maker_class=Watched)
    rig.run()
    scored = rig.maker.scored
    assert [one for _, batch in scored for one in [sample.id for sample in batch.samples]] == list(range(8))
    assert all(int(row.max()) == version for version, batch in scored for row in batch.experience.policy_versions)
    assert len({version for version, _ in scored}) > 4


def versions_while_scoring(*, offered_by, **options):
    """Return the version of the weights at each model's pass over a batch during which version 1 is offered."""
    seen = {}

    def while_scoring(name):
        if name == offered_by:
            rig.offer(1)
        seen.setdefault(name, rig.served.version)

    rig = Rig(lambda one: 3 if one < 4 else 6, total=8, capacity=8, while_scoring=while_scoring, **options)
    rig.run()
    assert {*rig.versions(0)} == {0}
    assert rig.served.version == 1
    return seen


def test_weights_are_committed_while_the_reference_scores_a_batch():
    assert versions_while_scoring(offered_by="reference") == {"critic": 0, "actor": 0, "reference": 1}
    # The actor's pass checks the engine's log-probs.
    assert versions_while_scoring(offered_by="critic") == {"critic": 0, "actor": 0, "reference": 1}


@pytest.mark.parametrize("options", [{"in_flight": False}, {"maker_class": Watched}])
def test_weights_are_not_committed_under_samples_in_progress_or_scoring_of_ones_own(options):
    assert versions_while_scoring(offered_by="critic", **options) == {"critic": 0, "actor": 0, "reference": 0}


def test_without_commits_between_tokens_new_weights_wait_until_all_samples_have_ended():
    rig = Rig(
        lambda one: 2 + one % 5,
        total=24,
        capacity=8,
        in_flight=False,
        on_step=lambda step: step % 3 == 0 and rig.offer(step),
    )
    rig.run()
    versions = {one: set(rig.versions(one)) for one in range(24)}
    assert all(len(of_one) == 1 for of_one in versions.values())
    assert len(set.union(*versions.values())) > 1


def test_the_number_of_samples_waiting_for_rewards_is_bounded():
    begun, most = [], []
    is_over = threading.Event()

    def reward(ids):
        begun.append(ids)
        assert is_over.wait(SECONDS)

    def on_step(step):
        most.append(sum(len(batch.samples) for batch in rig.loop._pending))
        if step == 40:
            is_over.set()

    rig = Rig(lambda one: 5 if one else 60, total=24, capacity=4, reward=reward, on_step=on_step)
    rig.run()
    assert max(most) <= 8  # the samples in progress and one more pass
    assert len(rig.sent) == 24


def test_a_sample_leased_again_starts_over():
    rig = Rig(lambda one: 6, total=4, on_step=lambda step: step == 3 and rig.offer(1))
    rig.source.extra = [rig.source.batch([2, 3])]
    # The second batch is requested when there is room; make room at once.
    rig.source.capacity = 8
    rig.run()
    assert rig.engine.cancelled == [2, 3]
    assert sorted(one for one, _ in rig.sent) == [0, 1, 2, 3]
    assert len(rig.versions(2)) == 6


def test_at_a_stop_samples_in_progress_are_finished_and_no_others_start():
    rig = Rig(lambda one: 5, total=100, on_step=lambda step: step == 7 and rig.stop.set())
    sent = sorted(one for one, _ in rig.run())
    assert sent == list(range(len(sent)))
    assert 4 <= len(sent) <= 8


def test_other_work_runs_with_an_empty_engine_and_then_generation_continues():
    done = []

    class Job:
        def run(self, pipeline, tell):
            tell()
            done.append((pipeline.num_in_progress, len(rig.sent), pipeline is rig.pipeline, list(rig.accounts)))

    rig = Rig(lambda one: 3 + one % 3, total=12, capacity=4)
    rig.source.extra = [Job()]
    sent = rig.run()
    assert sorted(one for one, _ in sent) == list(range(12))
    assert done == [(0, 4, True, ["flush", "report", "report"])]


def test_an_error_of_the_engine_ends_the_loop_after_what_was_scored_before():
    def on_step(step):
        if step == 6:
            raise ZeroDivisionError("no such token")

    rig = Rig(lambda one: 2 if one < 2 else 20, total=8, on_step=on_step)
    with pytest.raises(ZeroDivisionError, match="no such token"):
        rig.run()
    assert {0, 1} <= {one for one, _ in rig.sent}
    rig.offer(3)
    assert rig.served.version == 3  # the models are not in use
    assert rig.pipeline.num_in_progress == 0


def test_a_maker_with_its_own_make_experience_makes_whole_batches():
    batches = []

    class Own(NaiveExperienceMaker):
        def make_experience(self, input_ids, *args, **kwargs):
            batches.append(len(input_ids))
            return super().make_experience(input_ids, *args, **kwargs)

    rig = Rig(lambda one: 1 + one % 5, total=12, capacity=4, maker_class=Own)
    assert sorted(one for one, _ in rig.run()) == list(range(12))
    assert batches == [4, 4, 4]


def test_hooks_of_batches_come_one_after_the_other():
    rig = Rig(lambda one: 1 + one % 5, total=12)
    rig.run()
    made = ["on_make_experience_start", "on_make_experience_end", "on_send_start", "on_send_end"]
    one = ["on_batch_start", *made, "on_batch_end"]
    assert rig.story == one * (len(rig.story) // len(one))

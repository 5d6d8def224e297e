"""The maker's working loop, in the test's process; its trainers are sinks in Ray."""

import threading

import pytest
import ray
import torch
from ray_testing import (
    PATIENCE,
    QUICK,
    Background,
    TokenReward,
    make_maker,
    numbered,
    prompts,
    trainer_models,
)
from torch import nn

from coati.errors import (
    ActorNotFound,
    ConfigError,
    DataError,
    DeadlineExceeded,
    GenerateOptionError,
    RewardError,
)
from coati.ledger import WorkShare
from coati.ray.callbacks import MakerCallback
from coati.rewards import FunctionReward, RewardScorer

pytestmark = pytest.mark.usefixtures("cluster")


def received(sinks):
    return [ray.get(sink.sample_ids.remote()) for sink in sinks.values()]


def work(maker, batches, **kwargs):
    maker.workingloop(lambda: batches, **kwargs)
    return maker.progress()


def test_items_go_to_three_trainers_in_turn_across_batches_of_four(sinks):
    progress = work(make_maker(list(sinks)), [numbered(0, 4), numbered(4, 4), numbered(8, 4)])
    assert received(sinks) == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]
    assert (progress.state, progress.num_made, progress.num_delivered) == ("finished", 12, 12)


def test_batches_may_be_tensors_or_dicts_and_rewards_see_further_columns(sinks):
    columns_seen = []

    class Recorder(MakerCallback):
        def on_make_experience_end(self, experience):
            columns_seen.append(experience.sequences[:, :3].tolist())

    maker = make_maker(list(sinks), callbacks=[Recorder()])
    padded = {
        "input_ids": [[0, 3, 4], [5, 6, 7]],
        "attention_mask": [[0, 1, 1], [1, 1, 1]],
        "source": ["a", "b"],
    }
    progress = work(maker, [torch.tensor([[2, 3, 4]]), padded])
    assert progress.num_delivered == 3
    assert columns_seen == [[[2, 3, 4]], [[0, 3, 4], [5, 6, 7]]]
    assert len({sample for ids in received(sinks) for sample in ids}) == 3, "samples without ids get their own"


@pytest.mark.parametrize(
    ("loop", "num_made"),
    [
        ({}, 8),  # one pass over 2 batches of 4
        ({"num_epochs": 3}, 24),
        ({"num_epochs": 3, "num_steps": 1}, 4),
        ({"num_epochs": 1, "num_steps": 5}, 20),  # 5 batches, over the data loader three times
    ],
)
def test_num_steps_wins_over_num_epochs(sinks, loop, num_made):
    assert work(make_maker(list(sinks)), prompts(2), **loop).num_made == num_made


def test_hooks_come_in_the_order_of_the_contract(sinks):
    story = []

    class Storyteller(MakerCallback):
        def __getattribute__(self, name):
            if name.startswith("on_"):
                return lambda *args: story.append(name.removeprefix("on_"))
            return super().__getattribute__(name)

    work(make_maker(list(sinks), callbacks=[Storyteller()]), prompts(2))
    batch = ["make_experience_start", "make_experience_end", "send_start", "send_end"]
    batch = ["batch_start", *batch, "batch_end"]
    assert story == ["loop_start", *batch, *batch, "loop_end"]


class Raising(nn.Module):
    def forward(self, sequences, attention_mask=None):
        raise RewardError("the judge is ill")


class TooMany(nn.Module):
    def forward(self, sequences, attention_mask=None):
        return torch.zeros(len(sequences) + 1)


class AlwaysNaN(nn.Module):
    def forward(self, sequences, attention_mask=None):
        return torch.full((len(sequences),), float("nan"))


class NaNForFirst(TokenReward):
    def forward(self, sequences, attention_mask=None):
        scores = super().forward(sequences)
        scores[0] = float("nan")
        return scores


@pytest.mark.parametrize(
    ("reward", "batches", "error", "message"),
    [
        (None, [], DataError, "gave no batch. Is the dataset empty"),
        (None, [{"input_ids": [[2, 3], [4]]}], DataError, "rows have different lengths"),
        (None, ["a text"], DataError, "must be a tensor of input_ids, or a dict"),
        (Raising(), prompts(1), RewardError, "the judge is ill"),
        (TooMany(), prompts(1), RewardError, "one score for each of 4 sequences, got shape .5."),
        (AlwaysNaN(), prompts(100), DataError, "in a row had to be dropped.*not a finite number"),
    ],
    ids=["empty", "ragged", "no batch", "reward raises", "reward miscounts", "reward is NaN"],
)
def test_bad_input_ends_the_loop_with_an_error_that_says_why(sinks, reward, batches, error, message):
    maker = make_maker(list(sinks), reward=reward)
    with pytest.raises(error, match=message):
        work(maker, batches)
    assert maker.progress().state == "failed"


def test_samples_without_a_finite_reward_are_dropped_and_counted(sinks):
    progress = work(make_maker(list(sinks), reward=NaNForFirst()), [numbered(0, 4), numbered(4, 4)])
    assert (progress.num_made, progress.num_dropped, progress.num_delivered) == (6, 2, 6)
    assert sorted(sample for ids in received(sinks) for sample in ids) == [1, 2, 3, 5, 6, 7]


class Numbers:
    """A tokenizer that writes numbers."""

    def decode(self, ids, skip_special_tokens):
        return " ".join(map(str, ids))


def test_a_function_scores_one_batch_while_the_loop_goes_on_to_the_next(sinks):
    second_drawn = threading.Event()

    def patient(completions):
        return [1.0 if second_drawn.wait(PATIENCE) else float("nan")] * len(completions)

    def batches():
        yield numbered(0, 4)
        second_drawn.set()
        yield numbered(4, 4)

    maker = make_maker(list(sinks), reward=RewardScorer(FunctionReward(patient), Numbers()))
    maker.workingloop(batches)
    progress = maker.progress()
    assert (progress.state, progress.num_made, progress.num_delivered) == ("finished", 8, 8)
    assert received(sinks) == [[0, 3, 6], [1, 4, 7], [2, 5]]
    assert len(maker.records_since(0).records) == 2


def test_an_unknown_generate_option_is_refused_before_any_model_is_loaded(sinks):
    with pytest.raises(GenerateOptionError, match=r"unknown generate option top_q=3\. Did you mean top_.\?.*Known"):
        make_maker(list(sinks), top_q=3)


def test_a_maker_without_trainers_is_refused():
    with pytest.raises(ConfigError, match="detached_trainer_name_list must name at least one trainer"):
        make_maker([])


def test_a_trainer_that_does_not_exist_is_named():
    with pytest.raises(ActorNotFound, match="no trainer actor named 'no-such-trainer'"):
        work(make_maker(["no-such-trainer"]), prompts(1))


def test_without_the_first_weights_the_loop_ends_at_its_deadline(sinks):
    maker = make_maker(
        list(sinks), sync_models_from_trainers=True, deadlines=QUICK.model_copy(update={"start_seconds": 0.2})
    )
    with pytest.raises(DeadlineExceeded, match=r"waited 0\.2 s for a full weight update of maker .*sync_models_to"):
        work(maker, prompts(1))
    assert maker.progress().num_made == 0


def test_the_loop_waits_for_the_first_weights_and_uses_them(sinks):
    maker = make_maker(
        list(sinks), sync_models_from_trainers=True, deadlines=QUICK.model_copy(update={"start_seconds": PATIENCE})
    )
    loop = Background(work, maker, [numbered(0, 2)])
    actor, critic = trainer_models(seed=5)
    maker.update_experience_maker(new_actor_state_dict=actor.state_dict())  # half of what is needed
    assert loop.is_running
    maker.update_experience_maker(new_actor_state_dict=actor.state_dict(), new_critic_state_dict=critic.state_dict())
    assert loop.result().num_delivered == 2
    versions = [ray.get(sink.versions.remote()) for sink in sinks.values()]
    assert versions == [[2], [2], []]  # two plain updates


def test_stop_ends_the_wait_for_the_first_weights(sinks):
    maker = make_maker(
        list(sinks), sync_models_from_trainers=True, deadlines=QUICK.model_copy(update={"start_seconds": PATIENCE})
    )
    loop = Background(work, maker, prompts(1))
    maker.stop()
    assert loop.result().state == "finished"


def test_stop_ends_the_loop_after_the_batch_in_work_and_delivers_it(sinks):
    class Stopper(MakerCallback):
        def on_make_experience_end(self, experience):
            maker.stop()

    maker = make_maker(list(sinks), callbacks=[Stopper()])
    progress = work(maker, [numbered(0, 4), numbered(4, 4)])
    assert (progress.state, progress.num_delivered) == ("finished", 4)


def test_a_bounded_maker_waits_for_new_weights_before_it_goes_ahead(sinks):
    # 4 samples for each version, 8 in all, never older than one update: 4 now, 4 after version 1.
    share = WorkShare(rounds_per_version=4, total_rounds=8, max_staleness=0)
    made = threading.Semaphore(0)

    class Signal(MakerCallback):
        def on_send_end(self):
            made.release()

    maker = make_maker(list(sinks), share=share, callbacks=[Signal()])
    loop = Background(work, maker, [numbered(0, 3), numbered(3, 3), numbered(6, 3)])
    assert made.acquire(timeout=PATIENCE)  # 3 samples
    assert made.acquire(timeout=PATIENCE)  # 1 of the next 3, as admitted
    assert not made.acquire(blocking=False)
    assert maker.progress().num_made == 4
    actor, critic = trainer_models()
    maker.update_experience_maker(new_actor_state_dict=actor.state_dict(), new_critic_state_dict=critic.state_dict())
    assert loop.result().num_made == 8
    versions = sorted(version for sink in sinks.values() for version in ray.get(sink.versions.remote()))
    assert versions == [0] * 4 + [1] * 4


def test_a_callback_that_raises_names_itself(sinks):
    class Clumsy(MakerCallback):
        def on_send_start(self):
            raise ZeroDivisionError("one by nothing")

    maker = make_maker(list(sinks), callbacks=[Clumsy()])
    with pytest.raises(ZeroDivisionError) as caught:
        work(maker, prompts(1))
    assert caught.value.__notes__[0].endswith("Clumsy, hook on_send_start")

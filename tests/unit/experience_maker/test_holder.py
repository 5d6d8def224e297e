"""The maker's working loop in the plain holder, without Ray: its trainers are objects in this process."""

import threading
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import ray
import torch
from thread_peers import ThreadPeers
from tiny import TokenReward, actor_and_critic, llama, llama_config, maker_models, prompts
from torch import nn

from coati.actors.options import MakerOptions
from coati.background import run_in_background
from coati.config import Deadlines
from coati.errors import ActorNotFound, ConfigError, DataError, DeadlineExceeded, GenerateOptionError, RewardError
from coati.experience import Experience
from coati.experience_maker import ExperienceMaker, NaiveExperienceMaker
from coati.models import Actor, Critic, RewardModel
from coati.ray import environment
from coati.ray.callbacks import MakerCallback
from coati.ray.experience_maker_holder import MakerHolder
from coati.rewards import FunctionReward, ModelReward, RewardScorer
from coati.trainer.strategies import DDPStrategy, GeminiStrategy, LowLevelZeroStrategy

SECONDS = 60  # far longer than anything here takes
QUICK = Deadlines(start_seconds=0.2, batch_seconds=SECONDS, grace_seconds=0.1)
PATIENT = Deadlines(start_seconds=SECONDS, batch_seconds=SECONDS)


class Sink:
    """A trainer that implements only what makers call."""

    def __init__(self):
        self.items = []

    def buffer_extend(self, items):
        self.items += items

    @property
    def sample_ids(self):
        return [int(item.sample_ids) for item in self.items]

    @property
    def versions(self):
        return [int(item.policy_versions.max()) for item in self.items]


@pytest.fixture
def sinks(monkeypatch):
    sinks = {name: Sink() for name in ("t0", "t1", "t2")}
    monkeypatch.setattr(environment, "RayPeers", lambda: ThreadPeers(**sinks))
    return sinks


def make_holder(
    trainers,
    *,
    reward=None,
    model_fn=None,
    strategy=DDPStrategy,
    callbacks=(),
    sync_models_from_trainers=False,
    **options,
):
    generate = {name: options.pop(name) for name in ("top_q", "max_new_tokens") if name in options}
    return MakerHolder(
        list(trainers),
        lambda: strategy(device="cpu"),
        model_fn or (lambda: maker_models(0, reward)),
        callbacks=callbacks,
        sync_models_from_trainers=sync_models_from_trainers,
        options=MakerOptions(**{"deadlines": QUICK, **options}),
        **{"max_new_tokens": 4, **generate},
    )


def numbered(first, count):
    """Return a batch of prompts with consecutive sample ids."""
    return {"input_ids": torch.full((count, 2), 3), "sample_ids": torch.arange(first, first + count)}


def work(holder, batches, **kwargs):
    holder.workingloop(lambda: batches, **kwargs)
    return holder.progress()


def plain_update(holder, seed=0, *, with_critic=True):
    actor, critic = actor_and_critic(seed)
    critic_state = critic.state_dict() if with_critic else None
    holder.update_experience_maker(new_actor_state_dict=actor.state_dict(), new_critic_state_dict=critic_state)


def test_a_plain_holder_starts_no_ray(sinks):
    was_started = ray.is_initialized()  # perhaps by other tests in this process
    work(make_holder(sinks), prompts(1))
    assert ray.is_initialized() == was_started


@pytest.mark.parametrize("strategy", [GeminiStrategy, LowLevelZeroStrategy])
def test_a_strategy_that_shards_trained_models_leaves_a_makers_models_whole(sinks, monkeypatch, strategy):
    for key in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(key, raising=False)

    def models():
        tokenizer = SimpleNamespace(decode=lambda ids, **_: " ".join(map(str, ids)))
        scorer = RewardScorer(ModelReward(RewardModel.from_config(llama_config())), tokenizer)
        return Actor.from_config(llama_config()), Critic.from_config(llama_config()), scorer, Actor(llama())

    try:
        assert work(make_holder(sinks, model_fn=models, strategy=strategy), prompts(1)).num_samples == 4
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def test_items_go_to_three_trainers_in_turn_across_batches_of_four(sinks):
    progress = work(make_holder(sinks), [numbered(0, 4), numbered(4, 4), numbered(8, 4)])
    assert [sink.sample_ids for sink in sinks.values()] == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]
    assert (progress.state, progress.num_samples) == ("finished", 12)


def test_batches_may_be_tensors_or_dicts(sinks):
    seen = []

    class Recorder(MakerCallback):
        def on_make_experience_end(self, experience):
            seen.append(experience.sequences[:, :3].tolist())

    padded = {"input_ids": [[0, 3, 4], [5, 6, 7]], "attention_mask": [[0, 1, 1], [1, 1, 1]], "source": ["a", "b"]}
    progress = work(make_holder(sinks, callbacks=[Recorder()]), [torch.tensor([[2, 3, 4]]), padded])
    assert progress.num_samples == 3
    assert seen == [[[2, 3, 4]], [[0, 3, 4], [5, 6, 7]]]
    assert len({sample for sink in sinks.values() for sample in sink.sample_ids}) == 3, "samples get ids of their own"


@pytest.mark.parametrize(
    ("loop", "num_made"),
    [
        ({}, 8),  # one pass over 2 batches of 4
        ({"num_epochs": 3}, 24),
        ({"num_epochs": 3, "num_steps": 1}, 4),
        ({"num_epochs": 1, "num_steps": 5}, 20),  # 5 batches need three passes over the data loader
    ],
)
def test_num_steps_wins_over_num_epochs(sinks, loop, num_made):
    assert work(make_holder(sinks), prompts(2), **loop).num_samples == num_made


def test_hooks_come_in_the_order_of_the_contract(sinks):
    story = []

    class Storyteller(MakerCallback):
        def __getattribute__(self, name):
            if name.startswith("on_"):
                return lambda *args: story.append(name.removeprefix("on_"))
            return super().__getattribute__(name)

    work(make_holder(sinks, callbacks=[Storyteller()]), prompts(2))
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
        (None, [], DataError, "without batches"),
        (None, [{"input_ids": [[2, 3], [4]]}], DataError, "different lengths"),
        (None, ["a text"], DataError, "input_ids"),
        (Raising(), prompts(1), RewardError, "the judge is ill"),
        (TooMany(), prompts(1), RewardError, "one score for each of 4"),
        (AlwaysNaN(), prompts(100), DataError, "in a row"),
    ],
    ids=["empty", "ragged", "no batch", "reward raises", "reward miscounts", "reward is NaN"],
)
def test_bad_input_ends_the_loop_with_an_error(sinks, reward, batches, error, message):
    holder = make_holder(sinks, reward=reward)
    with pytest.raises(error, match=message):
        work(holder, batches)
    assert holder.progress().state == "failed"


def test_samples_without_a_finite_reward_are_dropped_and_counted(sinks):
    holder = make_holder(sinks, reward=NaNForFirst())
    assert work(holder, [numbered(0, 4), numbered(4, 4)]).num_samples == 6
    assert (holder.pipeline.num_made, holder.pipeline.num_dropped) == (6, 2)
    assert sorted(sample for sink in sinks.values() for sample in sink.sample_ids) == [1, 2, 3, 5, 6, 7]


class Numbers:
    """A tokenizer that writes numbers."""

    def decode(self, ids, **_):
        return " ".join(map(str, ids))


def test_a_function_scores_one_batch_while_the_loop_starts_the_next(sinks):
    second_drawn = threading.Event()

    def patient(completions):
        return [1.0 if second_drawn.wait(SECONDS) else float("nan")] * len(completions)

    def batches():
        yield numbered(0, 4)
        second_drawn.set()
        yield numbered(4, 4)

    holder = make_holder(sinks, reward=RewardScorer(FunctionReward(patient), Numbers()))
    holder.workingloop(batches)
    progress = holder.progress()
    assert (progress.state, progress.num_samples) == ("finished", 8)
    assert [sink.sample_ids for sink in sinks.values()] == [[0, 3, 6], [1, 4, 7], [2, 5]]
    assert len(holder.report().records.records) == 2


def test_an_unknown_generate_option_is_refused_before_any_model_is_loaded(sinks):
    with pytest.raises(GenerateOptionError, match="top_q"):
        make_holder(sinks, top_q=3, model_fn=lambda: pytest.fail("loaded"))


def test_a_maker_without_trainers_is_refused():
    with pytest.raises(ConfigError, match="detached_trainer_name_list"):
        make_holder([])


def test_a_trainer_that_does_not_exist_is_named(sinks):
    with pytest.raises(ActorNotFound, match="no-such-trainer"):
        work(make_holder(["no-such-trainer"]), prompts(1))


def test_without_the_first_weights_the_loop_ends_at_its_deadline(sinks):
    holder = make_holder(sinks, sync_models_from_trainers=True)
    with pytest.raises(DeadlineExceeded, match="full weight update"):
        work(holder, prompts(1))
    assert holder.pipeline.num_made == 0


def test_the_loop_waits_for_the_first_weights_and_uses_them(sinks):
    holder = make_holder(sinks, sync_models_from_trainers=True, deadlines=PATIENT)
    loop: Future = run_in_background(lambda: work(holder, [numbered(0, 2)]), name="loop")
    plain_update(holder, 5, with_critic=False)  # half of what is needed
    assert not loop.done()
    plain_update(holder, 5)
    assert loop.result(SECONDS).num_samples == 2
    assert [sink.versions for sink in sinks.values()] == [[2], [2], []]  # two plain updates


def test_stop_ends_the_wait_for_the_first_weights(sinks):
    holder = make_holder(sinks, sync_models_from_trainers=True, deadlines=PATIENT)
    loop = run_in_background(lambda: work(holder, prompts(1)), name="loop")
    holder.stop()
    assert loop.result(SECONDS).state == "finished"


def test_stop_ends_the_loop_after_the_current_batch_and_delivers_it(sinks):
    class Stopper(MakerCallback):
        def on_make_experience_end(self, experience):
            holder.stop()

    holder = make_holder(sinks, callbacks=[Stopper()])
    progress = work(holder, [numbered(0, 4), numbered(4, 4)])
    assert (progress.state, progress.num_samples) == ("finished", 4)


def test_a_callback_that_raises_names_itself(sinks):
    class Clumsy(MakerCallback):
        def on_send_start(self):
            raise ZeroDivisionError("one by nothing")

    with pytest.raises(ZeroDivisionError) as caught:
        work(make_holder(sinks, callbacks=[Clumsy()]), prompts(1))
    assert caught.value.__notes__[0].endswith("Clumsy, hook on_send_start")


class Echo(ExperienceMaker):
    """A maker with only the contract's method, which repeats the prompt's last token."""

    def make_experience(self, input_ids, attention_mask, **generate_kwargs):
        num_actions = generate_kwargs["max_new_tokens"]
        floats = torch.zeros(len(input_ids), num_actions)
        sequences = torch.cat([input_ids, input_ids[:, -1:].expand(-1, num_actions)], dim=1)
        return Experience(sequences, floats, floats, torch.ones(len(input_ids)), floats, floats, None, None)


def test_a_custom_maker_needs_only_make_experience(sinks):
    holder = make_holder(sinks, maker=Echo)
    plain_update(holder)
    progress = work(holder, [numbered(0, 3), numbered(3, 3)])
    assert (progress.state, progress.num_samples) == ("finished", 6)
    assert [sink.sample_ids for sink in sinks.values()] == [[0, 3], [1, 4], [2, 5]]
    assert {version for sink in sinks.values() for version in sink.versions} == {1}
    assert sinks["t0"].items[0].sequences.tolist() == [3] * 6
    record = holder.report().records.records[0]
    assert record["version"] == 1
    assert record["metrics"]["maker/samples"].value == 3


class WithSettings(Echo):
    def __init__(self, *models, seed):
        super().__init__(*models)
        self.seed = seed

    def make_experience(self, input_ids, attention_mask, *, columns, **generate_kwargs):
        experience = super().make_experience(input_ids, attention_mask, **generate_kwargs)
        experience.reward = torch.tensor(columns["score"])
        return experience


def test_a_maker_gets_the_settings_and_columns_that_it_declares(sinks):
    holder = make_holder(["t0"], maker=WithSettings, seed=7)
    work(holder, [{**numbered(0, 2), "score": [2.0, 3.0]}])
    assert [float(item.reward) for item in sinks["t0"].items] == [2.0, 3.0]


def test_a_subclass_of_our_maker_may_change_what_it_makes(sinks):
    class Doubled(NaiveExperienceMaker):
        def make_experience(self, *args, **kwargs):
            experience = super().make_experience(*args, **kwargs)
            experience.reward = torch.full_like(experience.reward, 42.0)
            return experience

    work(make_holder(["t0"], maker=Doubled), [{**numbered(40, 2), "group_ids": torch.tensor([5, 5])}])
    assert [float(item.reward) for item in sinks["t0"].items] == [42.0, 42.0]
    assert sinks["t0"].sample_ids == [40, 41]  # the ids, and so the random draws, are those of the prompts
    assert [int(item.group_ids) for item in sinks["t0"].items] == [5, 5]


def test_a_maker_that_makes_more_samples_than_prompts_is_refused(sinks):
    class Twice(Echo):
        def make_experience(self, input_ids, attention_mask, **generate_kwargs):
            return super().make_experience(input_ids.repeat(2, 1), attention_mask, **generate_kwargs)

    with pytest.raises(DataError, match="Twice"):
        work(make_holder(["t0"], maker=Twice), [numbered(0, 2)])

"""The options of the actors together with the contract's arguments."""

import json
import pydoc

import pytest
from ray_testing import DEADLINES, strategy
from tiny import actor_and_critic, experience, maker_models

from coati.actors.options import MakerOptions, TrainerOptions
from coati.config import AlgorithmSettings, RolloutSettings, TrainSettings, build_config
from coati.errors import ConfigError, DataError
from coati.ray.actor_factory import ActorFactory
from coati.ray.detached_trainer_ppo import DetachedPPOTrainer, PPOTrainer
from coati.ray.experience_maker_holder import ExperienceMakerHolder, MakerHolder
from coati.trainer.ppo import PPOLearner

pytestmark = pytest.mark.usefixtures("local_queue")


def trainer(*, algorithm=None, train=None, learner=PPOLearner, **arguments):
    sections = {"algorithm": algorithm, "train": train}
    given = {name: section for name, section in sections.items() if section is not None}
    options = TrainerOptions(deadlines=DEADLINES, num_threads=1, learner=learner, **given)
    return PPOTrainer([], strategy, actor_and_critic, options=options, **arguments)


def test_options_override_default_arguments():
    made = trainer(algorithm=AlgorithmSettings(eps_clip=0.05), train=TrainSettings(batch_size=2))
    assert made._learner.algorithm.eps_clip == 0.05  # not 0.2, the argument's default
    assert made.options.train.batch_size == 2


def test_arguments_apply_where_the_options_have_defaults():
    made = trainer(eps_clip=0.3, value_clip=0.5, train_batch_size=3, train=TrainSettings(actor_lr=1e-3))
    assert (made._learner.algorithm.eps_clip, made._learner.algorithm.value_clip) == (0.3, 0.5)
    assert (made.options.train.batch_size, made.options.train.actor_lr) == (3, 1e-3)


def test_an_argument_that_contradicts_the_options_is_refused():
    with pytest.raises(ConfigError, match=r"eps_clip = 0\.1 contradicts options\.algorithm\.eps_clip = 0\.05"):
        trainer(algorithm=AlgorithmSettings(eps_clip=0.05), eps_clip=0.1)
    with pytest.raises(ConfigError, match=r"max_new_tokens"):
        MakerHolder(["t"], strategy, maker_models, options=MakerOptions(rollout=RolloutSettings()), max_new_tokens=3)


def test_changing_the_loss_takes_one_method():
    class Doubled(PPOLearner):
        def policy_objective(self, logprobs, part, advantages, counts):
            objective = super().policy_objective(logprobs, part, advantages, counts)
            return objective._replace(loss=2 * objective.loss)

    plain, doubled = trainer(), trainer(learner=Doubled)
    losses = [made.training_step(experience(0, 4))["actor_loss"] for made in (plain, doubled)]
    assert losses[1] == pytest.approx(2 * losses[0])


class Chatty(PPOLearner):
    """Reports an additional metric."""

    def step(self, experience):
        return {**super().step(experience), "mine/reward": experience.reward.mean()}


class Wordy(PPOLearner):
    def step(self, experience):
        return {**super().step(experience), "mine/rewards": experience.reward}


def test_learner_metrics_are_converted_to_floats():
    batch = experience(0, 4)
    assert json.dumps(trainer(learner=Chatty).training_step(batch)["mine/reward"]) == str(batch.reward.mean().item())
    with pytest.raises(DataError, match=r"mine/rewards.*Tensor"):
        trainer(learner=Wordy).training_step(batch)


@pytest.mark.parametrize(
    ("actor_class", "plain"), [(DetachedPPOTrainer, PPOTrainer), (ExperienceMakerHolder, MakerHolder)]
)
def test_help_shows_what_an_actor_class_does(actor_class, plain):
    assert actor_class.__doc__ == plain.__doc__
    assert "options" in pydoc.render_doc(actor_class)


@pytest.mark.parametrize("rank", [0, 4])
def test_trainers_of_runs_with_lora_send_only_adapters(monkeypatch, tmp_path, rank):
    started = []
    monkeypatch.setattr(ActorFactory, "_start", lambda _self, _actor, _options, /, **given: started.append(given))
    sections = {
        "run": {"output": str(tmp_path)},
        "model": {"path": "m"},
        "prompts": {"path": "p.jsonl"},
        "reward": {"function": "a:b"},
        "lora": {"rank": rank},
    }
    ActorFactory(build_config(sections)).create_trainers(None, makers=["maker-0"], incarnation=0)
    assert [given["update_lora_weights"] for given in started] == [rank > 0]

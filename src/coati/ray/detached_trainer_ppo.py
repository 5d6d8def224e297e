"""The contract's PPO trainer: `PlainPPOTrainer` in a Ray actor."""

from coati.actors.ppo import PlainPPOTrainer
from coati.ray.detached_trainer_base import DetachedTrainer
from coati.ray.environment import remote, run_in_groups


class PPOTrainer(PlainPPOTrainer, DetachedTrainer):
    """The class behind the actor `DetachedPPOTrainer`, for subclassing; see `PlainPPOTrainer` for its arguments."""


run_in_groups(
    PPOTrainer,
    compute=("training_step",),
    model_io=("sync_models_to_remote_makers", "change_makers", "strategy_save_actor", "strategy_save_critic"),
    buffer_length=("next_evaluation", "evaluated"),
)

DetachedPPOTrainer = remote(
    PPOTrainer, groups=("buffer_length", "buffer_append", "buffer_sample", "model_io", "compute")
)

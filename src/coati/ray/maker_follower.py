"""The other actors of a tensor-parallel maker: each holds a piece of its models and does what the leader does."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import ray
from torch import nn

from coati.algorithms import Algorithm
from coati.config import Deadlines
from coati.cpu import set_up_cpu
from coati.experience_maker.lock_step import LockStep, cut_maker, follow
from coati.ray.environment import apply_env_info, set_up_log
from coati.trainer.strategies import Strategy

logger = logging.getLogger(__name__)


@ray.remote(concurrency_groups={"compute": 1})
class MakerFollower:
    """Rank 1, 2, … of a maker whose rank 0 is an `ExperienceMakerHolder` with `tensor_parallel`.

    Takes the same `strategy_fn` and `model_fn` (its reward is not used and may be None), and the same algorithm and
    seed. Call `follow` once; it returns when the leader says so, and raises when the leader is gone.
    """

    def __init__(
        self,
        strategy_fn: Callable[[], Strategy],
        model_fn: Callable[[], tuple[nn.Module, nn.Module | None, Any, nn.Module]],
        env_info: Mapping[str, str],
        *,
        algorithm: str | Algorithm = "ppo",
        seed: int = 0,
        deadlines: Deadlines | None = None,
        num_threads: int = 0,
    ) -> None:
        apply_env_info(env_info)
        set_up_cpu(num_threads)
        set_up_log()
        strategy = strategy_fn()
        with strategy.model_init_context():
            models = model_fn()
        lock_step = LockStep(deadline_seconds=(deadlines or Deadlines()).silence)
        self._maker = cut_maker(models, strategy.device, lock_step, algorithm=algorithm, seed=seed)

    @ray.method(concurrency_group="compute")
    def follow(self) -> None:
        """Do what the leader does, until it ends."""
        follow(self._maker)

    def progress(self) -> int:
        """The version of the weights that this rank has; answers as soon as the models are loaded."""
        return self._maker.policy_version

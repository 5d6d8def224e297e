"""The contract's trainer base class. Subclasses define `training_step` and `_update_remote_makers`, and are decorated
with `@ray.remote(concurrency_groups={"buffer_length": 1, "buffer_append": 1, "buffer_sample": 1, "compute": 1})`.
"""

from coati.actors.trainer import Trainer
from coati.ray.environment import ActorHost, run_in_groups


class DetachedTrainer(Trainer):
    """A trainer in a Ray actor."""

    host_class = ActorHost


run_in_groups(
    DetachedTrainer,
    compute=("fit",),
    buffer_length=("buffer_get_length", "lease"),  # all short calls
    buffer_append=("buffer_append", "buffer_extend"),
    buffer_sample=("_buffer_sample",),
)

"""The contract's maker: `coati.actors.maker` in a Ray actor."""

from coati.actors.maker import Maker
from coati.ray.environment import ActorHost, remote, run_in_groups


class MakerHolder(Maker):
    """The class behind the actor `ExperienceMakerHolder`, to subclass; `Maker` says what it takes."""

    host_class = ActorHost


run_in_groups(
    MakerHolder,
    compute=("workingloop",),
    model_io=("update_experience_maker",),
    experience_io=("report",),
)

ExperienceMakerHolder = remote(MakerHolder, groups=("experience_io", "model_io", "compute"))

"""The contract's maker: `Maker` in a Ray actor."""

from coati.actors.host import Report
from coati.actors.maker import Maker
from coati.ray.environment import ActorHost, remote, run_in_groups


class MakerHolder(Maker):
    """The class behind the actor `ExperienceMakerHolder`, for subclassing; see `Maker` for its arguments."""

    host_class = ActorHost

    def report(self, record_cursor: int = 0, span_cursor: int = 0) -> Report:
        """Return `Worker.report`; overridden because only makers run it in a separate concurrency group."""
        return super().report(record_cursor, span_cursor)


run_in_groups(MakerHolder, compute=("workingloop",), model_io=("update_experience_maker",), experience_io=("report",))

ExperienceMakerHolder = remote(MakerHolder, groups=("experience_io", "model_io", "compute"))

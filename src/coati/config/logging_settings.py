"""`[logging]`: what a run writes, and which trackers it is sent to."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from typing import Any, Literal

from coati.config.section import Section, secrets_in, setting

_SECRET_NAME = re.compile(r"(^|_)(key|token|secret|password)$", re.IGNORECASE)


class LoggingSettings(Section, section="logging"):
    """`[logging]`: what is written besides metrics.jsonl, and where it is sent."""

    tensorboard: bool = setting(True, "Write TensorBoard files too, if the tensorboard package is installed.")
    trackers: dict[Literal["wandb", "mlflow", "trackio", "swanlab"], dict[str, Any]] = setting(
        {},
        "Where metrics and samples are sent: wandb, mlflow, trackio, swanlab, each with its options (metrics.md).",
        rule="a table for each tracker, such as [logging.trackers.wandb]",
    )
    samples_kept: int = setting(4, "Samples of each weight version written to samples.jsonl; 0 = none.", ge=0)
    spans_kept: int = setting(
        200_000, "Spans of the actors' time written to spans.jsonl for coati report, 110 bytes each; 0 = none.", ge=0
    )

    @property
    def writes_tensorboard(self) -> bool:
        """Whether TensorBoard files are asked for and can be written."""
        return self.tensorboard and importlib.util.find_spec("tensorboard") is not None

    @property
    def tracker_names(self) -> list[str]:
        """The trackers that a run is sent to."""
        return [*["tensorboard"] * self.writes_tensorboard, *self.trackers]

    def conflicts(self) -> Iterator[tuple[str, str, Any, str]]:
        """Find secrets among the options of trackers: settings are written to config.toml and sent to trackers."""
        for key in secrets_in(self.trackers, _SECRET_NAME, "trackers"):
            remedy = "Set the environment variable that the package reads, such as WANDB_API_KEY."
            yield key, "left out, because it holds a secret", "one", remedy

"""The maker's side of evaluations: asks for a job, evaluates one version of the weights, reports the result."""

import json
import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from coati import build, faults
from coati.config import RunSettings
from coati.config.plan import read_json
from coati.errors import CheckpointError
from coati.evaluation.evaluator import Evaluator
from coati.evaluation.schedule import EvalJob
from coati.experience_maker.pipeline import ExperiencePipeline
from coati.monitor.metrics import append_jsonl
from coati.peers import Peers
from coati.rewards import RewardScorer
from coati.rewards.function import GivenReward
from coati.rollout import make_engine
from coati.trainer.strategies import Strategy
from coati.weights.served import ServedModels

logger = logging.getLogger(__name__)


class EvaluationWork:
    """The evaluations that a maker does between its batches: `poll` asks for a job, `run` does it."""

    def __init__(
        self,
        config: RunSettings,
        reward: GivenReward | None,
        strategy: Strategy,
        served: ServedModels,
        *,
        peers: Peers,
        trainer: str,
        maker: str,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Create the evaluators. `reward` holds functions of the user's program, which replace `[reward]`."""
        self._config = config
        scorers: dict[str, RewardScorer] = {}
        self._evaluators = {one.name: Evaluator(config, one, scorers, reward) for one in config.eval}
        self._strategy, self._served = strategy, served
        self._peers, self._trainer, self._maker = peers, trainer, maker
        self._should_stop = should_stop
        self._job: EvalJob | None = None

    def poll(self) -> Self | None:
        """Ask the trainer for a job; return self if there is one, so that the caller can `run` it."""
        incarnation = self._served.incarnation  # read before the version, which then is of it or of a later one
        job = self._ask("next_evaluation", self._maker, self._served.version, incarnation)
        self._job = None if job is None else EvalJob(*job)
        return None if job is None else self

    def run(self, pipeline: ExperiencePipeline, tell: Callable[[], None] = lambda: None) -> None:
        """Evaluate the served version, save the model if it is the best so far, and report the result.

        The weights cannot change meanwhile. `tell` is called before each batch.
        """
        job, self._job = self._job, None
        assert job is not None

        def should_stop() -> bool:
            tell()
            return self._should_stop()

        maker = pipeline.experience_maker
        engine = getattr(maker, "engine", None) or make_engine(self._config.rollout, maker.actor)
        with pipeline.timeline.span("evaluate"), self._served.use() as version:
            evaluator = self._evaluators[job.name]
            found = evaluator.run(engine, version=version, should_stop=should_stop)
            if found is None:
                return
            faults.reach("maker.evaluated")
            folder, record = self._config.output_folder.resolve(), dict(found.record)
            try:
                path = folder / "evaluations" / f"{job.name}-{version}.jsonl"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.unlink(missing_ok=True)
                append_jsonl(path, found.samples)
                if metric := evaluator.settings.best_by:
                    record["is_best"] = self._keep_best(pipeline, record, metric, folder / "best")
            except (OSError, CheckpointError) as error:  # the result matters more than its files
                logger.error(
                    "a file of evaluation %r of version %d could not be written; its result is still reported: %s",
                    *(job.name, version, error),
                )
            self._ask("evaluated", job, record)

    def _keep_best(self, pipeline: ExperiencePipeline, record: Mapping[str, Any], metric: str, path: Path) -> bool:
        """Save the model if it is better than the one in the folder; return whether it is the best so far.

        A maker that died after saving has not reported: then the folder already has this version.
        """
        best = read_json(path / "evaluation.json") or {}
        if record.get(metric, -math.inf) <= best.get(metric, -math.inf):
            return bool(best.get("version") == record["version"])

        def add(folder: Path) -> None:
            build.load_tokenizer(self._config).save_pretrained(folder)
            (folder / "evaluation.json").write_text(json.dumps(record, indent=1))

        self._strategy.save_model(pipeline.experience_maker.actor, path, add=add)
        return True

    def _ask(self, method: str, *args: Any) -> Any:
        """Call a method of the trainer; return its answer, or None if the trainer is gone."""
        what, seconds = f"{method} of maker {self._maker}", self._config.deadlines.update_seconds
        return self._peers.ask(self._trainer, method, *args, what=what, seconds=seconds, should_stop=self._should_stop)

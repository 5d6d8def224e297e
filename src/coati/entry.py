"""`coati.train`: the command `coati train` as a function. Fast to import: torch and Ray come when a run starts."""

import contextlib
import dataclasses
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coati.config import Overrides, RunSettings, build_config, load_config, parse_overrides
from coati.config.section import spell
from coati.errors import CheckpointError, ConfigError
from coati.ledger.audit import RunAccount, audit_run
from coati.monitor import RunLog, RunSnapshot, Tracker, read_jsonl
from coati.monitor.follow import following
from coati.monitor.records import WarningsFile
from coati.run_folder import (
    StartingPoint,
    check_inputs_outside,
    check_resumable,
    check_run_folder,
    choose_start,
    continue_files,
    open_run_folder,
    resume_command,
    resumed_settings,
    save_prompts,
)

if TYPE_CHECKING:
    from coati.ray.launcher import DetachedRun
    from coati.rewards.function import GivenReward
    from coati.synchronous import SynchronousRun
    from coati.trainer.ppo import PPOLearner

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunResult:
    """The outcome of a run."""

    config: RunSettings
    account: RunAccount
    """The fate of every sample group, as shown by `coati audit`."""
    num_restarts: Mapping[str, int]
    """Number of restarts after a death, under the keys "makers" and "trainers"."""
    seconds: float
    was_stopped: bool
    """Whether a stop request ended the run before its last step."""
    stop_reason: str = ""
    """Why the run stopped early by itself (the `patience` of an evaluation set); empty if it did not."""

    @property
    def folder(self) -> Path:
        """The run's output folder."""
        return self.config.output_folder

    @property
    def model(self) -> Path:
        """Folder of the trained policy, loadable with transformers."""
        return self.folder / "model"

    @property
    def num_samples(self) -> int:
        """Number of samples trained on."""
        return self.account.num_trained

    @property
    def metrics(self) -> dict[str, Any]:
        """Latest value of every metric. `coati.load_metrics(result.folder)` returns the metrics of all steps.

        Makers' metrics may be older than the last step, because no samples are generated with the final weights.
        """
        return {name: value for row in self._rows() for name, value in row.items()}

    @property
    def rewards(self) -> list[tuple[float, float]]:
        """For every training step, the version before it and the mean reward of its samples."""
        return [(row["version"], row["reward/mean"]) for row in self._rows() if "reward/mean" in row]

    def __repr__(self) -> str:
        how = "stopped" if self.was_stopped else "done"
        return f"<RunResult in {str(self.folder)!r}: {how}, {self.num_samples:,} samples, {self.seconds:.0f} s>"

    def _rows(self) -> list[dict[str, Any]]:
        path = self.folder / "metrics.jsonl"
        return read_jsonl(path) if path.is_file() else []  # missing if the disk was full


def train(
    config: str | os.PathLike[str] | Mapping[str, Any] | RunSettings | None = None,
    *,
    resume: str | os.PathLike[str] | None = None,
    prompts: Any = None,
    reward: "GivenReward | None" = None,
    learner: "Callable[..., PPOLearner] | None" = None,
    maker: Callable[..., Any] | None = None,
    overrides: Overrides = (),
    sync: bool = False,
    address: str | None = None,
    overwrite: bool = False,
    trackers: Sequence[Tracker] = (),
    on_progress: Callable[[RunSnapshot], None] | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> RunResult:
    """Train as `coati train` does, and return the outcome.

    Args:
        config: path of a TOML file, a dict of sections, or `RunSettings`.
        resume: in place of `config`, the output folder of a run to continue from its latest checkpoint.
        prompts: a list of texts or of rows (dicts), or a `datasets.Dataset`; replaces `prompts.path`. It is written to
            a file beside the output folder.
        reward: a reward function of prompts, completions and the dataset's columns, or a list of functions, whose
            scores are added up; replaces `[reward]`.
        learner: a class or factory that builds the learner, such as a subclass of `coati.PPOLearner`.
        maker: a class or factory that builds the maker, such as a subclass of `coati.NaiveExperienceMaker`.
        overrides: a dict of settings, nested or with dotted keys, or strings as for `--set`.
        sync: train in this process, without Ray.
        address: the Ray cluster to join; None starts a private one.
        overwrite: replace an earlier run in the output folder.
        trackers: objects that receive metrics and samples, each on its own thread, in addition to `[logging]`.
        on_progress: called regularly with a snapshot of the run; None shows progress on stderr.
        should_stop: polled between steps; once it returns True, the run saves its model and ends.

    Raises:
        ConfigError: if a setting or input is found to be invalid before training starts.
        KeyboardInterrupt: after a Ctrl-C, when the run is saved. A second Ctrl-C ends it at once.
    """
    parts = {"reward": reward, "learner": learner, "maker": maker}
    parts = {name: part for name, part in parts.items() if part is not None}
    _check_parts(**parts)
    settings = choose_settings(
        config, resume=resume, overrides=overrides, reward=reward, has_prompts=prompts is not None, sync=sync
    )
    if prompts is not None:
        check_run_folder(settings, overwrite=overwrite)
        settings = save_prompts(prompts, settings)
    start = check_run(settings, parts, is_resumed=resume is not None, overwrite=overwrite, sync=sync, address=address)
    from rich.console import Console

    from coati.monitor.live import LiveView, StopSignal

    view, is_main_thread = LiveView(Console(stderr=True)), threading.current_thread() is threading.main_thread()
    has_default = is_main_thread and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with StopSignal(view, *[signal.SIGINT] * has_default) as stop, contextlib.ExitStack() as stack:
        if on_progress is None:
            on_progress = stack.enter_context(view).show
        result = execute(
            settings,
            parts=parts,
            start=start,
            overwrite=overwrite,
            sync=sync,
            address=address,
            trackers=trackers,
            on_begin=stop.begin,
            on_progress=on_progress,
            should_stop=lambda: stop() or should_stop(),
        )
    if stop() and result.was_stopped:
        raise KeyboardInterrupt(f"stopped and saved. To continue: {resume_command(result.folder, parts)}")
    return result


def _check_parts(*, reward: Any = None, **others: Any) -> None:
    rewards = reward if isinstance(reward, list | tuple) else [reward]
    for name, part in [*(("reward", one) for one in rewards), *others.items()]:
        if not callable(part) and part is not None:
            raise ConfigError(
                f"{name} must be a function or a class, got {type(part).__name__}. "
                "Use [reward] for rewards by name, reward models and weighted sums."
            )


def choose_settings(
    config: str | os.PathLike[str] | Mapping[str, Any] | RunSettings | None,
    *,
    resume: str | os.PathLike[str] | None = None,
    overrides: Overrides = (),
    reward: "GivenReward | None" = None,
    has_prompts: bool = False,
    sync: bool = False,
) -> RunSettings:
    """Resolve the settings of a run from the arguments of `train`."""
    if (config is None) == (resume is None):
        both = "resume takes its settings from the run. Remove config; change settings with overrides."
        none = "A run needs settings (CONFIG), or a run folder to continue (--resume). Got neither."
        raise ConfigError(none if config is None else both)
    if resume is not None and has_prompts:
        raise ConfigError("resume takes its prompts from the run. Remove prompts.")
    # With sync, one process alternates between sampling and training, so it is on-policy.
    fixed: dict[str, Any] = {"topology.max_staleness": 0} if sync else {}
    if has_prompts:
        fixed["prompts.path"] = "prompts.jsonl"  # until they are saved
    if reward is not None:  # it replaces every source in `[reward]`
        terms = [] if callable(reward) else [{"function": _name_of(one)} for one in reward]
        function = _name_of(reward) if callable(reward) else ""
        fixed |= {"reward.function": function, "reward.model": "", "reward.terms": terms, "reward.options": {}}
    if overrides and not isinstance(overrides, Mapping) and not fixed.get("reward.terms"):  # errors name --set
        overrides = [*overrides, *(f"{key}={spell(value)}" for key, value in fixed.items())]
    else:
        overrides = parse_overrides(overrides) | fixed
    if resume is not None:
        return resumed_settings(Path(resume), overrides)
    config = config.model_dump() if isinstance(config, RunSettings) else config
    return build_config(config, overrides) if isinstance(config, Mapping) else load_config(Path(str(config)), overrides)


def check_run(
    config: RunSettings, parts: Mapping[str, Any], *, is_resumed: bool, overwrite: bool, sync: bool, address: str | None
) -> StartingPoint | None:
    """Raise ConfigError or another CoatiError for every problem that can be detected before the run starts.

    Returns the starting point of a resumed run, its newest complete checkpoint; None for a new run.
    """
    if is_resumed:
        check_resumable(config, parts)
    else:
        check_inputs_outside(config)
    check_run_folder(config, overwrite=overwrite or is_resumed)
    _check_topology(config, sync=sync, address=address)
    if config.model.trust_remote_code:
        logger.warning("model.trust_remote_code is on: code shipped with the models runs with your permissions.")
    from coati.build import check_inputs

    check_inputs(config, parts.get("reward"))
    return choose_start(config) if is_resumed else None


def _check_topology(config: RunSettings, *, sync: bool, address: str | None) -> None:
    """Raise ConfigError if --sync contradicts the topology, or if Ray would hide the GPUs from its actors."""
    topology = config.topology
    if sync and address is not None:
        raise ConfigError("--sync runs without Ray, so it cannot be combined with --address. Remove one of the two.")
    if sync and (topology.makers, topology.trainers) != (1, 1):
        raise ConfigError(
            f"A synchronous run has one maker and one trainer, got topology.makers = {topology.makers} and "
            f"topology.trainers = {topology.trainers}. Remove --sync, or add --set topology.makers=1 --set "
            "topology.trainers=1."
        )
    for name in ("gpus_per_trainer", "gpus_per_maker"):
        if not sync and config.model.device == "cuda" and getattr(topology, name) == 0:
            raise ConfigError(
                f'topology.{name} must be above 0 while model.device is "cuda", got 0. Set it (to 0.5 if a maker '
                'and a trainer share a GPU), or set model.device to "cpu".'
            )


def execute(
    config: RunSettings,
    *,
    parts: Mapping[str, Any] | None = None,
    start: StartingPoint | None = None,
    overwrite: bool = False,
    sync: bool,
    address: str | None,
    trackers: Sequence[Tracker] = (),
    on_begin: Callable[[], None] = lambda: None,
    on_progress: Callable[[RunSnapshot], None] = lambda _: None,
    should_stop: Callable[[], bool] = lambda: False,
    log_to_driver: bool = False,
) -> RunResult:
    """Train until the end or a stop, and save the model. A resumed run continues from `start`.

    `on_begin` is called when everything is loaded and training begins. `parts` has fields of `coati.build.Parts`.
    """
    started, train, folder = time.monotonic(), config.train, config.output_folder
    open_folder = open_run_folder(config, parts or (), overwrite=overwrite, is_resumed=start is not None, is_sync=sync)
    with open_folder as begin_in_folder, contextlib.ExitStack() as stack:

        def begin() -> None:
            begin_in_folder()
            stack.enter_context(WarningsFile(folder / "warnings.log"))
            on_begin()
            if start is not None:
                continue_files(config, log, start)
            stack.enter_context(following(folder, [*config.logging.tracker_names, *trackers]))
            stack.callback(log.close)

        num_samples = train.total_steps * train.batch_size * config.topology.trainers
        steps, spans = train.optimizer_steps, config.logging.spans_kept
        log = RunLog(
            folder,
            total_steps=steps,
            total_samples=num_samples,
            max_spans=spans,
            shows_warnings=not log_to_driver,  # otherwise Ray shows all log messages of actors
            on_begin=begin,
        )
        log.state.message = "loading libraries"
        options: dict[str, Any] = {"on_progress": on_progress, "should_stop": should_stop}
        if start is not None:
            log.set_position(start.step, start.version)
            log.state.message = f"the run continues from {start}"
            options["checkpoint"] = start.checkpoint
        on_progress(log.snapshot())
        if not sync:
            options |= {"address": address, "log_to_driver": log_to_driver}
        _run(config, log, parts or {}, sync=sync, **options)
        was_stopped = should_stop() and log.state.step < steps
    return RunResult(
        config=config,
        account=_account(folder),
        num_restarts=dict(log.state.restarts),
        seconds=time.monotonic() - started,
        was_stopped=was_stopped,
        stop_reason=log.stop_reason,
    )


def _run(config: RunSettings, log: RunLog, parts: Mapping[str, Any], *, sync: bool, **options: Any) -> None:
    from coati.build import Parts, quiet_transformers

    options["parts"] = Parts(**parts)
    run_class: type[SynchronousRun | DetachedRun]
    if sync:
        from coati.synchronous import SynchronousRun as run_class
    else:
        from coati.ray.launcher import DetachedRun as run_class
    with quiet_transformers():
        run_class(config, log, **options).run(str(config.output_folder.resolve() / "model"))


def _account(folder: Path) -> RunAccount:
    try:
        return audit_run(folder)
    except CheckpointError as error:  # the model is saved anyway
        logger.warning("the account of samples is not available: %s", error)
        return RunAccount([], [str(error)])


def _name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function as in `reward.function`; a callable without a name gets a placeholder."""
    name, module = getattr(function, "__name__", None), getattr(function, "__module__", None) or "python"
    if name is None:  # a functools.partial or a callable object, which cannot be imported by name
        name = f"_given_{getattr(getattr(function, 'func', type(function)), '__name__', 'object')}"
        module = "__main__"
    return f"{module}:{re.sub('[^A-Za-z0-9_]', '_', name)}"

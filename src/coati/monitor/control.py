"""How many makers a running job is asked to have, and its state: two small files in its folder.

`coati scale` writes `control.json`, and the run follows it; `state.json` has the run's status, its makers and what it
waits for. Both are replaced as a whole, so a reader never sees half of one. Only a request in a file that the run's own
user owns is followed; no port is opened.
"""

import contextlib
import logging
import os
import socket
import stat
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from coati.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

MAX_MAKERS = 64

_CONTROL, _STATE = "control.json", "state.json"
_MAX_REQUEST_BYTES = 4096


class MakersRequest(BaseModel):
    """A request for a number of makers."""

    model_config = ConfigDict(strict=True, frozen=True)

    makers: int = Field(ge=1, le=MAX_MAKERS)


class RunState(BaseModel):
    """What a run reports about itself."""

    status: Literal["starting", "running", "ended"] = "starting"
    pid: int = Field(default_factory=os.getpid)
    host: str = Field(default_factory=socket.gethostname)
    makers: int
    message: str = ""
    """What it waits for until makers have joined or left, why they could not, or how it ended."""


class RunControl:
    """The run's side: reads requests and writes the state. A disk that fails must not end a run, so it only warns."""

    def __init__(self, folder: Path, *, makers: int) -> None:
        self._folder = folder
        self._has_warned = False
        self._written: RunState | None = None
        self._state = RunState(makers=makers)
        self.report()

    def new_request(self) -> int | None:
        """Return the makers that were asked for since the last call. What is no request is refused with a warning."""
        taken = self._folder / f".{_CONTROL}.taken"
        try:
            (self._folder / _CONTROL).replace(taken)  # so that the next request is another file
        except OSError:
            return None
        try:
            return _read_request(taken).makers
        except (DataError, OSError) as error:
            logger.warning("Request refused; training continues. %s", error)
            return None
        finally:
            with contextlib.suppress(OSError):
                taken.unlink()

    def report(self, **changes: Any) -> None:
        """Write the state with these fields changed, if that makes it another one."""
        self._state = self._state.model_copy(update=changes)
        if self._state == self._written:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            _replace(self._folder / _STATE, self._state)
            self._written = self._state
        except OSError as error:
            if not self._has_warned:
                logger.warning("%s cannot be written, so coati scale will not work: %s", _STATE, error)
            self._has_warned = True


def ask_for_makers(folder: Path, makers: int) -> RunState:
    """Ask the run in `folder` for this number of makers; returns its state. ConfigError if no run is alive there."""
    if not 1 <= makers <= MAX_MAKERS:
        raise ConfigError(f"--makers must be a whole number from 1 to {MAX_MAKERS}, got {makers}.")
    path = folder / _STATE
    try:
        state = RunState.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise ConfigError(
            f"RUN_FOLDER must be the output folder (run.output) of a run that is training, got {str(folder)!r}, whose "
            f"{_STATE} cannot be read: {error}. A run writes it a few seconds after its start, and not with --sync."
        ) from None
    if state.status == "ended":
        raise ConfigError(f"the run in {str(folder)!r} has ended{': ' + state.message if state.message else ''}.")
    if state.host == socket.gethostname() and not _is_process(state.pid):
        raise ConfigError(f"no run is alive in {str(folder)!r}: its process {state.pid} is gone. Start it again.")
    _replace(folder / _CONTROL, MakersRequest(makers=makers))
    return state


def _is_process(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another user's process
    return True


def _read_request(path: Path) -> MakersRequest:
    """Read a request; DataError if it is none, or not from this user."""
    # Neither a link nor a pipe is followed or waited for, and what is checked is what is read.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
            raise DataError(f"{_CONTROL} must be a regular file of the user who started the run.")
        text = file.read(_MAX_REQUEST_BYTES)
    try:
        return MakersRequest.model_validate_json(text)
    except ValidationError as error:
        problems = "; ".join(problem["msg"] for problem in error.errors(include_input=False))
        raise DataError(
            f"{_CONTROL} must hold a number of makers as JSON ({problems}). Write it with coati scale."
        ) from None


def _replace(path: Path, content: BaseModel) -> None:
    whole = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        whole.write_text(content.model_dump_json(indent=2) + "\n", encoding="utf-8")
        whole.replace(path)
    finally:
        whole.unlink(missing_ok=True)

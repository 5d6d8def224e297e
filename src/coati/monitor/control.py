"""Talking to a run through two small files in its folder.

`control.json` holds what somebody asks of the run (`coati scale`), `state.json` what the run says: that it is alive,
how many makers it has, and what became of the request. Both are replaced whole, so a reader never sees half of one.
Whoever may write into the run's folder may ask; no port is opened and no token is needed.
"""

import contextlib
import dataclasses
import json
import logging
import os
import socket
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

from coati.counting import counted
from coati.errors import ConfigError, DeadlineExceeded, ScalingRefused

logger = logging.getLogger(__name__)

MAX_MAKERS = 64

_CONTROL, _STATE = "control.json", "state.json"
_POLL_SECONDS = 0.2
# A run on another machine whose state has not changed for so long is taken for dead. The driver may be busy saving.
_SILENCE_SECONDS = 60.0
# For a run on this machine, whose process is there.
_SAVING_SECONDS = 900.0


Answer = Literal["", "working", "done", "refused"]


class MakersRequest(NamedTuple):
    """Somebody wants the run to have so many makers."""

    request_id: str
    makers: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunState:
    """What a run says of itself."""

    status: Literal["starting", "running", "ended"]
    pid: int
    host: str
    beat: int  # goes up by one with every writing
    makers: int
    makers_wanted: int
    message: str = ""
    request_id: str = ""  # the newest request that the run has seen, and what became of it:
    answer: Answer = ""
    earlier_request_id: str = ""  # the request before that, for whoever has not yet read its answer
    earlier_answer: Answer = ""
    earlier_message: str = ""

    def answer_to(self, request_id: str) -> tuple[Answer, str]:
        """What became of this request, and what there is to say about it; nothing if it was not begun."""
        if request_id == self.request_id:
            return self.answer, self.message
        return (self.earlier_answer, self.earlier_message) if request_id == self.earlier_request_id else ("", "")


class RunControl:
    """The run's side: looks for requests and says how it is. A disk that fails must not end a run, so it only warns."""

    def __init__(self, folder: Path, *, makers: int) -> None:
        self._folder = folder
        self._has_warned = False
        self._state = RunState(
            status="starting", pid=os.getpid(), host=socket.gethostname(), beat=0, makers=makers, makers_wanted=makers
        )
        earlier = _read_request(folder)  # not meant for this run
        self._last_seen = "" if earlier is None else earlier.request_id
        self.say()

    def new_request(self) -> MakersRequest | None:
        """A request that was not there before."""
        request = _read_request(self._folder)
        if request is None or request.request_id == self._last_seen:
            return None
        self._last_seen = request.request_id
        return request

    def begin(self, request: MakersRequest) -> None:
        """Say that this request is worked on from now on."""
        state = self._state
        self.say(
            request_id=request.request_id,
            makers_wanted=request.makers,
            answer="working",
            message="",
            earlier_request_id=state.request_id,
            earlier_answer=state.answer,
            earlier_message=state.message,
        )

    def say(self, **changes: Any) -> None:
        """Write the state with these fields changed."""
        self._state = dataclasses.replace(self._state, beat=self._state.beat + 1, **changes)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            _write(self._folder / _STATE, dataclasses.asdict(self._state))
        except OSError as error:
            if not self._has_warned:
                logger.warning("%s cannot be written, so coati scale will not work: %s", _STATE, error)
            self._has_warned = True


def ask_for_makers(
    folder: Path,
    makers: int,
    *,
    deadline_seconds: float,
    on_progress: Callable[[str], None] = lambda _: None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> RunState:
    """Ask the run in `folder` to have so many makers, and wait until it has them.

    Raises ConfigError if no run is alive there, ScalingRefused if the run says no or somebody else's request took the
    place of this one, DeadlineExceeded if it takes longer.
    """
    if not 1 <= makers <= MAX_MAKERS:
        raise ConfigError(f"--makers must be a whole number from 1 to {MAX_MAKERS}, got {makers}.")
    state = _state_of_living_run(folder)
    request = MakersRequest(uuid.uuid4().hex, makers)
    _write(folder / _CONTROL, request._asdict())
    on_progress(_what_comes_first(state))
    started = changed = clock()
    later: MakersRequest | None = None
    while True:
        newest = _state_of_living_run(folder)
        now = clock()
        changed, state = (now if newest.beat != state.beat else changed), newest
        answer, message = state.answer_to(request.request_id)
        if answer == "done":
            return state
        if answer == "refused":
            raise ScalingRefused(message)
        if answer == "working":
            on_progress(message)
        elif later is not None:  # for a whole turn: the run has not read ours just before it was replaced
            raise ScalingRefused(
                f"a later request, for {counted(later.makers, 'maker')}, took the place of this one, for "
                f"{counted(makers, 'maker')}, before the run had begun with it. Nothing of it was done, and it is not "
                f"tried any more. The run has {counted(state.makers, 'maker')} now."
            )
        else:
            later = _later_request(folder, request)
        if now - changed >= _SILENCE_SECONDS and not _is_process_here(state):
            raise ConfigError(
                f"the run in {str(folder)!r} (process {state.pid} on {state.host}) has said nothing for "
                f"{now - changed:.0f} s. Is it still there?"
            )
        if now - started >= deadline_seconds:
            raise DeadlineExceeded(_not_in_time(folder, request, state, deadline_seconds))
        sleep(_POLL_SECONDS)


def _what_comes_first(state: RunState) -> str:
    """What a new request waits for, before the run begins with it."""
    have = f"the run has {counted(state.makers, 'maker')}"
    if state.status == "starting":
        return f"{have} and is still starting; waiting for it to train"
    if state.answer == "working":
        doing = f" ({state.message})" if state.message else ""
        return f"{have} and is changing to {state.makers_wanted} as was asked before{doing}; waiting for that to end"
    return f"{have}; waiting for it to begin"


def _later_request(folder: Path, request: MakersRequest) -> MakersRequest | None:
    """The request of somebody who asked after us, if ours is not there any more."""
    newest = _read_request(folder)
    return None if newest is None or newest.request_id == request.request_id else newest


def _not_in_time(folder: Path, request: MakersRequest, state: RunState, seconds: float) -> str:
    has_begun = state.request_id == request.request_id
    rest = "It goes on trying." if has_begun else "It has not begun with this request, and will when it comes to it."
    return (
        f"waited {seconds:g} s for the run in {str(folder)!r} to have {counted(request.makers, 'maker')}; it has "
        f"{state.makers}{': ' + state.message if state.message else ''}. {rest}"
    )


def _state_of_living_run(folder: Path) -> RunState:
    try:
        state = RunState(**json.loads((folder / _STATE).read_text(encoding="utf-8")))
    except FileNotFoundError:
        rule = f"RUN_FOLDER must be the output folder of a run that is training, got {str(folder)!r}"
        if not folder.exists():
            raise ConfigError(f"{rule}, which does not exist. It is the run's run.output; check the path.") from None
        raise ConfigError(
            f"{rule}, which has no {_STATE}. A run writes it a few seconds after its start: if it is still starting, "
            "try again. Runs with --sync never do, and have one maker for good."
        ) from None
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{str(folder / _STATE)!r} cannot be read: {error}. Is it of this version of coati?"
        ) from None
    if state.status == "ended":
        raise ConfigError(f"the run in {str(folder)!r} has ended{': ' + state.message if state.message else ''}.")
    if state.host == socket.gethostname() and not _is_process_here(state):
        raise ConfigError(f"no run is alive in {str(folder)!r}: its process {state.pid} is gone. Start it again.")
    return state


def living_run(folder: Path) -> RunState | None:
    """What the run says that is at work in this folder; None if none is, as far as one can tell."""
    try:
        state = _state_of_living_run(folder)
        silent = time.time() - (folder / _STATE).stat().st_mtime
    except (ConfigError, OSError):
        return None
    # A process of that number may be another one by now: a run says something twice a second, unless it saves.
    return state if silent < (_SAVING_SECONDS if _is_process_here(state) else _SILENCE_SECONDS) else None


def _is_process_here(state: RunState) -> bool:
    if state.host != socket.gethostname():
        return False
    try:
        os.kill(state.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # somebody else's, but there
    return True


def _read_request(folder: Path) -> MakersRequest | None:
    try:
        fields = json.loads((folder / _CONTROL).read_text(encoding="utf-8"))
        return MakersRequest(str(fields["request_id"]), int(fields["makers"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        logger.debug("%s is not a request: %s", _CONTROL, error)
        return None


def _write(path: Path, fields: dict[str, Any]) -> None:
    whole = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        whole.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
        whole.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            whole.unlink()
        raise

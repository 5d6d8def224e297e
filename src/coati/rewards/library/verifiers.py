"""Verifiers: other packages take a completion apart, and a hostile one can keep them busy for ever.

So they run in a child process (see `isolation_of`). There each sample has a time limit, by a signal, which works on the
main thread only; what no signal ends, such as a huge power in C, ends with the process at the reward's deadline.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

from coati.errors import ConfigError
from coati.rewards.calling import Verdict, excerpt, needed_package, raised

_MOST_CHARACTERS = 100_000  # of a completion: the end, where answers are
_USABLE = 0.9  # share of a call's time; the rest is for its answer


class _TooSlow(BaseException):
    """A sample has taken its time; not an Exception, which packages catch."""


def math_verify(*, seconds: float = 5.0) -> Callable[..., list[Verdict]]:
    """1 where Math-Verify finds the completion's last answer equal to the column `answer`, else 0."""
    package = needed_package("math_verify")
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limit is off

    def verdict(completion: str, answer: Any) -> Verdict:
        gold = str(answer)
        if "\\" in gold and not any(mark in gold for mark in ("$", "\\boxed", "\\(", "\\[")):
            gold = f"${gold}$"  # LaTeX is looked for only in an environment
        expected = package.parse(gold, parsing_timeout=None)
        if not expected and any(map(str.isdigit, gold)):  # (x+1)^2 or [0, 1), and not a word
            expected = package.parse(f"${gold}$", parsing_timeout=None)
        if not expected:
            return Verdict(error=f"cannot read the answer {excerpt(gold)!r} as mathematics")
        found = package.parse(completion, parsing_timeout=None)
        is_right = bool(found) and package.verify(expected, found, timeout_seconds=None)
        return Verdict(float(is_right), {"found": next((excerpt(one) for one in found if isinstance(one, str)), None)})

    return lambda completions, answer, timeout_seconds: _each(verdict, seconds, timeout_seconds, completions, answer)


def reasoning_gym(*, tag: str = "answer", seconds: float = 5.0) -> Callable[..., list[Verdict]]:
    """The score that the task of a row's `metadata.source_dataset` gives the text between the last <answer> tags.

    Rows are entries of reasoning-gym: `question` (or the prompt), `answer`, and `metadata`, which may be JSON text.
    A completion without the tags has 0; `tag = ""` takes the whole text.
    """
    # Each call makes the task again, which reads a list of words for some: 50 ms for each sample.
    scorer_of = functools.cache(needed_package("reasoning_gym", "reasoning").get_score_answer_fn)

    def verdict(completion: str, question: str, answer: Any, metadata: Any) -> Verdict:
        metadata = json.loads(metadata) if isinstance(metadata, str) else metadata
        before, closing, _ = completion.rpartition(f"</{tag}>")
        _, opening, inner = before.rpartition(f"<{tag}>")
        text = (inner if tag else completion).strip()
        score = 0.0
        if (opening and closing) or not tag:
            entry = {"question": question, "answer": answer, "metadata": metadata}
            score = float(scorer_of(metadata["source_dataset"])(text, entry))
        return Verdict(score, {"found": excerpt(text)})

    return lambda prompts, completions, answer, metadata, timeout_seconds, question=None: _each(
        verdict, seconds, timeout_seconds, completions, question or prompts, answer, metadata
    )


def json_schema(*, schema: Mapping[str, Any] | None = None, seconds: float = 5.0) -> Callable[..., list[Verdict]]:
    """1 where the completion, or its last fenced block, is JSON that the schema allows, else 0.

    Without the option, each row has its own in the column `schema`, which may be JSON text.
    """
    package, registry = needed_package("jsonschema"), needed_package("referencing").Registry()

    def verdict(completion: str, schema: Any) -> Verdict:
        schema = json.loads(schema) if isinstance(schema, str) else schema
        kind = package.validators.validator_for(schema)
        kind.check_schema(schema)
        fenced = completion.split("```")[1::2]
        if fenced and not completion.lstrip().startswith(("{", "[")):
            completion = fenced[-1].removeprefix("json")
        try:
            value = json.loads(completion, parse_constant=_refused)
        except (ValueError, RecursionError) as error:  # not JSON, or nested too deeply
            return Verdict(0.0, {"fault": excerpt(f"{type(error).__name__}: {error}")})
        # A registry of our own looks nothing up in the network.
        fault = package.exceptions.best_match(kind(schema, registry=registry).iter_errors(value))
        return Verdict(
            float(fault is None), {"fault": excerpt(f"{fault.json_path}: {fault.message}")} if fault else None
        )

    if schema is None:
        return lambda completions, schema, timeout_seconds: _each(
            verdict, seconds, timeout_seconds, completions, schema
        )
    try:
        verdict("", schema)
    except package.SchemaError as error:
        raise ConfigError(f"Reward 'json-schema' needs a valid schema: {error.message}. Correct it.") from None
    return lambda completions, timeout_seconds: _each(
        verdict, seconds, timeout_seconds, completions, [schema] * len(completions)
    )


def _refused(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _each(verdict: Callable[..., Verdict], seconds: float, timeout_seconds: float, *rows: list[Any]) -> list[Verdict]:
    """Ask for one sample after the other; one that raises or takes too long is a failure of its own."""
    until, verdicts = time.monotonic() + _USABLE * timeout_seconds, []
    for completion, *values in zip(*rows, strict=True):
        limit = min(seconds, until - time.monotonic())
        try:
            with _limited(limit), _memory_errors_kept():
                found = verdict(completion[-_MOST_CHARACTERS:], *values)
        except _TooSlow:
            found = Verdict(error=f"took more than {seconds:g} s" if limit == seconds else "had no time left")
        except Exception as error:
            found = Verdict(error=raised(error))
        verdicts.append(found)
    return verdicts


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise `_TooSlow` inside after so many seconds, on the main thread; at once if there are none."""

    def end(*_: object) -> None:
        raise _TooSlow

    if seconds <= 0:
        end()
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def _memory_errors_kept() -> Iterator[None]:
    """Raise MemoryError at the end if one was raised inside: packages catch it, and find the answer wrong instead."""
    is_out = False

    def watch(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal is_out
        is_out |= event == "exception" and issubclass(arg[0], MemoryError)
        frame.f_trace_lines = False  # calls and exceptions are enough
        return watch

    before = sys.gettrace()
    sys.settrace(watch)
    try:
        yield
    finally:
        sys.settrace(before)
    if is_out:
        raise MemoryError("there was no memory to check this sample")

"""Verifiers: rewards that parse completions with other packages, which hostile completions can keep busy forever.

They therefore run in a child process (see `isolation_of`), where a signal limits the time of each sample. Signals work
on the main thread only. Code that a signal cannot interrupt, such as a huge power in C, is killed at the deadline.
"""

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
from coati.rewards.calling import Verdict, describe_exception, excerpt, needed_package

_MAX_CHARACTERS = 100_000  # last characters of a completion, where answers are
_USABLE_FRACTION = 0.9  # of a call's time; the rest is left for returning the scores


class _TooSlow(BaseException):
    """A sample exceeds its time limit. Not an Exception, because packages catch those."""


def math_verify(*, seconds: float = 5.0) -> Callable[..., list[Verdict]]:
    """Score 1 if Math-Verify finds the completion's last answer equal to the column `answer`, else 0."""
    package = needed_package("math_verify")
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limit is off

    def verdict(completion: str, answer: Any) -> Verdict:
        gold = str(answer)
        if "\\" in gold and not any(mark in gold for mark in ("$", "\\boxed", "\\(", "\\[")):
            gold = f"${gold}$"  # LaTeX is parsed only inside delimiters
        expected = package.parse(gold, parsing_timeout=None)
        if not expected and any(map(str.isdigit, gold)):  # such as (x+1)^2 or [0, 1), but not a word
            expected = package.parse(f"${gold}$", parsing_timeout=None)
        if not expected:
            return Verdict(error=f"cannot read the answer {excerpt(gold)!r} as mathematics")
        found = package.parse(completion, parsing_timeout=None)
        is_right = bool(found) and package.verify(expected, found, timeout_seconds=None)
        return Verdict(float(is_right), {"found": next((excerpt(one) for one in found if isinstance(one, str)), None)})

    return lambda completions, answer, timeout_seconds: _each(verdict, seconds, timeout_seconds, completions, answer)


def reasoning_gym(*, tag: str = "answer", seconds: float = 5.0) -> Callable[..., list[Verdict]]:
    """Score the text between the last <answer> tags with the task in the row's `metadata.source_dataset`.

    Rows are entries of reasoning-gym: `question` (or the prompt), `answer`, and `metadata`, which may be JSON text.
    A completion without the tags scores 0. With `tag = ""`, the whole text is the answer.
    """
    # Cached, because creating a task can take 50 ms: some read a list of words.
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
    """Score 1 if the completion, or its last fenced block, is JSON that is valid under the schema, else 0.

    Without the option `schema`, each row has its schema in the column `schema`, which may be JSON text.
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
        # An empty registry fetches nothing from the network.
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
        raise ConfigError(
            f"Reward 'json-schema' needs a valid schema: {error.message}. Correct reward.options."
        ) from None
    return lambda completions, timeout_seconds: _each(
        verdict, seconds, timeout_seconds, completions, [schema] * len(completions)
    )


def _refused(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _each(verdict: Callable[..., Verdict], seconds: float, timeout_seconds: float, *rows: list[Any]) -> list[Verdict]:
    """Verify the samples one by one. One that raises or takes too long is a failure on this sample alone."""
    until, verdicts = time.monotonic() + _USABLE_FRACTION * timeout_seconds, []
    for completion, *values in zip(*rows, strict=True):
        limit = min(seconds, until - time.monotonic())
        try:
            with _limited(limit), _memory_errors_kept():
                found = verdict(completion[-_MAX_CHARACTERS:], *values)
        except _TooSlow:
            found = Verdict(error=f"took more than {seconds:g} s" if limit == seconds else "had no time left")
        except Exception as error:
            found = Verdict(error=describe_exception(error))
        verdicts.append(found)
    return verdicts


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise `_TooSlow` in the body after `seconds`, at once if they are 0 or less. No limit off the main thread."""

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
    """Raise MemoryError at the end if one was raised in the body, where a package may catch it and return False."""
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
        raise MemoryError("out of memory while checking this sample")

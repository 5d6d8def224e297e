"""Verifiers: they take a completion apart with other packages, which a hostile one can keep busy for ever.

So they run in a child process (see `isolation_of`). There each sample has a time limit, by a signal, which works on the
main thread only; what no signal ends, such as a huge power in C, ends with the process at the reward's deadline. On
other threads nothing is limited but the whole call.
"""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from coati.errors import ConfigError
from coati.reward_functions.calling import Verdict, excerpt, raised
from coati.reward_functions.loading import needed_package

_MOST_CHARACTERS = 100_000  # of a completion: the end, where answers are
_RESERVE = 0.1  # share of a call's time that is kept for the answer


class _TooSlow(BaseException):
    """A sample has taken its time; not an Exception, which packages catch."""


def math_verify(*, seconds: float = 5.0) -> Callable[..., list[Verdict]]:
    """1 where Math-Verify finds the completion's last answer equal to the column `answer`, else 0."""
    needed_package("math_verify")

    def score(completions: list[str], answer: list[Any], timeout_seconds: float) -> list[Verdict]:
        from math_verify import parse, verify  # here, because it takes a second, and not within a sample's time

        logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limit is off

        def verdict(completion: str, answer: Any) -> Verdict:
            gold = str(answer)
            if "\\" in gold and not any(mark in gold for mark in ("$", "\\boxed", "\\(", "\\[")):
                gold = f"${gold}$"  # LaTeX is looked for only in an environment
            if not (expected := parse(gold, parsing_timeout=None)):
                return Verdict(error=f"cannot read the answer {excerpt(gold)!r} as mathematics")
            found = parse(completion, parsing_timeout=None)
            is_right = bool(found) and verify(expected, found, timeout_seconds=None)
            read = next((excerpt(part) for part in found if isinstance(part, str)), None)
            return Verdict(float(is_right), {"found": read})

        return _each(verdict, seconds, timeout_seconds, completion=completions, answer=answer)

    return score


def reasoning_gym(*, tag: str = "answer", seconds: float = 5.0) -> Callable[..., list[Verdict]]:
    """The score that the task of an entry's `metadata.source_dataset` gives the text between the last <answer> tags.

    Rows are entries of reasoning-gym: `question` (or the prompt), `answer`, and `metadata`, which may be JSON text.
    A completion without the tags has 0; `tag = ""` takes the whole text.
    """
    needed_package("reasoning_gym", "reasoning")

    def score(
        prompts: list[str],
        completions: list[str],
        answer: list[Any],
        metadata: list[Any],
        timeout_seconds: float,
        question: list[str] | None = None,
    ) -> list[Verdict]:
        from reasoning_gym import get_score_answer_fn  # here, because it takes seconds, and not within a sample's time

        def verdict(completion: str, **entry: Any) -> Verdict:
            if isinstance(entry["metadata"], str):
                entry["metadata"] = json.loads(entry["metadata"])
            task = entry["metadata"]["source_dataset"]
            text = completion
            if tag:
                before, closing, _ = text.rpartition(f"</{tag}>")
                _, opening, text = before.rpartition(f"<{tag}>")
                if not (opening and closing):
                    return Verdict(0.0, {"task": task, "found": None})
            text = text.strip()
            return Verdict(float(get_score_answer_fn(task)(text, entry)), {"task": task, "found": excerpt(text)})

        entries = {"question": question or prompts, "answer": answer, "metadata": metadata}
        return _each(verdict, seconds, timeout_seconds, completion=completions, **entries)

    return score


def json_schema(*, schema: Mapping[str, Any] | None = None, seconds: float = 5.0) -> Callable[..., list[Verdict]]:
    """1 where the completion, or its last fenced block, is JSON that the schema allows, else 0.

    Without the option, each row has its own in the column `schema`, which may be JSON text.
    """
    needed_package("jsonschema")
    from jsonschema import exceptions, validators
    from referencing import Registry

    def verdict(completion: str, schema: Any) -> Verdict:
        schema = json.loads(schema) if isinstance(schema, str) else schema
        kind = validators.validator_for(schema)
        kind.check_schema(schema)
        fenced = completion.split("```")[1::2]
        if fenced and not completion.lstrip().startswith(("{", "[")):
            completion = fenced[-1].removeprefix("json")
        try:
            value = json.loads(completion, parse_constant=_refused)
            # A registry of our own looks nothing up in the network.
            fault = exceptions.best_match(kind(schema, registry=Registry()).iter_errors(value))
        except (ValueError, RecursionError) as error:  # not JSON, or nested too deeply
            return Verdict(0.0, {"fault": excerpt(f"{type(error).__name__}: {error}")})
        if fault is not None:
            return Verdict(0.0, {"fault": excerpt(f"{fault.json_path}: {fault.message}")})
        return Verdict(1.0)

    def score(completions: list[str], schema: list[Any], timeout_seconds: float) -> list[Verdict]:
        return _each(verdict, seconds, timeout_seconds, completion=completions, schema=schema)

    if schema is None:
        return score
    try:
        verdict("", schema)
    except exceptions.SchemaError as error:
        raise ConfigError(f"Reward 'json-schema' needs a valid schema: {error.message}. Correct it.") from None
    return lambda completions, timeout_seconds: score(completions, [schema] * len(completions), timeout_seconds)


def _refused(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _each(verdict: Callable[..., Verdict], seconds: float, timeout_seconds: float, **rows: list[Any]) -> list[Verdict]:
    """Ask for one sample after the other; one that raises or takes too long is a failure of its own."""
    until = time.monotonic() + (1 - _RESERVE) * timeout_seconds
    verdicts = []
    for values in zip(*rows.values(), strict=True):
        row = dict(zip(rows, values, strict=True))
        row["completion"] = row["completion"][-_MOST_CHARACTERS:]
        limit = min(seconds, until - time.monotonic())
        try:
            with _limited(limit):
                found = verdict(**row)
        except _TooSlow:
            found = Verdict(error=f"took more than {seconds:g} s" if limit == seconds else "had no time left")
        except Exception as error:
            found = Verdict(error=raised(error))
        verdicts.append(found)
    return verdicts


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise `_TooSlow` inside after so many seconds, if this is the main thread; at once if there are none."""
    if seconds <= 0:
        raise _TooSlow
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: object) -> None:
        raise _TooSlow

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)

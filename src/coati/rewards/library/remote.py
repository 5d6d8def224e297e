"""Rewards that ask a server: one of your own over HTTP, or a language model as the judge or the teacher.

A request without an answer, or with one that says the server is busy, is sent again, with growing pauses, until the
call's time is up: a server may be away for a while. What a wrong answer leaves without a score is a failure.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import re
import time
from collections.abc import Callable, Mapping
from concurrent.futures import wait
from typing import Any
from urllib.parse import urlsplit

import requests
import urllib3

from coati.background import run_in_background
from coati.errors import ConfigError
from coati.rewards.calling import CallFailed, Verdict, excerpt, read_verdicts, require

_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.5, 15.0
_ANSWER_BYTES = 16 << 20
_USABLE = 0.9  # share of a call's time; the rest is for its end
_BUSY = {408, 409, 425, 429, *range(500, 600)}
_SCORE = re.compile(r'(?<![a-z])score"?\s{0,9}[:=]\s{0,9}"?(-?\d{1,9}(?:\.\d{1,9})?)', re.IGNORECASE)
_PROMPT = """Rate how well the response answers the prompt, from {low} (worst) to {high} (best).

<prompt>
{prompt}
</prompt>

<response>
{completion}
</response>

Answer with one line of JSON: {"reason": "one sentence", "score": number}"""


class NoAnswer(Exception):
    """Why a request has no answer, in words; whether to ask again, and the seconds that the server asks to wait."""

    def __init__(self, what: str, *, may_repeat: bool = False, pause: float = 0.0) -> None:
        super().__init__(what)
        self.may_repeat, self.pause = may_repeat, pause


class Endpoint:
    """A URL that JSON is posted to, and the environment variable that holds its key."""

    def __init__(self, url: str, api_key_env: str, concurrency: int, request_seconds: float) -> None:
        require("http, judge or teacher", min(concurrency, request_seconds) > 0, "concurrency and request_seconds > 0")
        self._concurrency = concurrency
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
            raise ConfigError(
                "Reward option url must be http:// or https:// and a host, without a user or password, got "
                f"{parts.scheme}://{parts.hostname}. Keep keys in an environment variable, which api_key_env names."
            )
        self._url, self._name, self._seconds = url, parts.netloc, request_seconds
        self._key = os.environ.get(api_key_env, "").strip()
        if api_key_env and not (self._key and self._key.isascii() and self._key.isprintable()):
            raise ConfigError(
                f"Reward option api_key_env names the variable {api_key_env!r}, which is not set here or is no key. "
                "Set it in the shell that starts the run, or on a cluster where `ray start` ran."
            )

    def ask(self, body: Mapping[str, Any], until: float) -> Any:
        """Post until there is an answer, or no time. NoAnswer says why there is none."""
        data = json.dumps(body, default=str).encode()
        for attempt in itertools.count():
            try:
                return self._post(data, min(self._seconds, until - time.monotonic()))
            except NoAnswer as failure:
                pause = min(_LONGEST_PAUSE_SECONDS, _PAUSE_SECONDS * 2.0**attempt)
                pause = max(failure.pause, random.SystemRandom().uniform(pause / 2, pause))
                if not failure.may_repeat or time.monotonic() + pause >= until:
                    raise NoAnswer(f"{failure} (from {self._name}, asked {attempt + 1} times)") from None
            time.sleep(pause)

    def _post(self, data: bytes, seconds: float) -> Any:
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        options = {"headers": headers, "auth": self._authorize, "timeout": max(seconds, 1e-3), "stream": True}
        deadline, content = time.monotonic() + seconds, b""
        try:
            # A redirect could take the key elsewhere.
            with requests.post(self._url, data, allow_redirects=False, **options) as response:
                while len(content) <= _ANSWER_BYTES and (part := response.raw.read1(1 << 16)):
                    content += part
                    if time.monotonic() > deadline:
                        raise requests.Timeout
        except (requests.Timeout, urllib3.exceptions.ReadTimeoutError):
            raise NoAnswer(f"had no whole answer within {seconds:.3g} s", may_repeat=True) from None
        except (requests.RequestException, urllib3.exceptions.HTTPError) as error:
            raise NoAnswer(f"could not reach the server: {type(error).__name__}", may_repeat=True) from None
        text = content[:1000].decode("utf-8", "replace")
        text = excerpt(text.replace(self._key, "***") if self._key else text)  # servers quote what they refuse
        if (status := response.status_code) != 200:
            pause = response.headers.get("Retry-After", "")
            seconds = float(pause) if pause.isdigit() else 0.0
            raise NoAnswer(f"had the answer HTTP {status}: {text}", may_repeat=status in _BUSY, pause=seconds)
        try:
            return json.loads(content)
        except (ValueError, RecursionError):
            raise NoAnswer(f"had an answer that is not JSON, or too long: {text}") from None

    def _authorize(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        if self._key:
            request.headers["Authorization"] = f"Bearer {self._key}"
        return request

    def in_parallel(
        self, ask: Callable[[slice, float], list[Verdict]], size: int, timeout_seconds: float, batch_size: int = 1
    ) -> list[Verdict]:
        """Ask for all rows, a batch at a time, with so many requests under way; raise what is no NoAnswer."""
        until = time.monotonic() + _USABLE * timeout_seconds
        verdicts = [Verdict(error="had no answer in time")] * size
        waiting = iter([slice(start, min(start + batch_size, size)) for start in range(0, size, batch_size)])

        def work() -> None:
            for rows in waiting:  # an iterator of a list gives each once, to whichever thread asks
                if time.monotonic() >= until:
                    return
                try:
                    verdicts[rows] = ask(rows, until)
                except NoAnswer as error:
                    verdicts[rows] = [Verdict(error=str(error))] * (rows.stop - rows.start)

        workers = [run_in_background(work, name="reward-request") for _ in range(min(self._concurrency, size))]
        done, _ = wait(workers, timeout=timeout_seconds * (1 + _USABLE) / 2)
        for worker in done:
            worker.result()
        return list(verdicts)


def http(
    *, url: str, api_key_env: str = "", batch_size: int = 16, concurrency: int = 4, request_seconds: float = 30.0
) -> Callable[..., list[Verdict]]:
    """The scores that a server returns for `{"prompts": […], "completions": […], "columns": {…}}`.

    It answers `{"scores": […]}`, with what a reward function may return as JSON.
    """
    endpoint = Endpoint(url, api_key_env, concurrency, request_seconds)
    require("http", batch_size > 0, "batch_size > 0")

    def score(
        prompts: list[str], completions: list[str], timeout_seconds: float, **columns: list[Any]
    ) -> list[Verdict]:
        columns.pop("completion_ids", None)

        def ask(rows: slice, until: float) -> list[Verdict]:
            sent = {name: values[rows] for name, values in columns.items()}
            body = {"prompts": prompts[rows], "completions": completions[rows], "columns": sent}
            answer = endpoint.ask(body, until)
            try:
                scores = answer.get("scores") if isinstance(answer, Mapping) else answer
                return read_verdicts(scores, len(completions[rows]))
            except CallFailed as error:
                raise NoAnswer(f"had a wrong answer: the server {error.what}") from None

        return endpoint.in_parallel(ask, len(completions), timeout_seconds, batch_size)

    return score


def judge(
    *,
    url: str,
    model: str,
    api_key_env: str = "",
    prompt: str = _PROMPT,
    low: float = 0.0,
    high: float = 10.0,
    concurrency: int = 8,
    request_seconds: float = 60.0,
    body: Mapping[str, Any] | None = None,
) -> Callable[..., list[Verdict]]:
    """What a language model behind an OpenAI-compatible `url`, up to /v1, thinks of each completion, from 0 to 1.

    `prompt` may name {prompt}, {completion}, {low}, {high} and columns, and asks for "score: number"; the last counts.
    """
    endpoint = Endpoint(f"{url.rstrip('/')}/chat/completions", api_key_env, concurrency, request_seconds)
    require("judge", low < high, "low < high")
    request = {"model": model, "max_tokens": 512, "temperature": 0.0, **(body or {})}

    def score(
        prompts: list[str], completions: list[str], timeout_seconds: float, **columns: list[Any]
    ) -> list[Verdict]:
        bounds = {name: [f"{bound:g}"] * len(prompts) for name, bound in (("low", low), ("high", high))}
        offered = {**columns, **bounds, "prompt": prompts, "completion": completions}

        def ask(rows: slice, until: float) -> list[Verdict]:
            # In one pass: what a completion has in braces stays as it is.
            text = re.sub(r"\{(\w+)\}", lambda found: str(offered[found[1]][rows.start]), prompt)
            answer = endpoint.ask({**request, "messages": [{"role": "user", "content": text}]}, until)
            try:
                choice = answer["choices"][0]
                said = str(choice["message"]["content"])
                if choice.get("finish_reason") == "length":  # a number in what it has thought so far is no score
                    raise NoAnswer(f"had an answer that was cut at its max_tokens: {said[-80:]}")
                rating = float(_SCORE.findall(said)[-1])
            except (KeyError, IndexError, TypeError, AttributeError):
                said, rating = str(answer), math.nan
            if not low <= rating <= high:
                raise NoAnswer(f"had an answer without a score from {low:g} to {high:g}: {said[-80:]}")
            return [Verdict((rating - low) / (high - low), {"answer": said[-500:]})]

        return endpoint.in_parallel(ask, len(completions), timeout_seconds)

    return score


def teacher(
    *,
    url: str,
    model: str,
    api_key_env: str = "",
    concurrency: int = 8,
    request_seconds: float = 60.0,
    body: Mapping[str, Any] | None = None,
) -> Callable[..., list[Verdict]]:
    """The mean log-prob that the model of a server which has `echo`, as vLLM's, gives each completion's tokens."""
    endpoint = Endpoint(f"{url.rstrip('/')}/completions", api_key_env, concurrency, request_seconds)
    request = {"model": model, "max_tokens": 0, "echo": True, "logprobs": 1, **(body or {})}

    def score(prompts: list[str], completions: list[str], timeout_seconds: float) -> list[Verdict]:
        def ask(rows: slice, until: float) -> list[Verdict]:
            prompt, completion = prompts[rows.start], completions[rows.start]
            if not completion:
                return [Verdict()]
            answer = endpoint.ask({**request, "prompt": prompt + completion}, until)
            try:
                found = answer["choices"][0]["logprobs"]
                starts = [*found["text_offset"], found["text_offset"][-1] + len(found["tokens"][-1])]
                # Counted from the end: servers may put a token of their own before the prompt.
                start = starts[-1] - len(completion)
                pairs = zip(found["token_logprobs"], starts[1:], strict=True)
                logprobs = [float(logprob) for logprob, end in pairs if end > start]
                return [Verdict(sum(logprobs) / len(logprobs), {"tokens": len(logprobs)})]
            except (KeyError, IndexError, TypeError, ValueError, ZeroDivisionError):
                raise NoAnswer(f"had an answer without log-probs of the prompt: {excerpt(str(answer))}") from None

        return endpoint.in_parallel(ask, len(completions), timeout_seconds)

    return score

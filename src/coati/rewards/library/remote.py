"""Rewards from a server: your own over HTTP, or a language model as a judge or teacher.

A request that gets no answer, or an answer that the server is busy, is retried with exponential backoff until the
call's time is up, so a server may be down for a while. An invalid answer is a failure of the samples in it.
"""

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
from coati.errors import ConfigError, counted
from coati.rewards.calling import CallFailed, Verdict, excerpt, read_verdicts, require

_BACKOFF_SECONDS, _MAX_BACKOFF_SECONDS = 0.5, 15.0
_ANSWER_BYTES = 16 << 20
_USABLE_FRACTION = 0.9  # of a call's time; the rest is left for returning the scores
_RETRIED_STATUSES = {408, 409, 425, 429, *range(500, 600)}
_SCORE = re.compile(r'(?<![a-z])score"?\s{0,9}[:=]\s{0,9}"?(-?\d{1,9}(?:\.\d{1,9})?)', re.IGNORECASE)
_PROMPT = """Rate how well the response answers the prompt, from {low} (worst) to {high} (best).

<prompt>
{prompt}
</prompt>

<response>
{completion}
</response>

Answer with one line of JSON: {"reason": "one sentence", "score": number}"""


class RequestFailed(Exception):
    """A request got no usable answer; `pause` is the number of seconds that the server asks to wait before a retry."""

    def __init__(self, what: str, *, may_retry: bool = False, pause: float = 0.0) -> None:
        super().__init__(what)
        self.may_retry, self.pause = may_retry, pause


class Endpoint:
    """A URL to which JSON is posted, with a key from an environment variable."""

    def __init__(self, url: str, api_key_env: str, concurrency: int, request_seconds: float) -> None:
        if min(concurrency, request_seconds) <= 0:
            raise ConfigError(
                "Reward options concurrency and request_seconds must be greater than 0, got "
                f"{concurrency} and {request_seconds}. Correct reward.options."
            )
        self._concurrency = concurrency
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
            raise ConfigError(
                "Reward option url must be http:// or https:// and a host, without a user or password, got "
                f"{parts.scheme}://{parts.hostname}. Put a key into an environment variable that api_key_env names."
            )
        self._url, self._name, self._seconds = url, parts.netloc, request_seconds
        self._key = os.environ.get(api_key_env, "").strip()
        if api_key_env and not (self._key and self._key.isascii() and self._key.isprintable()):
            raise ConfigError(
                f"Reward option api_key_env names the variable {api_key_env!r}, which is not set here, or is not a key "
                "of printable ASCII characters. Set it in the shell that starts the run or, on a cluster, `ray start`."
            )

    def post(self, body: Mapping[str, Any], until: float) -> Any:
        """Post `body` and return the answer, with retries until the time `until`. RequestFailed if all of them fail."""
        data = json.dumps(body, default=str).encode()
        for attempt in itertools.count(1):
            try:
                return self._post_once(data, min(self._seconds, until - time.monotonic()))
            except RequestFailed as failure:
                pause = min(_MAX_BACKOFF_SECONDS, _BACKOFF_SECONDS * 2.0 ** (attempt - 1))
                pause = max(failure.pause, random.SystemRandom().uniform(pause / 2, pause))
                if not failure.may_retry or time.monotonic() + pause >= until:
                    raise RequestFailed(f"{failure} ({self._name}, {counted(attempt, 'attempt')})") from None
            time.sleep(pause)

    def _post_once(self, data: bytes, seconds: float) -> Any:
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
            raise RequestFailed(f"got no complete answer within {seconds:.3g} s", may_retry=True) from None
        except (requests.RequestException, urllib3.exceptions.HTTPError) as error:
            raise RequestFailed(f"could not reach the server: {type(error).__name__}", may_retry=True) from None
        text = content[:1000].decode("utf-8", "replace")
        text = excerpt(text.replace(self._key, "***") if self._key else text)  # servers quote what they reject
        if (status := response.status_code) != 200:
            pause = response.headers.get("Retry-After", "")
            seconds = float(pause) if pause.isdigit() else 0.0
            raise RequestFailed(f"got HTTP {status}: {text}", may_retry=status in _RETRIED_STATUSES, pause=seconds)
        try:
            return json.loads(content)
        except (ValueError, RecursionError):
            raise RequestFailed(f"got an answer that is not JSON, or too long: {text}") from None

    def _authorize(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        if self._key:
            request.headers["Authorization"] = f"Bearer {self._key}"
        return request

    def in_parallel(
        self, ask: Callable[[slice, float], list[Verdict]], size: int, timeout_seconds: float, batch_size: int = 1
    ) -> list[Verdict]:
        """Call `ask(rows, until)` for all rows in batches, `concurrency` at a time.

        RequestFailed becomes the error of its rows; other exceptions are raised.
        """
        until = time.monotonic() + _USABLE_FRACTION * timeout_seconds
        verdicts = [Verdict(error="got no answer in time")] * size
        waiting = iter([slice(start, min(start + batch_size, size)) for start in range(0, size, batch_size)])

        def work() -> None:
            for rows in waiting:  # threads share the iterator, which yields each element once
                if time.monotonic() >= until:
                    return
                try:
                    verdicts[rows] = ask(rows, until)
                except RequestFailed as error:
                    verdicts[rows] = [Verdict(error=str(error))] * (rows.stop - rows.start)

        workers = [run_in_background(work, name="reward-request") for _ in range(min(self._concurrency, size))]
        done, _ = wait(workers, timeout=timeout_seconds * (1 + _USABLE_FRACTION) / 2)
        for worker in done:
            worker.result()
        return list(verdicts)


def http(
    *, url: str, api_key_env: str = "", batch_size: int = 16, concurrency: int = 4, request_seconds: float = 30.0
) -> Callable[..., list[Verdict]]:
    """Get scores from a server to which `{"prompts": […], "completions": […], "columns": {…}}` is posted.

    It must answer `{"scores": […]}`, with one entry per completion as a reward function returns it, in JSON.
    """
    endpoint = Endpoint(url, api_key_env, concurrency, request_seconds)
    require("http", batch_size > 0, "batch_size > 0")

    def score(
        prompts: list[str], completions: list[str], timeout_seconds: float, **columns: list[Any]
    ) -> list[Verdict]:
        columns.pop("completion_ids", None)

        def ask(rows: slice, until: float) -> list[Verdict]:
            part = {name: values[rows] for name, values in columns.items()}
            body = {"prompts": prompts[rows], "completions": completions[rows], "columns": part}
            answer = endpoint.post(body, until)
            try:
                scores = answer.get("scores") if isinstance(answer, Mapping) else answer
                return read_verdicts(scores, len(completions[rows]))
            except CallFailed as error:
                raise RequestFailed(f"got an invalid answer: the server {error.what}") from None

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
    """Score each completion from 0 to 1 with a language model behind an OpenAI-compatible API; `url` ends in /v1.

    `prompt` may contain {prompt}, {completion}, {low}, {high} and columns, and must ask for "score: number". The last
    score in the answer counts, and is mapped from `low` … `high` to 0 … 1.
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
            # In a single pass, so that braces in a completion are not substituted.
            text = re.sub(r"\{(\w+)\}", lambda found: str(offered[found[1]][rows.start]), prompt)
            answer = endpoint.post({**request, "messages": [{"role": "user", "content": text}]}, until)
            try:
                choice = answer["choices"][0]
                reply = str(choice["message"]["content"])
                if choice.get("finish_reason") == "length":  # a number in unfinished reasoning is not the score
                    raise RequestFailed(f"got an answer that was truncated at max_tokens: {reply[-80:]}")
                rating = float(_SCORE.findall(reply)[-1])
            except (KeyError, IndexError, TypeError, AttributeError):
                reply, rating = str(answer), math.nan
            if not low <= rating <= high:
                raise RequestFailed(f"got an answer without a score from {low:g} to {high:g}: {reply[-80:]}")
            return [Verdict((rating - low) / (high - low), {"answer": reply[-500:]})]

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
    """Score each completion by its mean token log-prob under a server's model. The server needs `echo`, as vLLM has."""
    endpoint = Endpoint(f"{url.rstrip('/')}/completions", api_key_env, concurrency, request_seconds)
    request = {"model": model, "max_tokens": 0, "echo": True, "logprobs": 1, **(body or {})}

    def score(prompts: list[str], completions: list[str], timeout_seconds: float) -> list[Verdict]:
        def ask(rows: slice, until: float) -> list[Verdict]:
            prompt, completion = prompts[rows.start], completions[rows.start]
            if not completion:
                return [Verdict()]
            answer = endpoint.post({**request, "prompt": prompt + completion}, until)
            try:
                found = answer["choices"][0]["logprobs"]
                starts = [*found["text_offset"], found["text_offset"][-1] + len(found["tokens"][-1])]
                # Measured from the end, because servers may add a token before the prompt.
                start = starts[-1] - len(completion)
                pairs = zip(found["token_logprobs"], starts[1:], strict=True)
                logprobs = [float(logprob) for logprob, end in pairs if end > start]
                return [Verdict(sum(logprobs) / len(logprobs), {"tokens": len(logprobs)})]
            except (KeyError, IndexError, TypeError, ValueError, ZeroDivisionError):
                raise RequestFailed(f"got an answer without prompt log-probs: {excerpt(str(answer))}") from None

        return endpoint.in_parallel(ask, len(completions), timeout_seconds)

    return score

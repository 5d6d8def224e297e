"""The library of rewards, by name. Each is a function that takes options and returns a reward function. No torch."""

LIBRARY = {
    "math-verify": "verifiers:math_verify",
    "reasoning-gym": "verifiers:reasoning_gym",
    "json-schema": "verifiers:json_schema",
    "regex": "text:regex",
    "format": "text:tags",
    "length": "text:length",
    "repetition": "text:repetition",
    "overlong": "text:overlong",
    "http": "remote:http",
    "judge": "remote:judge",
    "teacher": "remote:teacher",
}
"""The "module:function" that makes each reward."""
_ISOLATION = {"verifiers": "process", "remote": "thread"}


def isolation_of(name: str, chosen: str) -> str:
    """Return where a function runs: verifiers in a process, clients of servers on a thread, others as `chosen`."""
    return _ISOLATION.get(LIBRARY.get(name, "").partition(":")[0], chosen)

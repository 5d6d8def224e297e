"""The rewards that have a name: each is a function of its options that returns a reward function. No torch."""

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
"""What makes each of them."""
_ISOLATION = {"verifiers": "process", "remote": "thread"}


def isolation_of(name: str, chosen: str) -> str:
    """Return where a function runs: as `chosen`, but verifiers in a process, which can be killed, and clients not."""
    return _ISOLATION.get(LIBRARY.get(name, "").partition(":")[0], chosen)

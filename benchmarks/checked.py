"""Argument checks and output settings that all benchmarks share."""

import argparse
import os
from collections.abc import Callable


def one_or_more(text: str) -> int:
    """Parse an integer of at least 1."""
    return _at_least(1, text)


def two_or_more(text: str) -> int:
    """Parse an integer of at least 2."""
    return _at_least(2, text)


def zero_or_more(text: str) -> int:
    """Parse an integer of at least 0."""
    return _at_least(0, text)


def below_one(text: str) -> float:
    """Parse a number between 0 and 1, exclusive."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < 1.0:
        raise argparse.ArgumentTypeError(f"must be above 0 and below 1, got {text!r}")
    return value


def two_counts(separator: str) -> Callable[[str], str]:
    """Return a check for two positive integers with `separator` between them, such as "16+16"."""

    def checked(text: str) -> str:
        numbers = text.split(separator)
        if len(numbers) != 2 or not all(number.isdecimal() and int(number) > 0 for number in numbers):
            raise argparse.ArgumentTypeError(f"must be two numbers above 0 with {separator!r} between, got {text!r}")
        return text

    return checked


def check_device(parser: argparse.ArgumentParser, device: str) -> None:
    """Exit with an error if the device is not available."""
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            remedy = "--device cpu --tiny" if "--tiny" in parser.format_usage() else "--device cpu"
            parser.error(f"--device cuda needs a GPU, and torch {torch.__version__} sees none here. Use {remedy}.")


def check_warmup(parser: argparse.ArgumentParser, *, steps: int, warmup: int) -> None:
    """Exit with an error if no step would be counted."""
    if not warmup < steps:
        parser.error(f"--steps must be above --warmup ({warmup}), which are not counted, got {steps}")


def quiet_libraries() -> None:
    """Silence progress bars and hints of libraries. Call it before importing them."""
    for name in ("HF_DATASETS_DISABLE_PROGRESS_BARS", "HF_HUB_DISABLE_PROGRESS_BARS"):
        os.environ.setdefault(name, "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def _at_least(least: int, text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"must be a whole number, {least} or more, got {text!r}")
    return value

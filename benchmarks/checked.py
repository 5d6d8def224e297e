"""Arguments that every benchmark checks in the same way, and what all of them keep quiet."""

import argparse
import os
from collections.abc import Callable


def one_or_more(text: str) -> int:
    """A whole number, 1 or more."""
    return _at_least(1, text)


def two_or_more(text: str) -> int:
    """A whole number, 2 or more."""
    return _at_least(2, text)


def zero_or_more(text: str) -> int:
    """A whole number, 0 or more."""
    return _at_least(0, text)


def below_one(text: str) -> float:
    """A number above 0 and below 1."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < 1.0:
        raise argparse.ArgumentTypeError(f"must be above 0 and below 1, got {text!r}")
    return value


def two_counts(separator: str) -> Callable[[str], str]:
    """Checks for two whole numbers, 1 or more each, with something between them, such as "16+16"."""

    def checked(text: str) -> str:
        numbers = text.split(separator)
        if len(numbers) != 2 or not all(number.isdecimal() and int(number) > 0 for number in numbers):
            raise argparse.ArgumentTypeError(f"must be two numbers above 0 with {separator!r} between, got {text!r}")
        return text

    return checked


def check_device(parser: argparse.ArgumentParser, device: str) -> None:
    """End with a sentence if the device is not there."""
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            remedy = "--device cpu --tiny" if "--tiny" in parser.format_usage() else "--device cpu"
            parser.error(f"--device cuda needs a GPU, and torch {torch.__version__} sees none here. Use {remedy}.")


def check_warmup(parser: argparse.ArgumentParser, *, steps: int, warmup: int) -> None:
    """End with a sentence if no step would be counted."""
    if not warmup < steps:
        parser.error(f"--steps must be above --warmup ({warmup}), which are not counted, got {steps}")


def quiet_libraries() -> None:
    """Keep the progress bars and hints of libraries that are imported after this out of the output."""
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

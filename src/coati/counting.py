"""Formatting of counts, lists of names and durations in messages."""

from collections.abc import Iterable


def counted(number: float, one: str, many: str = "") -> str:
    """Return a number with its noun: "1 maker", "2,000 makers", "0.5 GPUs"."""
    amount = f"{number:,}" if isinstance(number, int) else f"{number:g}"
    return f"{amount} {one if number == 1 else many or one + 's'}"


def listed(names: Iterable[str], *, most: int = 5) -> str:
    """Join names with commas; if there are more than `most`, abbreviate: "maker-0 … maker-63 (64)"."""
    all_names = list(names)
    return ", ".join(all_names) if len(all_names) <= most else f"{all_names[0]} … {all_names[-1]} ({len(all_names)})"


def format_seconds(seconds: float) -> str:
    """Return a duration in a unit that suits its size: "12.3 ms", "12.3 s", "12 min 34 s"."""
    if seconds >= 60:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes:,} min {rest:02d} s"
    unit, scale = ("s", 1.0) if seconds >= 1 or seconds == 0 else ("ms", 1e3) if seconds >= 1e-3 else ("us", 1e6)
    value = seconds * scale
    return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"

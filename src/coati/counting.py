"""Numbers of things in messages."""


def counted(number: float, one: str, many: str = "") -> str:
    """How many there are of something.

    >>> counted(1, "maker"), counted(2000, "maker"), counted(0.5, "GPU")
    ('1 maker', '2,000 makers', '0.5 GPUs')
    """
    amount = f"{number:,}" if isinstance(number, int) else f"{number:g}"
    return f"{amount} {one if number == 1 else many or one + 's'}"

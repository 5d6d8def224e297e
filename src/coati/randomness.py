"""Keyed randomness: the draws of a sample depend only on the run's seed and the sample's id.

Philox is a counter-based generator: its key *is* the (seed, id) pair, so there is no state to store or pass around.
"""

from collections.abc import Sequence

import numpy as np

_MASK_64 = (1 << 64) - 1

# Streams separate independent uses of the same key.
STREAM_TOKENS = 0
STREAM_PROMPTS = 1
STREAM_EPOCHS = 2


def keyed_generator(seed: int, key: int, *, stream: int = STREAM_TOKENS) -> np.random.Generator:
    """Return a generator whose draws are a pure function of `(seed, key, stream)`.

    >>> a, b = keyed_generator(7, 42), keyed_generator(7, 42)
    >>> bool((a.random(3) == b.random(3)).all())
    True
    """
    # Philox takes a 128-bit key and a 256-bit counter; the highest counter word separates the streams.
    return np.random.Generator(np.random.Philox(key=_words(seed, key), counter=_words(0, 0, 0, stream)))


def _words(*numbers: int) -> np.ndarray:
    # Without dtype, numpy converts a list of small and huge integers to floats, and keys would collide.
    return np.array([number & _MASK_64 for number in numbers], dtype=np.uint64)


def keyed_uniforms(seed: int | Sequence[int], sample_ids: Sequence[int], num_draws: int) -> np.ndarray:
    """Return uniform draws in [0, 1), one row per id: [ids, num_draws], float64. `seed` is for all, or one per id."""
    philox = np.random.Philox(key=_words(0, 0), counter=_words(0, 0, 0, STREAM_TOKENS))
    draw, state = np.random.Generator(philox).random, philox.state
    draws, keys = np.empty((len(sample_ids), num_draws)), np.empty((len(sample_ids), 2), dtype=np.uint64)
    keys[:, 0] = _words(*([seed] if isinstance(seed, int) else seed))
    keys[:, 1] = _words(*sample_ids)
    for row, key in zip(draws, keys, strict=True):
        state["state"]["key"] = key
        philox.state = state  # a fifth of the time that a new generator takes
        draw(out=row)
    return draws

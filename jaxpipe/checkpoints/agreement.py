"""What all processes of a run have to do alike: each says its word, and all hear the same words.

Needed where each looks at files, which may change meanwhile, or at its share of them.
"""

from __future__ import annotations

import jax
import numpy as np
from jax.experimental import multihost_utils

_NUM_BYTES = 512


def words_of_all(word: str) -> list[str]:
    """The `word` of each process, cut to 512 bytes of UTF-8, on each of them; all must call it."""
    if jax.process_count() == 1:
        return [word]
    encoded = np.zeros(_NUM_BYTES, np.uint8)
    data = np.frombuffer(word.encode()[:_NUM_BYTES], np.uint8)
    encoded[: len(data)] = data
    rows = np.asarray(multihost_utils.process_allgather(encoded))
    return [row.tobytes().rstrip(b"\0").decode(errors="replace") for row in rows]


def word_of_first(word: str) -> str:
    """The `word` of process 0, on all of them."""
    return words_of_all(word)[0]

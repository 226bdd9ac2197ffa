"""Sets of tokens, a bit each: what a grammar lets follow."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Bitmask = NDArray[np.int32]
"""One bit per token of the logits' vocabulary, [ceil(vocab_size / 32)], bit `i % 32` of word `i // 32`."""


def has_token(mask: Bitmask, token_id: int) -> bool:
    """Return whether a token is in a mask."""
    return 0 <= token_id < 32 * len(mask) and bool((int(mask[token_id // 32]) >> (token_id % 32)) & 1)


def only_token(mask: Bitmask) -> int | None:
    """Return the only token of a mask, or None if there are more or none."""
    words = np.flatnonzero(mask)
    if len(words) != 1:
        return None
    word = int(mask[words[0]]) & 0xFFFFFFFF
    return None if word & (word - 1) else int(words[0]) * 32 + word.bit_length() - 1

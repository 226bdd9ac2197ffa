"""What the engine asks of a grammar."""

from __future__ import annotations

from typing import Protocol

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


class TokenConstraint(Protocol):
    """What may follow in a reply; the engine's view of a grammar."""

    @property
    def finished(self) -> bool:
        """Whether nothing but an end token may follow."""
        ...

    def bitmask(self) -> Bitmask | None:
        """The tokens that may follow now, or None if any may. The array is not to be written to."""
        ...

    def allows(self, token_id: int) -> bool:
        """Whether the token may follow now."""
        ...

    def advance(self, token_id: int) -> None:
        """Commit one token.

        Raises:
            GrammarError: The token may not follow; nothing has changed.
        """
        ...

    def rollback(self, num_tokens: int) -> None:
        """Undo the last advances.

        Raises:
            GrammarError: There were not so many.
        """
        ...

    def forced(self, limit: int) -> list[int]:
        """The tokens that must follow now, one after the other, at most `limit`; never an end token."""
        ...

"""What the engine asks of a grammar."""

from __future__ import annotations

from typing import Protocol

from dlite_agent.bitmask import Bitmask


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

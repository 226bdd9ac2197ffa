"""The drafter that never drafts: with it the decode loop is plain decoding."""

from __future__ import annotations

from collections.abc import Sequence

from dlite_agent.drafters.protocol import DraftView, Proposal


class NullDrafter:
    """Proposes nothing."""

    name = "null"

    def propose(self, views: Sequence[DraftView]) -> list[Proposal]:
        """Return empty proposals."""
        return [Proposal((), self.name) for _ in views]

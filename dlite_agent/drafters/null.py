"""The drafter that never drafts: with it the decode loop is plain decoding."""

from __future__ import annotations

from dlite_agent.drafters.protocol import DraftView, Proposal


class NullDrafter:
    """Proposes nothing."""

    name = "null"

    def propose(self, view: DraftView) -> Proposal:
        """Return an empty proposal."""
        return Proposal((), self.name)

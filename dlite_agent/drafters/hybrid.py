"""Two drafters in turn: the second drafts where the first has nothing to say."""

from __future__ import annotations

from dlite_agent.drafters.protocol import Drafter, DraftView, Proposal


class HybridDrafter:
    """Takes the first non-empty proposal; statistics carry the name of the drafter that made it."""

    name = "hybrid"

    def __init__(self, *drafters: Drafter) -> None:
        self.drafters = drafters

    def propose(self, view: DraftView) -> Proposal:
        """Return the first drafter's proposal that has a token."""
        for drafter in self.drafters:
            proposal = drafter.propose(view)
            if proposal.tokens:
                return proposal
        return Proposal((), self.name)

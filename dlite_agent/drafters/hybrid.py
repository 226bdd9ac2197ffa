"""Several drafters at once: each text gets the proposal that promises most."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from operator import mul

from dlite_agent.drafters.protocol import Drafter, DraftView, Proposal


class HybridDrafter:
    """Takes, for each text, the proposal of which most tokens are expected to be accepted.

    A proposal without confidence is taken at its length. Statistics carry the name of the drafter that made it.
    """

    name = "hybrid"

    def __init__(self, *drafters: Drafter) -> None:
        self.drafters = drafters

    def propose(self, views: Sequence[DraftView]) -> list[Proposal]:
        """Return the best proposal for each view; of equal ones the first drafter's."""
        proposals = zip(*(drafter.propose(views) for drafter in self.drafters), strict=True)
        return [max(candidates, key=expected_accepted) for candidates in proposals]


def expected_accepted(proposal: Proposal) -> float:
    """Return how many tokens of a proposal its own confidence expects to be accepted.

    Of sampled tokens only the first one's distribution counts: the choice must not depend on what was drawn.
    """
    if proposal.distributions:
        sure = float(proposal.distributions[0].max())
        return sum(sure ** (k + 1) for k in range(len(proposal.tokens)))
    if not proposal.confidence:
        return float(len(proposal.tokens))
    chances: Iterator[float] = accumulate(proposal.confidence, mul)
    return sum(chances)

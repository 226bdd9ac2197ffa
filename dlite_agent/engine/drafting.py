"""The first half of a step: what is proposed to the target, for several texts at once.

Forced tokens of a grammar come first (they are free), then one proposal of the drafter, then what the grammar forces
behind it. A drafter may ask what the grammar allows along its proposal (`Lookahead`). It is a guest here: it cannot
change the output, and whatever it does wrong (an exception, ids that do not exist, a proposal that is too long, broken
distributions) costs this step's draft and is counted.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from dlite_agent.bitmask import Bitmask, only_token
from dlite_agent.drafters.protocol import Drafter, DraftView, Draw, Proposal
from dlite_agent.engine.constraint import TokenConstraint
from dlite_agent.engine.sampling import SamplingParams, derived_seed, gumbel_noise
from dlite_agent.engine.verify import check_distributions

FORCED = "forced"
UNKNOWN_CONFIDENCE = 0.7
_DRAFT_TOP_K = 64


@dataclass(slots=True)
class Draft:
    """Tokens proposed behind one text; `bitmasks[k]` holds after k of them.

    Attributes:
        tokens: The draft.
        sources: What drafted each token.
        confidence: How likely each is to be accepted if those before it are, by its drafter's own account.
        distributions: What each was sampled from, or None.
        num_faults: Proposals dropped because the drafter broke its contract.
    """

    constraint: TokenConstraint | None
    end_ids: frozenset[int]
    room: int
    tokens: list[int] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)
    distributions: list[torch.Tensor | None] = field(default_factory=list)
    bitmasks: list[Bitmask | None] = field(default_factory=list)
    num_faults: int = 0
    _num_advanced: int = 0
    _is_closed: bool = False
    _lookahead: Lookahead | None = None

    @property
    def room_left(self) -> int:
        """How many more tokens fit; none behind an end token or a forbidden one."""
        return 0 if self._is_closed else self.room - len(self.tokens)

    def begin(self) -> None:
        """Take the first mask and what the grammar forces."""
        self.bitmasks.append(None if self.constraint is None else self.constraint.bitmask())
        self.force()

    def force(self) -> None:
        """Add the tokens that the grammar leaves no choice about."""
        while self.constraint is not None and self.room_left > 0:
            forced = self.constraint.forced(self.room_left)
            if not forced:
                return
            self.extend(Proposal(forced, FORCED, [1.0] * len(forced)))

    def look_ahead(self) -> Lookahead | None:
        """Return what tells a drafter of the grammar until its proposal is taken; None where there is no grammar."""
        if self.constraint is not None:
            self._lookahead = Lookahead(self.constraint, self.end_ids, self.room_left)
        return self._lookahead

    def extend(self, proposal: Proposal) -> None:
        """Add a proposal's tokens as far as the grammar allows them.

        Where a draft ends must not depend on the value of a token that was sampled (`verify` says why). So a sampled
        token that is forbidden stays, as the last one: it cannot be accepted. And the confidence in sampled tokens is
        that in their distribution.
        """
        self._end_lookahead()
        confidence = proposal.confidence or [UNKNOWN_CONFIDENCE] * len(proposal.tokens)
        distributions: Sequence[torch.Tensor | None] = proposal.distributions or [None] * len(proposal.tokens)
        sources = proposal.sources or [proposal.source] * len(proposal.tokens)
        for token, sure, distribution, source in zip(proposal.tokens, confidence, distributions, sources, strict=True):
            is_allowed = self.constraint is None or self.constraint.allows(token)
            if self._forces(token) and distribution is None:
                sure, source = 1.0, FORCED
            if self.room_left < 1 or (not is_allowed and distribution is None):
                return
            self.tokens.append(token)
            self.sources.append(source)
            self.confidence.append(sure if distribution is None else float(distribution.max()))
            self.distributions.append(distribution)
            self._is_closed = not is_allowed or token in self.end_ids
            self.bitmasks.append(None if self._is_closed else self._advance(token))

    def _forces(self, token: int) -> bool:
        mask = self.bitmasks[-1] if self.bitmasks else None
        return mask is not None and only_token(mask) == token

    def _advance(self, token: int) -> Bitmask | None:
        if self.constraint is None:
            return None
        self.constraint.advance(token)
        self._num_advanced += 1
        return self.constraint.bitmask()

    def _end_lookahead(self) -> None:
        if self._lookahead is not None:
            self._lookahead.end()

    def rewind_constraint(self) -> None:
        """Put the grammar back to where the text ends."""
        self._end_lookahead()
        if self.constraint is not None:
            self.constraint.rollback(self._num_advanced)
            self._num_advanced = 0

    def cut(self, length: int) -> None:
        """Keep the first `length` tokens; the grammar must have been put back."""
        for values in (self.tokens, self.sources, self.confidence, self.distributions):
            del values[length:]
        del self.bitmasks[length + 1 :]


class Lookahead:
    """Runs a grammar ahead of a draft while a drafter drafts (`protocol.Guide`), and puts it back afterwards.

    A grammar that fails here says nothing more: several texts are drafted together, and it is its own text's affair,
    which meets it again when the proposal is taken.
    """

    def __init__(self, constraint: TokenConstraint, end_ids: frozenset[int], room: int) -> None:
        self._constraint = constraint
        self._end_ids = end_ids
        self._room = room
        self._num_advanced = 0
        self._is_over = False

    def bitmask(self) -> Bitmask | None:
        """Return the tokens that may follow now; None if any may, or if the draft has come to its end."""
        if self._is_over:
            return None
        try:
            mask = self._constraint.bitmask()
        except Exception:
            self._is_over = True
            return None
        if mask is not None:
            mask = mask.view()  # verification uses the same one
            mask.flags.writeable = False
        return mask

    def advance(self, token: int) -> None:
        """Go on behind a token; a forbidden one and an end token are where the draft ends."""
        token = operator.index(token)
        self._room -= 1
        if self._is_over or self._room < 1 or token in self._end_ids:
            self._is_over = True
            return
        try:
            self._constraint.advance(token)
        except Exception:  # of a forbidden token too
            self._is_over = True
        else:
            self._num_advanced += 1

    def end(self) -> None:
        """Put the grammar back; whoever keeps this can do nothing more with it."""
        self._is_over = True
        count, self._num_advanced = self._num_advanced, 0
        self._constraint.rollback(count)


def propose(
    drafter: Drafter, views: Sequence[DraftView], *, vocab_size: int
) -> tuple[list[Proposal], list[str | None]]:
    """Ask a drafter, and believe nothing: returns sound proposals, and for each view what was wrong with its own."""
    nothing = Proposal((), "nothing")
    try:
        proposals = list(drafter.propose(views))
        if len(proposals) != len(views):
            raise ValueError(f"{len(proposals)} proposals for {len(views)} texts")
    except Exception as error:  # a drafter is foreign code; the text does not depend on it
        return [nothing] * len(views), [repr(error)] * len(views)
    problems = [_problem(p, view, vocab_size) for p, view in zip(proposals, views, strict=True)]
    sound = [nothing if problem else proposal for proposal, problem in zip(proposals, problems, strict=True)]
    return sound, problems


def _problem(proposal: Proposal, view: DraftView, vocab_size: int) -> str | None:
    """Say what is wrong with a proposal, or None; it may be anything at all."""
    try:
        return _fault(proposal, view, vocab_size)
    except Exception as error:
        return f"no sound proposal ({error!r})"


def _fault(proposal: Proposal, view: DraftView, vocab_size: int) -> str | None:
    tokens = proposal.tokens
    if not isinstance(proposal.source, str):
        return f"source {proposal.source!r}; expected a name"
    if len(tokens) > view.max_tokens:
        return f"{len(tokens)} tokens; expected at most {view.max_tokens}"
    if bad := [token for token in tokens if type(token) is not int or not 0 <= token < vocab_size]:
        return f"token {bad[0]!r}; expected ids 0..{vocab_size - 1}"
    if proposal.sources and [type(source) for source in proposal.sources] != [str] * len(tokens):
        return f"sources {proposal.sources!r}; expected a name for each of {len(tokens)} tokens"
    if proposal.confidence:
        if len(proposal.confidence) != len(tokens):
            return f"{len(proposal.confidence)} confidences for {len(tokens)} tokens"
        if not all(math.isfinite(sure) and 0 <= sure <= 1 for sure in proposal.confidence):
            return "a confidence that is no probability"
    if proposal.distributions:
        try:
            check_distributions(tokens, proposal.distributions, vocab_size)
        except ValueError as error:
            return str(error)
    return None


def draft_draw(params: SamplingParams, *, position: int) -> Draw | None:
    """Return how a drafter that has logits should choose the tokens from `position` on; None for the likeliest.

    Under exact verification it draws with the target's own noise: the closer its distribution, the more often both draw
    the same token. Under rejection its noise must be independent, and what it drew from is kept.
    """
    if params.is_greedy:
        return None
    keeps = params.verification == "rejection"
    seed = derived_seed(params.seed, "draft") if keeps else params.seed

    def draw(logits: torch.Tensor, k: int) -> tuple[int, torch.Tensor | None]:
        best, ids = (values.cpu() for values in logits.topk(min(_DRAFT_TOP_K, logits.shape[-1])))
        log_q = torch.log_softmax(best.double() / params.temperature, dim=-1)  # not every device has float64
        choice = int(torch.argmax(log_q + gumbel_noise(ids, seed=seed, position=position + k)))
        if not keeps:
            return int(ids[choice]), None
        q = torch.zeros(logits.shape, dtype=torch.float32).scatter(0, ids, log_q.exp().float())
        return int(ids[choice]), q

    return draw

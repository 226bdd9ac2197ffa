"""DLite that may copy: each drafted token is DLite's own, or the one that followed the same words before.

Both are mixed as a language model is with a cache (Grave et al., arXiv 1612.04426): with p DLite's distribution and w
the chance that the copy is right,

    p'(t) = (1 - w) p(t) + w [t is the copy]

and the draft goes on behind whichever token was chosen, DLite's head as well as the search for the next copy. So the
words of a tool call may come from the session and the glue between them from DLite, within one draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from dlite_agent.bitmask import Bitmask, has_token, only_token
from dlite_agent.drafters.dlite import DLiteDrafter
from dlite_agent.drafters.draws import Draws, draft_places
from dlite_agent.drafters.lookup import LookupDrafter, chance
from dlite_agent.drafters.protocol import DraftView, Proposal


class HybridDrafter:
    """Mixes DLite with prompt lookup, token by token; where DLite ends, or cannot draft, lookup goes on alone."""

    name = "hybrid"

    def __init__(self, lookup: LookupDrafter, dlite: DLiteDrafter) -> None:
        self.lookup = lookup
        self.dlite = dlite

    def propose(self, views: Sequence[DraftView]) -> list[Proposal]:
        """Return one proposal for each view; each token carries the name of the drafter that promised more."""
        proposals = [Proposal((), self.name) for _ in views]
        if able := [i for i, view in enumerate(views) if self.dlite.is_able(view)]:
            mixing = [views[i] for i in able]
            draws = _MixedDraws(mixing, self.dlite, self.lookup)
            for i, proposal, choices in zip(able, self.dlite.draft(mixing, draws), draws.choices, strict=True):
                chosen = choices[: len(proposal.tokens)]
                proposals[i] = replace(
                    proposal, confidence=[sure for sure, _ in chosen], sources=[source for _, source in chosen]
                )
        return [self._continued(view, proposal) for view, proposal in zip(views, proposals, strict=True)]

    def _continued(self, view: DraftView, proposal: Proposal) -> Proposal:
        """Let lookup go on behind a proposal; not behind sampled tokens whose distributions count (rejection).

        What was drawn must not decide how long such a draft is, and lookup ends where it finds no match.
        """
        room = view.max_tokens - len(proposal.tokens)
        if room <= 0 or proposal.distributions:
            return proposal
        behind = replace(view, drafted=[*view.drafted, *proposal.tokens], max_tokens=room)
        (copied,) = self.lookup.propose([behind])
        return Proposal(
            [*proposal.tokens, *copied.tokens],
            self.name,
            [*proposal.confidence, *copied.confidence],
            sources=[*proposal.sources, *[copied.source] * len(copied.tokens)],
        )


class _MixedDraws(Draws):
    """Chooses from the mixture.

    Attributes:
        choices: For each view, of each token not forced: its probability in the mixture, and who promised more.
    """

    def __init__(self, views: Sequence[DraftView], dlite: DLiteDrafter, lookup: LookupDrafter) -> None:
        super().__init__(views, dlite.model.written_ids, vocab_size=dlite.embedding.shape[0])
        self._dlite, self._lookup = dlite, lookup
        room = dlite.model.config.num_drafts
        self._texts = [np.concatenate([view.ids, np.zeros(room, dtype=np.int32)]) for view in views]
        self.choices: list[list[tuple[float, str]]] = [[] for _ in views]

    def choose(self, k: int, logits: torch.Tensor) -> torch.Tensor:
        """Return tokens `[B]` for the k-th position of the block from DLite's `logits [B, V_d]`."""
        p = torch.softmax(logits.float(), dim=-1)
        tokens = [self._choose(i, k, p[i]) for i in range(len(self._views))]
        return torch.tensor(tokens, device=logits.device)

    def _choose(self, i: int, k: int, p: torch.Tensor) -> int:
        view, text, length = self._views[i], self._texts[i], len(self._views[i].ids) + k
        if k < len(view.drafted):
            text[length] = view.drafted[k]
            return view.drafted[k]
        mask = self._mask(view, k)
        only = None if mask is None else only_token(mask)
        if only is None:
            token, choice = self._mix(i, k, p, mask, text[:length])
        else:
            token, choice = only, (1.0, self._dlite.name)
        self.choices[i].append(choice)
        text[length] = token
        if view.guide is not None:
            view.guide.advance(token)
        return token

    def _mix(
        self, i: int, k: int, p: torch.Tensor, mask: Bitmask | None, text: npt.NDArray[np.int32]
    ) -> tuple[int, tuple[float, str]]:
        """Return a token of the mixture behind a text, how likely it was, and who promised more."""
        copied, num_agreeing = self._lookup.copy_behind(text)
        w = chance(num_agreeing)
        if mask is not None:
            p, w = self._held(mask, p, copied, w)
        rest = p * (1 - w)
        is_drawn = self._views[i].draw is not None
        token, sure = self._draw_mixed(i, k, rest, copied, w) if is_drawn else self._likeliest(rest, copied, w)
        is_copied = token == copied and w > sure / 2
        return token, (sure, self._lookup.name if is_copied else self._dlite.name)

    def _held(self, mask: Bitmask, p: torch.Tensor, copied: int, w: float) -> tuple[torch.Tensor, float]:
        """Return DLite's distribution `p [V_d]` and the chance of the copy among the tokens of a mask."""
        w = w if has_token(mask, copied) else 0.0
        held = p * self._writable(mask, p)
        total = float(held.sum())
        if total == 0:
            return (held, 1.0) if w else (p, w)  # neither can write what is allowed: the draft ends here
        return held / total, w / ((1 - w) * total + w)

    def _likeliest(self, rest: torch.Tensor, copied: int, w: float) -> tuple[int, float]:
        """Return the mixture's likeliest token, and how likely it is; `rest [V_d]` is what DLite adds to the copy."""
        ids = self._draft_to_target
        place, is_written = (copied, True) if ids is None else draft_places(torch.tensor(copied).to(ids), ids)
        if is_written:
            rest[place] += w
        best = int(rest.argmax())
        sure = float(rest[best])
        if w > sure:  # then DLite cannot write the copy
            return copied, w
        return best if ids is None else int(ids[best]), min(sure, 1.0)

    def _draw_mixed(self, i: int, k: int, rest: torch.Tensor, copied: int, w: float) -> tuple[int, float]:
        """Draw from the mixture in the view's way; returns the token, and how likely it was."""
        mixed = self._over_all_tokens(rest, missing=0.0)
        mixed[copied] += w
        token = self._draw(i, k, mixed.log())
        return token, min(float(mixed[token]), 1.0)

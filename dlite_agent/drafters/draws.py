"""How drafters with logits choose their tokens: forced ones, the likeliest ones, or drawn ones, as a grammar allows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from dlite_agent.bitmask import Bitmask, only_token
from dlite_agent.drafters.protocol import DraftView


class Draws:
    """Chooses the tokens of several drafts, each in its view's way, and keeps what they were drawn from.

    Attributes:
        distributions: For each view what its tokens were sampled from; empty where they were not sampled.
    """

    def __init__(self, views: Sequence[DraftView], draft_to_target: torch.Tensor | None, *, vocab_size: int) -> None:
        """Prepare for views.

        Args:
            views: The texts.
            draft_to_target: `[V_d]`, the ids that the drafter can write; None for all.
            vocab_size: The target's.
        """
        self._views = views
        self._draft_to_target = draft_to_target
        self._vocab_size = vocab_size
        self.distributions: list[list[torch.Tensor]] = [[] for _ in views]

    def choose(self, k: int, logits: torch.Tensor) -> torch.Tensor:
        """Return tokens `[B]` for the k-th position of the block from `logits [B, V_d]`."""
        masks = [self._mask(view, k) for view in self._views]
        logits = self._allowed(logits, masks)
        tokens = likeliest(logits, self._draft_to_target)
        for i, (view, mask) in enumerate(zip(self._views, masks, strict=True)):
            if k < len(view.drafted):
                tokens[i] = view.drafted[k]
                continue
            only = None if mask is None else only_token(mask)
            if only is not None:
                tokens[i] = only
            elif view.draw is not None:
                tokens[i] = self._draw(i, k, self._over_all_tokens(logits[i]))
            if view.guide is not None:
                view.guide.advance(int(tokens[i]))
        return tokens

    @staticmethod
    def _mask(view: DraftView, k: int) -> Bitmask | None:
        """Return what may stand at the k-th position of the block, or None for anything."""
        return None if view.guide is None or k < len(view.drafted) else view.guide.bitmask()

    def _allowed(self, logits: torch.Tensor, masks: Sequence[Bitmask | None]) -> torch.Tensor:
        """Return `logits [B, V_d]` without what the masks forbid; a row of which nothing would be left stays whole."""
        held = logits
        for i, mask in enumerate(masks):
            if mask is None:
                continue
            allowed = self._writable(mask, logits)
            if allowed.any():
                held = logits.clone() if held is logits else held
                held[i].masked_fill_(~allowed, -torch.inf)
        return held

    def _writable(self, mask: Bitmask, like: torch.Tensor) -> torch.Tensor:
        """Return which of the ids that the drafter can write are in a mask, `[V_d]`, where `like` is."""
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little", count=self._vocab_size)
        allowed = torch.from_numpy(bits).bool().to(like.device)
        return allowed if self._draft_to_target is None else allowed[self._draft_to_target.long()]

    def _draw(self, i: int, k: int, logits: torch.Tensor) -> int:
        """Draw the i-th view's token from `logits [vocab]` in its way; keep what it was drawn from if it says so."""
        view = self._views[i]
        assert view.draw is not None
        token, distribution = view.draw(logits, k - len(view.drafted))
        if distribution is not None:
            self.distributions[i].append(distribution)
        return token

    def _over_all_tokens(self, values: torch.Tensor, *, missing: float = -torch.inf) -> torch.Tensor:
        """Return `[vocab]` of `values [V_d]`, and `missing` where the drafter cannot write."""
        if self._draft_to_target is None:
            return values
        every = values.new_full((self._vocab_size,), missing)
        return every.index_copy_(0, self._draft_to_target.long(), values)


def likeliest(logits: torch.Tensor, draft_to_target: torch.Tensor | None) -> torch.Tensor:
    """Return the likeliest tokens `[...]` of `logits [..., V_d]`, ids of the target's vocabulary."""
    places = logits.argmax(dim=-1)
    return places if draft_to_target is None else draft_to_target[places].long()


def draft_places(tokens: torch.Tensor, draft_to_target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the places of tokens among the ids that a drafter can write, and whether they are there at all."""
    places = torch.searchsorted(draft_to_target, tokens.int()).clamp(max=len(draft_to_target) - 1)
    return places, draft_to_target[places] == tokens

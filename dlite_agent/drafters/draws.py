"""How drafters with logits choose their tokens: forced ones, the likeliest ones, or drawn ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch

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
        tokens = likeliest(logits, self._draft_to_target)
        for i, view in enumerate(self._views):
            if k < len(view.drafted):
                tokens[i] = view.drafted[k]
            elif view.draw is not None:
                tokens[i] = self._draw(i, k, self._over_all_tokens(logits[i]))
        return tokens

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

"""Verification: which of the drafted tokens are the target's own, and which token follows them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from dlite_agent.engine.constraint import Bitmask
from dlite_agent.engine.sampling import SamplingParams, draw


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the target made of a draft.

    Attributes:
        tokens: The accepted draft tokens and, unless an end token was accepted, one bonus token.
        num_accepted: How many of `tokens` were drafted.
    """

    tokens: tuple[int, ...]
    num_accepted: int

    @property
    def has_bonus(self) -> bool:
        """True if the last token was not drafted."""
        return len(self.tokens) > self.num_accepted


def verify(
    logits: torch.Tensor,  # [len(draft) + 1, vocab]: row k follows k drafted tokens
    draft: Sequence[int],
    params: SamplingParams,
    *,
    position: int,
    end_ids: frozenset[int] = frozenset(),
    bitmask_at: Callable[[int], Bitmask | None] = lambda _: None,
) -> Verdict:
    """Accept drafted tokens while each equals the target's own draw at its position.

    Args:
        logits: Target logits of the anchor's row and of each drafted token's row.
        draft: Proposed tokens.
        params: How the target draws.
        position: Position of the first drafted token in the text.
        end_ids: Tokens that end the text.
        bitmask_at: Grammar mask after k drafted tokens, or None where all tokens are allowed.
    """
    tokens: list[int] = []
    for k in range(len(draft) + 1):
        token = draw(logits[k], params, position=position + k, bitmask=bitmask_at(k))
        tokens.append(token)
        if k == len(draft) or token != draft[k]:
            return Verdict(tuple(tokens), k)
        if token in end_ids:
            break
    return Verdict(tuple(tokens), len(tokens))

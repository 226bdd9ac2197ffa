"""What the decode loop asks of a drafter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from dlite_agent.bitmask import Bitmask

Draw = Callable[[torch.Tensor, int], tuple[int, torch.Tensor | None]]
"""Draws the k-th token behind a view from draft logits `[vocab]`, and gives the `q [vocab]` it is of where wanted."""


class TextKey:
    """Names one text, for drafters that keep something about it; it goes when the text's state goes."""

    __slots__ = ("__weakref__",)


class Guide(Protocol):
    """What a grammar lets follow, for a drafter that would rather not draft what is forbidden.

    It begins behind the tokens drafted already and is told of each further one; it is of no use once the proposal is
    made.
    """

    def bitmask(self) -> Bitmask | None:
        """Return the tokens that may follow now; None if any may, or if the draft has come to its end."""
        ...

    def advance(self, token: int) -> None:
        """Go on behind a token; a forbidden one and an end token are where the draft ends."""
        ...


@dataclass(frozen=True, slots=True)
class DraftView:
    """What a drafter may look at of one text; all of it is the target's state and stays so.

    Attributes:
        ids: All tokens so far, the anchor last.
        drafted: Tokens already in this draft (forced by a grammar); a proposal continues behind them.
        pivot: Hidden states `[layers, hidden]` of the row before the anchor.
        max_tokens: Longest useful proposal.
        draw: How to choose tokens from logits, or None for the most likely ones.
        text: Names the text.
        guide: What may follow by the text's grammar; None where nothing is held.
    """

    ids: npt.NDArray[np.int32]
    drafted: Sequence[int]
    pivot: torch.Tensor | None
    max_tokens: int
    draw: Draw | None = None
    text: TextKey = field(default_factory=TextKey)
    guide: Guide | None = None


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafted tokens and the name of what drafted them.

    Attributes:
        tokens: The draft.
        source: The drafter's name.
        confidence: For each token, how likely it is to be accepted if those before it are; empty if unknown.
        distributions: For each token, the `q [vocab]` it was sampled from; empty if the tokens were not sampled. Never
            the softmax behind an argmax.
        sources: For each token, the name of what drafted it; empty if that is `source`.
    """

    tokens: Sequence[int]
    source: str
    confidence: Sequence[float] = ()
    distributions: Sequence[torch.Tensor] = ()
    sources: Sequence[str] = ()


class Drafter(Protocol):
    """Proposes tokens from views. DLite keeps nothing between two proposals; the baselines do."""

    @property
    def name(self) -> str:
        """The name that statistics carry."""
        ...

    def propose(self, views: Sequence[DraftView]) -> Sequence[Proposal]:
        """Return one proposal for each view, at most `view.max_tokens` tokens that may follow; empty ones are fine."""
        ...


@runtime_checkable
class RowReader(Protocol):
    """A drafter that must read the hidden states of every row: the engine shows it each row that the target computes.

    It pays for that after a resume: what it has not read, the target computes again.
    """

    def num_read(self, text: TextKey) -> int:
        """Return how many of a text's first rows were read, whatever stood there."""
        ...

    def read(self, text: TextKey, start: int, features: torch.Tensor) -> None:
        """Take `features [rows, layers, hidden]` of the rows from `start` on; what was there and behind is outdated."""
        ...

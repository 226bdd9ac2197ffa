"""What the decode loop asks of a drafter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True, slots=True)
class DraftView:
    """What a drafter may look at; all of it is the target's state and stays so.

    Attributes:
        ids: All tokens so far, the anchor last.
        drafted: Tokens already in this draft (forced by a grammar); a proposal continues behind them.
        pivot: Hidden states `[layers, hidden]` of the row before the anchor.
        max_tokens: Longest useful proposal.
    """

    ids: npt.NDArray[np.int32]
    drafted: Sequence[int]
    pivot: torch.Tensor | None
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafted tokens and the name of what drafted them."""

    tokens: Sequence[int]
    source: str


class Drafter(Protocol):
    """Proposes tokens from a view. It keeps nothing between two proposals."""

    @property
    def name(self) -> str:
        """The name that statistics carry."""
        ...

    def propose(self, view: DraftView) -> Proposal:
        """Return at most `view.max_tokens` tokens that may follow; an empty proposal is fine."""
        ...

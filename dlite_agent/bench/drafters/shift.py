"""Does a DLite drafter see how long a text is? The same pivots and newest tokens, behind 100,000 tokens more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch

from dlite_agent.bench.contest import OurSide
from dlite_agent.drafters.dlite import DLiteDrafter
from dlite_agent.drafters.hybrid import HybridDrafter
from dlite_agent.drafters.protocol import Drafter, DraftView, Proposal

SHIFT = 100_000


def dlite_of(drafter: Drafter) -> DLiteDrafter | None:
    """Return the DLite drafter that a drafter is or holds, if any."""
    if isinstance(drafter, HybridDrafter):
        return drafter.dlite
    return drafter if isinstance(drafter, DLiteDrafter) else None


def largest_change(drafter: DLiteDrafter, side: OurSide, ids: Sequence[int], *, max_tokens: int) -> float:
    """Return the largest absolute change of draft logits and confidence when every position is shifted by `SHIFT`.

    Args:
        drafter: The drafter; the target must take the features that it reads.
        side: A session of the target.
        ids: A prompt; the drafts behind it and behind what follows are compared.
        max_tokens: Upper bound of tokens that follow.

    Returns:
        The change, exactly 0 where nothing depends on the position; at least 1 where a drafted token changed.
    """
    watched = _Watched(drafter)
    list(side.steps(ids, watched, max_tokens=max_tokens))
    return max((_change(drafter, view) for view in watched.views), default=0.0)


class _Watched:
    """The drafter, and copies of the views it was given."""

    name = "dlite"

    def __init__(self, drafter: DLiteDrafter) -> None:
        self._drafter = drafter
        self.views: list[DraftView] = []

    def propose(self, views: Sequence[DraftView]) -> list[Proposal]:
        self.views += [replace(view, ids=view.ids.copy()) for view in views]
        return self._drafter.propose(views)


def _change(drafter: DLiteDrafter, view: DraftView) -> float:
    before = np.resize(view.ids, SHIFT).astype(view.ids.dtype)
    shifted = replace(view, ids=np.concatenate([before, view.ids]))
    (here, logits_here), (there, logits_there) = (_draft(drafter, each) for each in (view, shifted))
    largest = 0.0 if list(here.tokens) == list(there.tokens) else 1.0
    pairs = zip(here.confidence, there.confidence, strict=True)
    largest = max([largest, *(abs(a - b) for a, b in pairs)])
    for a, b in zip(logits_here, logits_there, strict=True):
        largest = max(largest, float((a - b).abs().max()))
    return largest


def _draft(drafter: DLiteDrafter, view: DraftView) -> tuple[Proposal, list[torch.Tensor]]:
    with _recorded_logits(drafter) as logits:
        (proposal,) = drafter.propose([view])
    return proposal, logits


@contextmanager
def _recorded_logits(drafter: DLiteDrafter) -> Iterator[list[torch.Tensor]]:
    """Yield a list that collects the head's logits of every drafted token."""
    logits: list[torch.Tensor] = []

    def keep(module: torch.nn.Module, inputs: object, output: torch.Tensor) -> None:
        logits.append(output.detach().float().clone())

    handle = drafter.model.sequential_head.output_proj.register_forward_hook(keep)
    try:
        yield logits
    finally:
        handle.remove()

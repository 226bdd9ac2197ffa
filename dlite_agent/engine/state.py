"""The live state of one session, all of it on the target's side: token ids, KV rows, one pivot row.

Between calls `num_rows == len(ids) - 1` (or fewer): the newest token, the anchor, has not been run through the target.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from dlite_agent.drafters.protocol import TextKey
from dlite_agent.engine.cache import SlabCache

Ids = npt.NDArray[np.int32]


def common_prefix(left: Ids, right: Ids) -> int:
    """Return how many leading ids are equal."""
    length = min(len(left), len(right))
    different = np.flatnonzero(left[:length] != right[:length])
    return int(different[0]) if len(different) else length


class TargetState:
    """Tokens, KV rows and pivot of one session.

    Attributes:
        cache: KV rows of the first `cache.num_rows` tokens.
        pivot: Features `[layers, hidden]` of the last row, or None if that row must be recomputed first.
        key: Names the text to drafters.
    """

    def __init__(self, cache: SlabCache) -> None:
        self.cache = cache
        self.pivot: torch.Tensor | None = None
        self.key = TextKey()
        self._ids: Ids = np.empty(256, dtype=np.int32)
        self._num_ids = 0

    @property
    def ids(self) -> Ids:
        """All token ids, the anchor last; a view, valid until the next change."""
        return self._ids[: self._num_ids]

    @property
    def num_rows(self) -> int:
        """KV rows held, in tokens."""
        return self.cache.num_rows

    def append(self, ids: Sequence[int] | Ids) -> None:
        """Add tokens behind the last one."""
        stop = self._num_ids + len(ids)
        if stop > len(self._ids):
            grown = np.empty(max(stop, 2 * len(self._ids)), dtype=np.int32)
            grown[: self._num_ids] = self.ids
            self._ids = grown
        self._ids[self._num_ids : stop] = ids
        self._num_ids = stop

    def begin(self, prompt: Ids) -> int:
        """Make the text a prompt, of at least one token; returns how many of its rows are there already.

        At least the last row is left to be computed, since its logits and its features are needed.
        """
        self.rewind(min(common_prefix(self.ids[: self.num_rows], prompt), len(prompt) - 1))
        num_rows = self.num_rows
        self._num_ids = num_rows
        self.append(prompt[num_rows:])
        self.pivot = None
        return num_rows

    def forget_rows(self, num_kept: int) -> None:
        """Keep no KV row beyond the first `num_kept`; the tokens stay, so those rows are computed again."""
        if self.num_rows > num_kept:
            self.cache.crop_to(num_kept)
            self.pivot = None

    def rewind(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens and no KV row beyond them."""
        self._num_ids = min(self._num_ids, num_tokens)
        self.forget_rows(num_tokens)

    def truncate(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens, at least one; the last of them is the anchor."""
        if num_tokens < len(self.ids):
            self.rewind(num_tokens)
            self.forget_rows(num_tokens - 1)
            self.pivot = None

    def copy(self, cache: SlabCache) -> TargetState:
        """Return a state of its own with the same text, in an empty cache of the same target.

        Raises:
            UnsupportedModelError: If the target has state besides KV rows; give its prompt to a new state instead.
        """
        other = TargetState(cache)
        if self.num_rows:
            cache.append(self.cache.rows(0, self.num_rows))
        other.append(self.ids)
        other.pivot = self.pivot
        return other

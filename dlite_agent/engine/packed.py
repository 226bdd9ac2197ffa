"""One pass over several sessions: new rows stand side by side, each session's keys and values stay in its own cache.

The products, where the bytes of the weights are moved, see one tensor of rows; only the attention looks at each session
alone (`attention`). Nothing is padded, so positions and cache lengths may be as ragged as they like.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from dlite_agent.engine.cache import SlabCache


@dataclass(frozen=True, slots=True)
class Segment:
    """One session's share of a pass: new tokens behind the rows of its cache.

    Attributes:
        ids: New tokens, at least one.
        cache: The session's cache; written in place.
        num_logits: Logits wanted, of the last rows.
        num_features: Features wanted, of the last rows.
    """

    ids: Sequence[int]
    cache: SlabCache
    num_logits: int = 1
    num_features: int = 1

    @property
    def num_rows(self) -> int:
        """New rows."""
        return len(self.ids)


class _PackedLayer(CacheLayerMixin):
    """Deals the new rows of one layer out to the sessions' caches."""

    is_sliding = False
    is_croppable = False

    def __init__(self, segments: Sequence[Segment], layer: int) -> None:
        super().__init__()
        self._sizes = [segment.num_rows for segment in segments]
        self._slabs: list[Any] = [segment.cache.layers[layer] for segment in segments]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write `[1, heads, rows, head_dim]` where they belong and return them: the attention reads the caches."""
        keys, values = torch.split(key_states, self._sizes, dim=2), torch.split(value_states, self._sizes, dim=2)
        for slab, slab_keys, slab_values in zip(self._slabs, keys, values, strict=True):
            slab.update(slab_keys, slab_values)
        return key_states, value_states

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the sessions' caches have been there before."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return sizes that transformers' mask code accepts; our attention ignores the mask."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """Return 0: positions are given explicitly."""
        return 0

    def get_max_length(self) -> int:
        """Return -1: there is no maximum."""
        return -1


class PackedCache(Cache):
    """What transformers takes for the cache of a packed pass."""

    def __init__(self, segments: Sequence[Segment], num_layers: int) -> None:
        super().__init__(layers=[_PackedLayer(segments, layer) for layer in range(num_layers)])

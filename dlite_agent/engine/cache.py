"""The target's KV cache: one slab per layer, written in place, cropped by moving a number.

`transformers` concatenates the whole cache on every step; here a step writes only its own rows. A slab grows
geometrically, so appending n tokens one by one moves O(n) bytes in all.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

_MIN_CAPACITY = 256


class SlabLayer(CacheLayerMixin):
    """Keys and values of one layer in two preallocated slabs `[batch, heads, capacity, head_dim]`.

    Sliding-window layers keep every row too: the window is applied by the attention, so a crop past the window
    is as exact as any other.
    """

    is_sliding = False
    is_croppable = True
    is_initialized: bool
    keys: torch.Tensor | None
    values: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.num_rows = 0
        self._reserved = _MIN_CAPACITY

    def reserve(self, num_rows: int) -> None:
        """Make room for `num_rows` rows in all, moving what is there at most once."""
        if not self.is_initialized:
            self._reserved = max(self._reserved, num_rows)
            return
        assert self.keys is not None and self.values is not None
        if num_rows <= self.keys.shape[2]:
            return
        self.keys = self._moved(self.keys, num_rows)
        self.values = self._moved(self.values, num_rows)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate the slabs like the first rows that arrive."""
        self.keys = self._slab(key_states, self._reserved)
        self.values = self._slab(value_states, self._reserved)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write `[batch, heads, n, head_dim]` rows behind the last one; return views of all rows."""
        stop = self.num_rows + key_states.shape[2]
        if not self.is_initialized:
            self._reserved = max(self._reserved, stop)
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        if stop > self.keys.shape[2]:
            self.reserve(max(stop, 2 * self.keys.shape[2]))
        self.keys[:, :, self.num_rows : stop] = key_states
        self.values[:, :, self.num_rows : stop] = value_states
        self.num_rows = stop
        return self.keys[:, :, :stop], self.values[:, :, :stop]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return `(kv_length, kv_offset)` as transformers' mask code asks for them."""
        return self.num_rows + query_length, 0

    def get_seq_length(self) -> int:
        """Return the number of rows held."""
        return self.num_rows

    def get_max_length(self) -> int:
        """Return -1: the slab has no maximum."""
        return -1

    def crop_to(self, num_rows: int) -> None:
        """Forget every row from `num_rows` on; O(1)."""
        self.num_rows = min(self.num_rows, num_rows)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` rows (transformers' relative, negative convention)."""
        self.crop_to(self.num_rows - abs(tokens_to_remove))

    def reset(self) -> None:
        """Forget every row, keep the slabs."""
        self.num_rows = 0

    @staticmethod
    def _slab(like: torch.Tensor, capacity: int) -> torch.Tensor:
        batch, heads, _, head_dim = like.shape
        return like.new_empty(batch, heads, capacity, head_dim)

    def _moved(self, slab: torch.Tensor, capacity: int) -> torch.Tensor:
        bigger = self._slab(slab, capacity)
        bigger[:, :, : self.num_rows] = slab[:, :, : self.num_rows]
        return bigger


class SlabCache(Cache):
    """The cache of one session: `num_layers` slabs that always hold the same number of rows."""

    def __init__(self, num_layers: int, *, device: torch.device | None = None) -> None:
        """Start empty; `device` is where appended rows go, by default where they come from."""
        self._device = device
        self._slabs = [SlabLayer() for _ in range(num_layers)]
        super().__init__(layers=list(self._slabs))

    @property
    def num_rows(self) -> int:
        """Rows held, in tokens."""
        return self._slabs[0].num_rows

    @property
    def nbytes(self) -> int:
        """Bytes allocated, rows not yet written included."""
        tensors = [t for slab in self._slabs for t in (slab.keys, slab.values) if t is not None]
        return sum(t.nbytes for t in tensors)

    def reserve(self, num_rows: int) -> None:
        """Make room for `num_rows` rows in all."""
        for slab in self._slabs:
            slab.reserve(num_rows)

    def crop_to(self, num_rows: int) -> None:
        """Keep at most the first `num_rows` rows; exactly those held below, unless a subclass says otherwise."""
        for slab in self._slabs:
            slab.crop_to(num_rows)

    def checkpoint(self, *, keep: bool = False) -> None:
        """Remember the present row, to come back to; nothing to do here: a slab goes back to any row."""

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Copy rows `[start, stop)` of all layers into one tensor `[layers, 2, heads, stop - start, head_dim]`."""
        if not 0 <= start < stop <= self.num_rows:
            raise IndexError(f"rows [{start}, {stop}) of a cache that holds {self.num_rows}")
        halves = [t[0, :, start:stop] for slab in self._slabs for t in (slab.keys, slab.values) if t is not None]
        stacked = torch.stack(halves)
        return stacked.view(len(self._slabs), 2, *stacked.shape[1:])

    def append(self, rows: torch.Tensor) -> None:
        """Append rows `[layers, 2, heads, n, head_dim]` that `rows` once returned.

        Raises:
            ValueError: If they do not have the shape or the dtype of the rows held; nothing has changed.
        """
        if rows.dim() != 5 or rows.shape[:2] != (len(self._slabs), 2):
            raise ValueError(f"rows of shape {tuple(rows.shape)}; expected [{len(self._slabs)}, 2, heads, n, head_dim]")
        held = self._slabs[0].keys
        if held is not None and (rows.shape[2], rows.shape[4], rows.dtype) != (*held.shape[1::2], held.dtype):
            raise ValueError(f"rows {rows.dtype} {list(rows.shape)} do not fit {held.dtype} {list(held.shape)}")
        rows = rows.to(self._device or rows.device)
        for slab, (keys, values) in zip(self._slabs, rows, strict=True):
            slab.update(keys.unsqueeze(0), values.unsqueeze(0))

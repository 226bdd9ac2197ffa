"""Causal attention of a few new rows over a long cache, registered with transformers under one name.

The last n of L cached rows are the queries, so causality follows from the shapes and no mask is passed around:
query i may see the keys up to L - n + i, and only the last `sliding_window` of those where the layer slides.

In a packed pass the rows of several sessions stand side by side (`segments`); each attends to its own cache alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import AttentionInterface

if TYPE_CHECKING:
    from dlite_agent.engine.packed import Segment

NAME = "dlite_causal_tail"
ROWWISE_NAME = "dlite_causal_tail_rowwise"
ROWWISE_MAX_ROWS = 32  # more rows than that are a prefill, which plain and speculative decoding share

_GROUPED_MAX_ROWS = 32  # up to here the queries of one KV head stand side by side, so that each key is read once
_MAX_MASKS = 64  # of one pass: each session may have several windows


@lru_cache(maxsize=_MAX_MASKS)
def _visible_keys(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Return a bool tensor `[num_queries, num_keys]`, True where a key may be seen."""
    last_visible = torch.arange(num_keys - num_queries, num_keys, device=device).unsqueeze(1)
    keys = torch.arange(num_keys, device=device)
    visible = keys <= last_visible
    if window is not None:
        visible &= keys > last_visible - window
    return visible


@lru_cache(maxsize=_MAX_MASKS)
def _grouped_mask(
    num_heads: int, num_queries: int, num_keys: int, window: int | None, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    """Return what is added to the scores of one KV head, `[num_heads * num_queries, num_keys]`."""
    visible = _visible_keys(num_queries, num_keys, window, device)
    mask = torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill_(~visible, -torch.inf)
    return mask.repeat(num_heads, 1)


def forget_masks() -> None:
    """Free the masks of a pass: no later one has the same."""
    _visible_keys.cache_clear()
    _grouped_mask.cache_clear()


def causal_tail_attention(
    module: nn.Module,
    query: torch.Tensor,  # [batch, heads, n, head_dim]
    key: torch.Tensor,  # [batch, kv_heads, L, head_dim]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    segments: Sequence[Segment] | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend from the last rows of the cache; returns `[batch, n, heads, head_dim]` and no weights.

    With `segments`, the rows are those of one session after the other, `key` and `value` are not read.
    """
    if segments is not None:
        options = {"scaling": scaling, "sliding_window": sliding_window}
        return _each_alone(causal_tail_attention, module, query, segments, **options), None
    num_queries = query.shape[2]
    if sliding_window is not None:
        start = max(0, key.shape[2] - num_queries - sliding_window + 1)
        key, value = key[:, :, start:], value[:, :, start:]
        if key.shape[2] <= sliding_window:
            sliding_window = None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if num_queries > _GROUPED_MAX_ROWS:
        visible = _visible_keys(num_queries, key.shape[2], sliding_window, query.device)
        out = nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=visible, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )
        return out.transpose(1, 2), None
    return _grouped(query, key, value, sliding_window, scale).transpose(1, 2), None


def _grouped(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sliding_window: int | None, scale: float
) -> torch.Tensor:
    """Attend with the queries of one KV head as rows of one head; shapes as above, returns the queries' shape."""
    batch, heads, num_queries, head_dim = query.shape
    kv_heads, num_keys = key.shape[1:3]
    group = heads // kv_heads
    mask = None
    if num_queries > 1:
        mask = _grouped_mask(group, num_queries, num_keys, sliding_window, query.device, query.dtype)
    rows = query.reshape(batch, kv_heads, group * num_queries, head_dim)
    out = nn.functional.scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=scale)
    return out.reshape(query.shape)


def rowwise_attention(
    module: nn.Module,
    query: torch.Tensor,  # [1, heads, n, head_dim]
    key: torch.Tensor,  # [1, kv_heads, L, head_dim]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    segments: Sequence[Segment] | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Do as `causal_tail_attention`, a few rows one by one: each gets the very bits that it would get alone.

    A model with int8 activations needs that: a difference in the last bit of a float can move a whole integer step.
    """
    options: dict[str, Any] = {"scaling": scaling, "sliding_window": sliding_window}
    if segments is not None:
        return _each_alone(rowwise_attention, module, query, segments, **options), None
    num_queries, num_keys = query.shape[2], key.shape[2]
    if num_queries > ROWWISE_MAX_ROWS:
        return causal_tail_attention(module, query, key, value, None, **options)
    rows = []
    for row in range(num_queries):
        stop = num_keys - num_queries + row + 1
        seen = key[:, :, :stop], value[:, :, :stop]
        rows.append(causal_tail_attention(module, query[:, :, row : row + 1], *seen, None, **options)[0])
    return torch.cat(rows, dim=1), None


def _each_alone(
    attend: Callable[..., tuple[torch.Tensor, None]],
    module: nn.Module,
    query: torch.Tensor,  # [1, heads, rows of all segments, head_dim]
    segments: Sequence[Segment],
    **kwargs: Any,
) -> torch.Tensor:
    """Attend with each session's rows to that session's cache; returns `[1, rows of all segments, heads, head_dim]`."""
    outs = []
    layer: Any = module.layer_idx  # set by transformers
    for queries, segment in zip(torch.split(query, [s.num_rows for s in segments], dim=2), segments, strict=True):
        slab: Any = segment.cache.layers[layer]
        keys, values = slab.keys[:, :, : slab.num_rows], slab.values[:, :, : slab.num_rows]
        outs.append(attend(module, queries, keys, values, None, **kwargs)[0])
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)


def register() -> None:
    """Make both attentions known to transformers; doing it twice is harmless."""
    AttentionInterface.register(NAME, causal_tail_attention)
    AttentionInterface.register(ROWWISE_NAME, rowwise_attention)

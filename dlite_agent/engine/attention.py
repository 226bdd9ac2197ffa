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

_GROUPED_MAX_ROWS = 32  # up to here one batched product per KV head beats a kernel that repeats the heads


@lru_cache(maxsize=4)
def _hidden_keys(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Return a bool tensor `[num_queries, num_keys]`, True where a key must not be seen."""
    last_visible = torch.arange(num_keys - num_queries, num_keys, device=device).unsqueeze(1)
    keys = torch.arange(num_keys, device=device)
    hidden = keys > last_visible
    if window is not None:
        hidden |= keys <= last_visible - window
    return hidden


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
        visible = ~_hidden_keys(num_queries, key.shape[2], sliding_window, query.device)
        out = nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=visible, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )
        return out.transpose(1, 2), None
    return _grouped(query, key, value, sliding_window, scale).transpose(1, 2), None


def _grouped(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sliding_window: int | None, scale: float
) -> torch.Tensor:
    """Attend with the queries of one KV head side by side, so that each key is read once."""
    batch, heads, num_queries, head_dim = query.shape
    kv_heads, num_keys = key.shape[1:3]
    queries = (query * scale).reshape(batch * kv_heads, heads // kv_heads * num_queries, head_dim)
    scores = torch.bmm(queries, key.flatten(0, 1).transpose(1, 2))
    if num_queries > 1 or sliding_window is not None:
        # Without a window only the new keys can lie ahead of a query.
        num_seen = num_keys if sliding_window is not None else num_queries
        hidden = _hidden_keys(num_queries, num_seen, sliding_window, query.device)
        by_query = scores.view(batch * heads, num_queries, num_keys)
        by_query[:, :, num_keys - num_seen :].masked_fill_(hidden, -torch.inf)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.bmm(weights, value.flatten(0, 1)).view(batch, heads, num_queries, head_dim)


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
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    queries = (query[0] * scale).transpose(0, 1).reshape(num_queries, key.shape[1], -1, query.shape[-1])
    keys, values = key[0].transpose(1, 2), value[0]
    mixed = torch.empty_like(queries)
    for row in range(num_queries):
        stop = num_keys - num_queries + row + 1
        start = 0 if sliding_window is None else max(0, stop - sliding_window)
        scores = torch.bmm(queries[row], keys[:, :, start:stop])
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
        torch.bmm(weights, values[:, start:stop], out=mixed[row])
    return mixed.view(1, num_queries, query.shape[1], query.shape[-1]), None


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

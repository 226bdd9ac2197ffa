"""Causal attention of a few new rows over a long cache, registered with transformers under one name.

The last n of L cached rows are the queries, so causality follows from the shapes and no mask is passed around:
query i may see the keys up to L - n + i, and only the last `sliding_window` of those where the layer slides.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

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
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend from the last rows of the cache; returns `[batch, n, heads, head_dim]` and no weights."""
    num_queries = query.shape[2]
    if sliding_window is not None:
        start = max(0, key.shape[2] - num_queries - sliding_window + 1)
        key, value = key[:, :, start:], value[:, :, start:]
        if key.shape[2] <= sliding_window:
            sliding_window = None
    hidden = None
    if num_queries > 1 or sliding_window is not None:
        hidden = _hidden_keys(num_queries, key.shape[2], sliding_window, query.device)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if num_queries > _GROUPED_MAX_ROWS:
        visible = None if hidden is None else ~hidden
        out = nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=visible, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )
        return out.transpose(1, 2), None
    return _grouped(query, key, value, hidden, scale).transpose(1, 2), None


def _grouped(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, hidden: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Attend with the queries of one KV head side by side, so that each key is read once."""
    batch, heads, num_queries, head_dim = query.shape
    kv_heads = key.shape[1]
    queries = (query * scale).reshape(batch, kv_heads, heads // kv_heads * num_queries, head_dim)
    scores = torch.matmul(queries, key.transpose(2, 3)).view(batch, heads, num_queries, key.shape[2])
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    mixed = torch.matmul(weights.view(batch, kv_heads, -1, key.shape[2]), value)
    return mixed.view(batch, heads, num_queries, head_dim)


def rowwise_attention(
    module: nn.Module,
    query: torch.Tensor,  # [batch, heads, n, head_dim]
    key: torch.Tensor,  # [batch, kv_heads, L, head_dim]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Do as `causal_tail_attention`, a few rows one by one: each gets the very bits that it would get alone.

    A model with int8 activations needs that: a difference in the last bit of a float can move a whole integer step.
    """
    num_queries = query.shape[2]
    if num_queries > ROWWISE_MAX_ROWS:
        return causal_tail_attention(module, query, key, value, None, **kwargs)
    rows = []
    for row in range(num_queries):
        stop = key.shape[2] - num_queries + row + 1
        alone = query[:, :, row : row + 1], key[:, :, :stop], value[:, :, :stop]
        rows.append(causal_tail_attention(module, *alone, None, **kwargs)[0])
    return torch.cat(rows, dim=1), None


def register() -> None:
    """Make both attentions known to transformers; doing it twice is harmless."""
    AttentionInterface.register(NAME, causal_tail_attention)
    AttentionInterface.register(ROWWISE_NAME, rowwise_attention)

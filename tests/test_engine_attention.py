"""Our attention is transformers' attention, told by shapes instead of masks."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from dlite_agent.engine.attention import ROWWISE_MAX_ROWS, causal_tail_attention, rowwise_attention
from dlite_agent.engine.cache import SlabCache
from dlite_agent.engine.packed import Segment

HEADS, KV_HEADS, HEAD_DIM = 6, 2, 16
Attention = Callable[..., tuple[torch.Tensor, None]]
WINDOWS = (None, 1, 8, 40, 500)


def inputs(num_queries: int, num_keys: int, *, kv_heads: int = KV_HEADS) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(num_queries * 1000 + num_keys)
    shapes = [(HEADS, num_queries), (kv_heads, num_keys), (kv_heads, num_keys)]
    return tuple(torch.randn(1, *shape, HEAD_DIM, generator=generator) for shape in shapes)


def visible_keys(num_queries: int, num_keys: int, window: int | None) -> torch.Tensor:
    """Whether query i, at position L - n + i, sees key j."""
    return torch.tensor(
        [
            [j <= p and (window is None or p - j < window) for j in range(num_keys)]
            for p in range(num_keys - num_queries, num_keys)
        ]
    )


def by_formula(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor, scale: float
) -> torch.Tensor:
    """softmax(q k' scale) v in float64, one head at a time."""
    group = query.shape[1] // key.shape[1]
    heads = []
    for head in range(query.shape[1]):
        scores = query[0, head].double() @ key[0, head // group].double().T * scale
        weights = scores.masked_fill(~visible, -math.inf).softmax(-1)
        heads.append(weights @ value[0, head // group].double())
    return torch.stack(heads, dim=1).unsqueeze(0)


@pytest.mark.parametrize("attention", [causal_tail_attention, rowwise_attention])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("num_queries", [1, 2, 5, 32, 33, 64])
@pytest.mark.parametrize("num_past", [0, 1, 7, 50])
def test_it_is_the_formula(attention: Attention, num_queries: int, num_past: int, window: int | None) -> None:
    query, key, value = inputs(num_queries, num_queries + num_past)
    got, weights = attention(nn.Module(), query, key, value, None, scaling=0.3, sliding_window=window)
    visible = visible_keys(num_queries, num_queries + num_past, window)
    assert weights is None
    assert (got - by_formula(query, key, value, visible, 0.3)).abs().max() < 1e-5


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize("num_queries", [1, 2, 5, 33, 64])
def test_it_is_transformers_own_with_an_explicit_mask(num_queries: int, kv_heads: int) -> None:
    query, key, value = inputs(num_queries, num_queries + 20, kv_heads=kv_heads)
    module = nn.Module()
    module.num_key_value_groups = HEADS // kv_heads  # type: ignore[assignment]
    mask = visible_keys(num_queries, num_queries + 20, 9)[None, None]
    expected, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=None)
    got, _ = causal_tail_attention(module, query, key, value, None, sliding_window=9)
    assert got.shape == (1, num_queries, HEADS, HEAD_DIM)
    assert (got - expected).abs().max() < 1e-5


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_rowwise_attention_gives_each_row_the_bits_it_gets_alone(window: int | None) -> None:
    num_keys = 90
    query, key, value = inputs(ROWWISE_MAX_ROWS, num_keys)
    together, _ = rowwise_attention(nn.Module(), query, key, value, None, sliding_window=window)
    for row in range(ROWWISE_MAX_ROWS):
        stop = num_keys - ROWWISE_MAX_ROWS + row + 1
        alone, _ = rowwise_attention(
            nn.Module(), query[:, :, [row]], key[:, :, :stop], value[:, :, :stop], None, sliding_window=window
        )
        assert torch.equal(together[:, [row]], alone)


@pytest.mark.parametrize("attention", [causal_tail_attention, rowwise_attention])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("sizes", [(1,), (1, 1, 1), (2, 40, 1, 7)], ids=str)
def test_packed_sessions_attend_to_their_own_caches_alone(
    attention: Attention, window: int | None, sizes: tuple[int, ...]
) -> None:
    num_layers, layer = 3, 1
    queries, segments, alone = [], [], []
    for session, num_rows in enumerate(sizes):
        query, key, value = inputs(num_rows, num_rows + 11 * session)
        cache = SlabCache(num_layers)
        for index in range(num_layers):
            cache.update(key + 100.0 * (index != layer), value, index)
        segments.append(Segment([0] * num_rows, cache))
        queries.append(query)
        alone.append(attention(nn.Module(), query, key, value, None, scaling=0.3, sliding_window=window)[0])
    module = nn.Module()
    module.layer_idx = layer  # type: ignore[assignment]
    unread = torch.full((1, KV_HEADS, sum(sizes), HEAD_DIM), math.nan)
    options = {"scaling": 0.3, "sliding_window": window, "segments": segments}
    got, weights = attention(module, torch.cat(queries, dim=2), unread, unread, None, **options)
    assert weights is None
    assert torch.equal(got, torch.cat(alone, dim=1))


def test_interleaved_shapes_do_not_get_each_others_masks() -> None:
    """The masks are kept between calls; shapes that differ in one number only must not share one."""
    cases = [(n, n + past, window) for n in (2, 3, 40) for past in (4, 5) for window in (None, 3, 4)] * 2
    for num_queries, num_keys, window in cases:
        query, key, value = inputs(num_queries, num_keys)
        got, _ = causal_tail_attention(nn.Module(), query, key, value, None, scaling=1.0, sliding_window=window)
        visible = visible_keys(num_queries, num_keys, window)
        assert (got - by_formula(query, key, value, visible, 1.0)).abs().max() < 1e-5

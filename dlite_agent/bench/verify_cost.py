"""What a verify pass costs, by rows: the number that decides whether speculation can pay at all."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from dlite_agent.engine.cache import SlabCache
from dlite_agent.engine.linear import SmallRowLinear
from dlite_agent.engine.target import Target

ROWS = (1, 2, 4, 6, 8, 16)


@dataclass(frozen=True, slots=True)
class PassCost:
    """Milliseconds of one pass over `num_rows` new rows: median, least and most."""

    num_rows: int
    median_ms: float
    min_ms: float
    max_ms: float


def measure(variants: Mapping[str, Target], *, context: int, repeats: int) -> dict[str, list[PassCost]]:
    """Time passes over `context` cached rows, the variants of a target interleaved.

    Args:
        variants: By name.
        context: Rows in the cache.
        repeats: Timings per figure.
    """
    caches = {name: _filled_cache(variant, context) for name, variant in variants.items()}
    times: dict[tuple[str, int], list[float]] = {}
    for repeat in range(repeats + 1):  # the first round warms up
        for name, variant in variants.items():
            for rows in ROWS:
                elapsed = pass_ms(variant, caches[name], rows)
                if repeat:
                    times.setdefault((name, rows), []).append(elapsed)
    return {name: [_cost(rows, times[name, rows]) for rows in ROWS] for name in variants}


def with_stock_products(target: Target) -> Target:
    """Give a target back the linears that transformers made; returns the same target."""
    for parent in list(target.model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, SmallRowLinear):
                setattr(parent, name, child.stock())
    return target


def _filled_cache(target: Target, context: int) -> SlabCache:
    cache = target.new_cache()
    target.forward([i % 1000 + 10 for i in range(context)], cache)
    return cache


def _cost(rows: int, times: Sequence[float]) -> PassCost:
    return PassCost(rows, median(times), min(times), max(times))


def pass_ms(target: Target, cache: SlabCache, rows: int) -> float:
    """Time one pass of `rows` new rows; the cache is left as it was."""
    before = cache.num_rows
    start = time.perf_counter()
    target.forward([100 + i for i in range(rows)], cache, num_logits=rows, num_features=rows)
    elapsed = (time.perf_counter() - start) * 1e3
    cache.crop_to(before)
    return elapsed

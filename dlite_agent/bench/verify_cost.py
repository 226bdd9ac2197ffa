"""What a verify pass costs, by rows: the number that decides whether speculation can pay at all."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from dlite_agent.engine.cache import SlabCache
from dlite_agent.engine.linear import SmallRowLinear
from dlite_agent.engine.target import Target

ROWS = (1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class PassCost:
    """Milliseconds of one pass over `num_rows` new rows: median, least and most."""

    num_rows: int
    median_ms: float
    min_ms: float
    max_ms: float


def measure(target: Target, *, context: int, repeats: int, exact: Target | None = None) -> dict[str, list[PassCost]]:
    """Time passes over `context` cached rows, the variants interleaved.

    Args:
        target: Measured with its small-row products ("ours") and with the stock ones ("stock").
        context: Rows in the cache.
        repeats: Timings per figure.
        exact: The same model with exact=True, measured as "exact"; None leaves that out.
    """
    layers = [module for module in target.model.modules() if isinstance(module, SmallRowLinear)]
    variants = {"ours": target} | ({"stock": target} if layers else {}) | ({} if exact is None else {"exact": exact})
    caches = {name: _filled_cache(variant, context) for name, variant in variants.items()}
    times: dict[tuple[str, int], list[float]] = {}
    for repeat in range(repeats + 1):  # the first round warms up
        for name, variant in variants.items():
            _set_stock(layers, name == "stock")
            for rows in ROWS:
                elapsed = pass_ms(variant, caches[name], rows)
                if repeat:
                    times.setdefault((name, rows), []).append(elapsed)
    _set_stock(layers, False)
    return {name: [_cost(rows, times[name, rows]) for rows in ROWS] for name in variants}


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


def _set_stock(layers: Sequence[SmallRowLinear], is_stock: bool) -> None:
    for layer in layers:
        layer.is_stock = is_stock

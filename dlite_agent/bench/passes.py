"""What passes cost: by rows, by context length, what the attention has of it, and for many sessions at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from dlite_agent.bench.contest import Spread
from dlite_agent.bench.verify_cost import pass_ms
from dlite_agent.drafters.null import NullDrafter
from dlite_agent.drafters.protocol import Drafter
from dlite_agent.engine import attention
from dlite_agent.engine.cache import SlabCache
from dlite_agent.engine.decode import decode
from dlite_agent.engine.request import Request
from dlite_agent.engine.scheduler import Scheduler
from dlite_agent.engine.state import TargetState
from dlite_agent.engine.target import Target

LONG_CONTEXT = 8064
SHORT_CONTEXT = 512
NUM_SESSIONS = 8
_FILL_ROWS = 512
_LAST_TOKENS = 128  # room a long context leaves in the model's own


@dataclass(frozen=True, slots=True)
class PassTime:
    """Milliseconds of one pass, and those inside the attention functions."""

    total_ms: float
    attention_ms: float


def long_context(target: Target) -> int:
    """Return how many rows the long context has: `LONG_CONTEXT`, or what the model can take."""
    return min(LONG_CONTEXT, target.max_positions - _LAST_TOKENS)


@torch.inference_mode()
def fill(target: Target, cache: SlabCache, num_rows: int, *, seed: int = 0) -> None:
    """Bring a cache to `num_rows` rows of noise: what a pass costs does not depend on what the rows hold."""
    generator = torch.Generator().manual_seed(seed)
    cache.reserve(num_rows + _LAST_TOKENS)
    if cache.num_rows == 0:
        target.forward([0], cache)
    like = cache.rows(0, 1)
    while cache.num_rows < num_rows:
        count = min(_FILL_ROWS, num_rows - cache.num_rows)
        rows = torch.randn((*like.shape[:3], count, like.shape[4]), generator=generator)
        cache.append(rows.to(like.dtype))


def verify_over_plain(target: Target, *, num_rows: int, num_rounds: int, context: int = SHORT_CONTEXT) -> Spread:
    """Time a pass of `num_rows` rows over one of a single row, alternating."""
    cache = target.new_cache()
    fill(target, cache, min(context, long_context(target)))
    ratios = []
    for number in range(num_rounds + 1):
        plain, several = (pass_ms(target, cache, rows) for rows in (1, num_rows))
        if number:  # the first round warms up
            ratios.append(several / plain)
    return Spread.of(ratios)


def step_by_context(target: Target, *, num_rounds: int) -> Spread:
    """Time a decode step at a long context, less what its attention costs more there, over one at a short context."""
    caches = [target.new_cache() for _ in range(2)]
    for cache, num_rows in zip(caches, (SHORT_CONTEXT, long_context(target)), strict=True):
        fill(target, cache, num_rows)
    ratios = []
    for number in range(num_rounds + 1):
        short, long = (timed_pass(target, cache, 1) for cache in caches)
        if number:
            ratios.append((long.total_ms - (long.attention_ms - short.attention_ms)) / short.total_ms)
    return Spread.of(ratios)


def timed_pass(target: Target, cache: SlabCache, rows: int) -> PassTime:
    """Time one pass of `rows` new rows, and the attention in it; the cache is left as it was."""
    with _timed_attention(target) as attention_seconds:
        total = pass_ms(target, cache, rows)
    return PassTime(total, sum(attention_seconds) * 1e3)


@contextmanager
def _timed_attention(target: Target) -> Iterator[list[float]]:
    """Yield a list that collects the seconds of every call of the target's attention function."""
    from transformers import AttentionInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name: Any = target.model.config._attn_implementation
    attend: Any = ALL_ATTENTION_FUNCTIONS[name]
    seconds: list[float] = []

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        output = attend(*args, **kwargs)
        seconds.append(time.perf_counter() - start)
        return output

    AttentionInterface.register(name, timed)
    try:
        yield seconds
    finally:
        attention.register()


def concurrent_over_one(
    target: Target, drafter: Drafter, prompts: Sequence[Sequence[int]], *, max_tokens: int, num_rounds: int
) -> Spread:
    """Compare the tokens per second of all sessions at once with those of one, which all take their turn to be.

    Every session decodes `max_tokens` tokens behind its own prompt, whose rows are there; nothing ends a text early.
    """
    scheduler = Scheduler(target)
    states = [TargetState(target.new_cache()) for _ in prompts]
    requests = [Request(ids, max_new_tokens=max_tokens) for ids in prompts]
    try:
        for state, ids in zip(states, prompts, strict=True):
            list(decode(target, state, NullDrafter(), Request(ids, max_new_tokens=1)))
        ratios = []
        for number in range(num_rounds + 1):
            one = number % len(prompts)
            alone = _together(scheduler, drafter, states[one : one + 1], requests[one : one + 1])
            all_at_once = _together(scheduler, drafter, states, requests)
            if number:
                ratios.append(all_at_once / alone)
    finally:
        scheduler.close()
    return Spread.of(ratios)


def _together(
    scheduler: Scheduler, drafter: Drafter, states: Sequence[TargetState], requests: Sequence[Request]
) -> float:
    """Decode every request in a thread of its own; returns the tokens per second of all."""
    counts = [0] * len(states)

    def consume(index: int) -> None:
        for step in scheduler.decode(states[index], drafter, requests[index]):
            counts[index] += len(step.tokens)

    threads = [threading.Thread(target=consume, args=(index,)) for index in range(len(states))]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(counts)
    return sum(counts) / (time.perf_counter() - start)

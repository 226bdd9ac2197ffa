"""How long decoding keeps an asyncio event loop from running: what a server feels whose requests share its loop.

    python -m dlite_agent.bench.heartbeat --model smollm2-135m

A task sleeps for one tick again and again, while calls are streamed on the same loop; what it sleeps too long, the loop
was blocked. The same task on an idle loop tells what the machine itself adds.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from dlite_agent.arguments import positive
from dlite_agent.bench.report import json_line

if TYPE_CHECKING:
    from dlite_agent.chat_model import ChatDLite

TICK_S = 0.001


@dataclass(frozen=True, slots=True)
class Delays:
    """How much too late the ticks came, in milliseconds, and how many there were."""

    num_ticks: int
    median_ms: float
    p99_ms: float
    max_ms: float

    @classmethod
    def of(cls, delays: Sequence[float]) -> Delays:
        """Sum up delays in seconds, at least one."""
        ordered = sorted(1e3 * delay for delay in delays)
        last = len(ordered) - 1
        return cls(len(ordered), ordered[last // 2], ordered[round(0.99 * last)], ordered[last])


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Delays of an idle loop and of one on which calls stream, and the tokens that these made per second."""

    idle: Delays
    decoding: Delays
    tokens_per_second: float


async def measure(model: ChatDLite, *, num_calls: int, idle_s: float = 2.0) -> Heartbeat:
    """Measure the running event loop, idle and then with calls streaming at once.

    Args:
        model: Its weights are loaded first, which is not measured. Its `max_tokens` bounds each call.
        num_calls: Calls at once.
        idle_s: Seconds to measure the idle loop for.
    """
    await asyncio.to_thread(model.warm_up)
    idle = await beat(asyncio.create_task(asyncio.sleep(idle_s)))
    start = time.perf_counter()
    questions = (f"Tell a long story about the number {number}." for number in range(num_calls))
    calls = asyncio.gather(*(_stream(model, question) for question in questions))
    decoding = await beat(calls)
    num_tokens = sum(await calls)
    return Heartbeat(Delays.of(idle), Delays.of(decoding), num_tokens / (time.perf_counter() - start))


async def beat(work: asyncio.Future[Any]) -> list[float]:
    """Tick until the work is done; returns how many seconds too late each tick came."""
    delays = []
    while not work.done():
        start = time.perf_counter()
        await asyncio.sleep(TICK_S)
        delays.append(max(0.0, time.perf_counter() - start - TICK_S))
    return delays


async def _stream(model: ChatDLite, question: str) -> int:
    """Stream a reply; returns its tokens."""
    num_tokens = 0
    async for chunk in model.astream(question):
        if chunk.usage_metadata is not None:
            num_tokens += chunk.usage_metadata["output_tokens"]
    return num_tokens


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table and one JSON line; returns the exit code."""
    parser = argparse.ArgumentParser(description="How long decoding keeps an asyncio event loop from running.")
    parser.add_argument("--model", default="smollm2-135m", help="name, folder or hub id (default: %(default)s)")
    parser.add_argument("--calls", type=positive, default=4, help="calls at once (default: %(default)s)")
    parser.add_argument("--max-tokens", type=positive, default=200, help="tokens per call (default: %(default)s)")
    arguments = parser.parse_args(argv)
    from dlite_agent.chat_model import ChatDLite

    model = ChatDLite(model=arguments.model, max_tokens=arguments.max_tokens)
    report = asyncio.run(measure(model, num_calls=arguments.calls))
    table = Table("event loop", "ticks", "median ms", "p99 ms", "max ms", box=None, padding=(0, 2, 0, 0))
    for name, delays in (("idle", report.idle), ("decoding", report.decoding)):
        cells = (f"{delays.median_ms:.2f}", f"{delays.p99_ms:.2f}", f"{delays.max_ms:.2f}")
        table.add_row(name, str(delays.num_ticks), *cells)
    Console().print(table)
    figures = {"p99_ms": report.decoding.p99_ms, "idle_p99_ms": report.idle.p99_ms}
    print(json_line("heartbeat", figures, details=asdict(report), **vars(arguments)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

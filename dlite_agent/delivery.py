"""Carries the chunks of replies from the engine's threads to their callers, synchronous and asynchronous."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Self

from langchain_core.outputs import ChatGenerationChunk

from dlite_agent import lifetime
from dlite_agent.jobs import CallerGone, Job
from dlite_agent.reply import Call, stream_reply

if TYPE_CHECKING:
    from dlite_agent.runtime import Runtime

_MAX_PENDING = 8  # chunks that a caller may be behind

Load = Callable[[], "Runtime"]
"""Loads the weights where they are not loaded yet."""


def chunks_of(load: Load, call: Call) -> Iterator[ChatGenerationChunk]:
    """Yield the chunks of a reply; closing it stops decoding within one step, and the session is free then."""
    events: queue.SimpleQueue[tuple[str, object]] = queue.SimpleQueue()
    with lifetime.quiet_exit():
        job = _submit(load(), call, lambda kind, value: events.put((kind, value)))
    kind = "item"
    try:
        while kind == "item":
            lifetime.check_fork()
            kind, value = events.get()
            job.taken()
            if kind != "done":
                yield _chunk(value)
    finally:
        job.cancel()
        while kind == "item" and not lifetime.is_forked():  # the session is free once the job has ended
            kind, _ = events.get()


async def deliver(load: Load, call: Call) -> Delivery:
    """Start a reply for a task of the running loop; loading happens on another thread."""
    loop = asyncio.get_running_loop()
    runtime = await loop.run_in_executor(None, load)
    events: asyncio.Queue[tuple[str, object]] = asyncio.Queue()

    def put(kind: str, value: object) -> None:
        try:
            loop.call_soon_threadsafe(events.put_nowait, (kind, value))
        except RuntimeError as error:  # the loop is closed
            raise CallerGone from error

    with lifetime.quiet_exit():
        return Delivery(_submit(runtime, call, put), events)


class Delivery:
    """Carries the chunks of a job to a task of the running loop; left early, it cancels the job.

    It is no generator: a loop that ends closes all of these at once, and one that is being closed cannot be closed by
    what iterates over it. Its job does not hold it, so a loop that ends without closing anything drops it.
    """

    def __init__(self, job: Job[ChatGenerationChunk], events: asyncio.Queue[tuple[str, object]]) -> None:
        """Take what a job puts into `events`."""
        self._job = job
        self._events = events
        self._has_ended = False

    def __del__(self) -> None:
        self._job.cancel()

    async def __aenter__(self) -> Self:
        """Return itself."""
        return self

    def __aiter__(self) -> Self:
        """Return itself."""
        return self

    async def __anext__(self) -> ChatGenerationChunk:
        """Return the next chunk."""
        kind, value = await self._events.get()
        self._job.taken()
        self._has_ended = kind != "item"
        if kind == "done":
            raise StopAsyncIteration
        return _chunk(value)

    async def __aexit__(self, error: type[BaseException] | None, *rest: object) -> None:
        """Cancel the job and wait for its end; its session is free then.

        A stream that is closed does not wait: its loop closes it when it is dropped, and may end before the job does.
        The session's next call waits instead.
        """
        self._job.cancel()
        while not self._has_ended and error is not GeneratorExit:
            kind, _ = await self._events.get()
            self._has_ended = kind != "item"


def _submit(runtime: Runtime, call: Call, deliver: Callable[[str, object], None]) -> Job[ChatGenerationChunk]:
    job: Job[ChatGenerationChunk] = Job(
        lambda job: stream_reply(runtime, call, job), deliver, max_pending=_MAX_PENDING, key=call.session_key
    )
    runtime.jobs.submit(job)
    return job


def _chunk(value: object) -> ChatGenerationChunk:
    """Return a delivered chunk, or raise a delivered error."""
    if isinstance(value, BaseException):
        with lifetime.quiet_exit():
            raise value
    assert isinstance(value, ChatGenerationChunk)
    return value

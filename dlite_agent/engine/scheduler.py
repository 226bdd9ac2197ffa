"""Many callers, one set of weights: a single thread runs everybody's decoding, one step each in turn.

All tensor work happens on that thread, so callers may be threads or asyncio tasks, a cancelled caller stops within one
step, and an exception in one caller's code never reaches another's decoding.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import Generic, TypeVar

from dlite_agent.errors import DLiteError

T = TypeVar("T")
_EXIT_S = 60.0

logger = logging.getLogger(__name__)

_END = object()


class Job(Generic[T]):
    """One caller's iteration, run on the scheduler's thread.

    `deliver` is called there with ("item", value) for each item and then once with ("done", None) or ("failed", error).
    """

    def __init__(self, items: Callable[[Job[T]], Iterator[T]], deliver: Callable[[str, object], None]) -> None:
        self._make = items
        self._deliver = deliver
        self._items: Iterator[T] | None = None
        self._cancelled = threading.Event()

    @property
    def is_cancelled(self) -> bool:
        """True once nobody waits for the result any more."""
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """Ask the iteration to stop; it does so within one step."""
        self._cancelled.set()

    def advance(self) -> bool:
        """Run one step; returns whether there may be more. No error gets out: it is the caller's own."""
        try:
            item = self._next()
            if item is not _END:
                self._deliver("item", item)
                return True
            self._close()
        except BaseException as error:
            self._finish("failed", error)
        else:
            self._finish("done", None)
        return False

    def _next(self) -> object:
        if self.is_cancelled:
            return _END
        if self._items is None:
            self._items = self._make(self)
        return next(self._items, _END)

    def _finish(self, kind: str, value: object) -> None:
        """End the iteration and tell the caller; one who cannot be told has gone."""
        for action in (self._close, lambda: self._deliver(kind, value)):
            try:
                action()
            except BaseException:
                logger.warning("a caller of the engine failed as it ended (%s)", kind, exc_info=True)

    def _close(self) -> None:
        if isinstance(self._items, Generator):
            self._items.close()


class Scheduler:
    """Runs jobs round-robin on one daemon thread that lives from the first job until `close`."""

    def __init__(self, name: str = "dlite-engine") -> None:
        self._name = name
        self._condition = threading.Condition()
        self._jobs: deque[Job[object]] = deque()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._running: Job[object] | None = None
        self._pid = os.getpid()

    def submit(self, job: Job[T]) -> None:
        """Queue a job behind those that run.

        Raises:
            DLiteError: If the scheduler was closed, or made in the process this one was forked from.
        """
        if os.getpid() != self._pid:
            raise DLiteError("the engine does not survive a fork; create the model in the child process, or use spawn")
        with self._condition:
            if self._closed:
                raise DLiteError("the engine is closed; create a new ChatDLite")
            self._jobs.append(job)  # type: ignore[arg-type]
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
                atexit.register(self.close, timeout=_EXIT_S)  # a thread in torch at exit aborts the process
            self._condition.notify()

    def cancel_all(self) -> None:
        """Cancel every job; sets flags only, so a signal handler may call it."""
        for job in [*self._jobs, self._running]:
            if job is not None:
                job.cancel()

    def close(self, *, timeout: float = 5.0) -> None:
        """Cancel all jobs and wait for the thread to end."""
        with self._condition:
            self._closed = True
            for job in self._jobs:
                job.cancel()
            self._condition.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)

    def _run(self) -> None:
        while (job := self._next()) is not None:
            self._running = job
            has_more = job.advance()
            self._running = None
            if has_more:
                with self._condition:
                    if self._closed:
                        job.cancel()
                    self._jobs.append(job)

    def _next(self) -> Job[object] | None:
        with self._condition:
            while not self._jobs and not self._closed:
                self._condition.wait()
            return self._jobs.popleft() if self._jobs else None

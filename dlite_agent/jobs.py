"""Callers' iterations on threads of their own, so that each may wait: for the engine, a server, a slow reader.

Callers may be threads or asyncio tasks; a cancelled one stops within one step, and an exception in one caller's code
never reaches another's.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Generic, TypeVar

from dlite_agent import lifetime
from dlite_agent.errors import DLiteError

T = TypeVar("T")
_POLL_S = 0.05
_PATIENCE_S = 5.0

logger = logging.getLogger(__name__)


class CallerGone(Exception):
    """Raised by `deliver`: nobody is there to take anything, and that is no fault."""


class Job(Generic[T]):
    """One caller's iteration, run on a thread of its own so that it may wait for the engine, a server or a queue.

    `deliver` is called there with ("item", value) for each item and then once with ("done", None) or ("failed", error).
    """

    def __init__(
        self,
        items: Callable[[Job[T]], Iterator[T]],
        deliver: Callable[[str, object], None],
        *,
        max_pending: int | None = None,
        key: str | None = None,
    ) -> None:
        """Prepare a job.

        Args:
            items: Makes the iteration.
            deliver: Hands a value to the caller.
            max_pending: Items that may be delivered and not yet `taken`; then the iteration waits. None for any number.
            key: What the iteration uses. It begins once the cancelled ones of the same key have ended, or soon if they
                do not. None for nothing.
        """
        self.key = key
        self._make = items
        self._deliver = deliver
        self._slots = None if max_pending is None else threading.Semaphore(max_pending)
        self._abort_error: BaseException | None = None
        self._is_cancelled = False  # no event: `cancel` must not need a lock
        self._ended = threading.Event()
        self.thread: threading.Thread | None = None

    @property
    def is_cancelled(self) -> bool:
        """True once nobody waits for the result any more."""
        return self._is_cancelled

    def cancel(self) -> None:
        """Ask the iteration to stop; it does so within one step. Safe in a signal handler and a finalizer."""
        self._is_cancelled = True

    def abort(self, error: BaseException) -> None:
        """Stop the iteration as `cancel` does, but as a failure."""
        self._abort_error = error
        self.cancel()

    def taken(self) -> None:
        """Say that the caller has taken an item."""
        if self._slots is not None:
            self._slots.release()

    def join(self, timeout: float) -> None:
        """Wait for the iteration to end, unless it is the caller or was left behind by a fork."""
        if self.thread is not threading.current_thread() and not lifetime.is_forked():
            self._ended.wait(timeout)

    def run(self) -> None:
        """Run the iteration to its end. No error gets out: it is the caller's own."""
        try:
            self._iterate()
            if self._abort_error is not None:
                raise self._abort_error
        except BaseException as error:
            lifetime.release_frames(error)
            self._finish("failed", error)
        else:
            self._finish("done", None)
        finally:
            self._ended.set()

    def _iterate(self) -> None:
        if self.is_cancelled:
            return
        items = self._make(self)
        try:
            while not self.is_cancelled:
                try:
                    item = next(items)
                except StopIteration:
                    return
                if self._wait_for_slot():
                    self._deliver("item", item)
        except CallerGone:
            self.cancel()
        finally:
            if isinstance(items, Generator):
                items.close()

    def _wait_for_slot(self) -> bool:
        """Wait until the caller has room for an item; False if it is gone. `cancel` wakes nobody, so: poll."""
        while self._slots is not None and not self._slots.acquire(timeout=_POLL_S):
            if self.is_cancelled:
                return False
        return True

    def _finish(self, kind: str, value: object) -> None:
        """Tell the caller; one who cannot be told has gone."""
        try:
            self._deliver(kind, value)
        except CallerGone:
            pass
        except BaseException:
            logger.warning("a caller of the engine failed as it ended (%s)", kind, exc_info=True)


class JobRunner:
    """Runs each job on a daemon thread of its own; at the interpreter's exit they are cancelled and waited for."""

    def __init__(self, name: str = "dlite-caller") -> None:
        self._name = name
        self._jobs: set[Job[object]] = set()
        self._lock = threading.Lock()
        self._is_closed = False
        self._is_registered = False

    def submit(self, job: Job[T]) -> None:
        """Start a job.

        Raises:
            DLiteError: If the runner was closed, the interpreter exits, or this process was forked from one that ran
                an engine.
        """
        lifetime.check_life()
        with self._lock:
            if self._is_closed:
                raise DLiteError("the engine is closed; create a new ChatDLite")
            if not self._is_registered:
                lifetime.close_at_exit(self.close)
                self._is_registered = True
            earlier = [other for other in tuple(self._jobs) if other.is_cancelled and other.key == job.key is not None]
            self._jobs.add(job)  # type: ignore[arg-type]
        job.thread = threading.Thread(target=self._run, args=(job, earlier), name=self._name, daemon=True)
        job.thread.start()

    def cancel_all(self) -> None:
        """Cancel every job; sets flags only, so a signal handler may call it."""
        for job in tuple(self._jobs):
            job.cancel()

    def close(self, *, timeout: float = 5.0) -> None:
        """Stop all jobs, as failures, and wait for them to end; in a forked child there are none."""
        if lifetime.is_forked():
            return
        with self._lock:
            self._is_closed = True
        for job in tuple(self._jobs):
            job.abort(DLiteError("the engine was closed while it served this call"))
        for job in tuple(self._jobs):
            job.join(timeout)
        lifetime.forget(self.close)

    def _run(self, job: Job[T], earlier: Sequence[Job[object]]) -> None:
        for other in earlier:
            other.join(_PATIENCE_S)
        try:
            job.run()
        finally:
            self._jobs.discard(job)

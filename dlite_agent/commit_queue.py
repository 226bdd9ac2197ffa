"""Commits behind a caller's back: one thread stores them in order, and the next call on a session waits for its own.

What a crash loses is what was still waiting here; the session is then at its last commit, as after any crash.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import NamedTuple

from dlite_agent import lifetime

DEFAULT_MAX_BYTES = 256 << 20
_EXIT_S = 60.0

logger = logging.getLogger(__name__)


class _Item(NamedTuple):
    sid: str
    num_bytes: int
    work: Callable[[], object]


class CommitQueue:
    """Runs commits one after another on a daemon thread; at the interpreter's exit they are waited for."""

    def __init__(self, *, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        """Make an empty queue; its thread starts with the first commit.

        Args:
            max_bytes: Bytes that may wait to be stored. A commit that would exceed them waits for room, as its caller
                does; one that is larger by itself waits for an empty queue.
        """
        self._max_bytes = max_bytes
        self._items: deque[_Item] = deque()
        self._waiting: Counter[str] = Counter()  # commits per session, the running one included
        self._num_bytes = 0
        self._errors: dict[str, BaseException] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def submit(self, sid: str, num_bytes: int, work: Callable[[], object]) -> None:
        """Have a commit run behind those before it; once the queue is closed, run it here and now.

        Args:
            sid: The session it is of.
            num_bytes: What it holds in memory until it has run.
            work: Stores it. What it raises is raised by the session's next `wait`.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._num_bytes or self._num_bytes + num_bytes <= self._max_bytes)
            is_closed = self._is_closed
            if not is_closed:
                self._items.append(_Item(sid, num_bytes, work))
                self._waiting[sid] += 1
                self._num_bytes += num_bytes
                self._start()
                self._changed.notify_all()
        if is_closed:
            self.wait(sid)
            work()

    def wait(self, sid: str) -> None:
        """Wait until no commit of a session is left; raise what one of them raised."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting[sid])
            del self._waiting[sid]
            error = self._errors.pop(sid, None)
        if error is not None:
            raise error

    def drain(self, *, timeout: float | None = None) -> bool:
        """Wait until no commit is left, at most `timeout` seconds; say whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: not any(self._waiting.values()), timeout)

    def close(self, *, timeout: float = _EXIT_S) -> None:
        """Wait for all commits and for their thread, at most `timeout` seconds, and take no more.

        A thread that is still freeing tensors when the interpreter goes would abort the process. A forked child has
        neither commits nor a thread.
        """
        if lifetime.is_forked():
            return
        deadline = time.monotonic() + timeout
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if not self.drain(timeout=timeout):
            logger.warning("%d commits were not stored in %.0f s; those turns are lost", len(self._items), timeout)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(max(0.0, deadline - time.monotonic()))
        lifetime.forget(self.close)

    def _start(self) -> None:
        if self._thread is None:
            lifetime.close_at_exit(self.close)
            self._thread = threading.Thread(target=self._run, name="dlite-commits", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._items or self._is_closed)
                if not self._items:
                    return
                item = self._items.popleft()
            error: BaseException | None = None
            try:
                item.work()
            except BaseException as raised:  # it belongs to the session's next call, not to this thread
                error = raised
            with self._changed:
                if error is not None:
                    self._errors[item.sid] = error
                self._waiting[item.sid] -= 1
                if not self._waiting[item.sid]:
                    del self._waiting[item.sid]  # the session may never come back
                self._num_bytes -= item.num_bytes
                self._changed.notify_all()
            del item  # its blocks

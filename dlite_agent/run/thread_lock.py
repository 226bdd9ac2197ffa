"""One run at a time on a thread: two that talk on it at once would take each other's turns off it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType

from dlite_agent.config import Settings
from dlite_agent.errors import ThreadInUseError
from dlite_agent.sessions.locks import opened_lock, try_lock


class ThreadLock:
    """Keeps other runs of this machine's folder of data off a thread; dies with its process."""

    def __init__(self, settings: Settings, thread_id: str) -> None:
        """Take a thread.

        Raises:
            ThreadInUseError: If another run has it.
        """
        self._folder = settings.home / "threads"
        self._server = settings.redis_url or ""
        self._held = ExitStack()
        self._held.enter_context(self._lock(thread_id))

    def __enter__(self) -> ThreadLock:
        """Hold the thread until the end of the block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Give the thread back."""
        self._held.close()

    @contextmanager
    def moving_to(self, thread_id: str) -> Iterator[None]:
        """Hold another thread, too; in its place if the block ends well.

        Raises:
            ThreadInUseError: If another run has it.
        """
        with ExitStack() as wanted:
            wanted.enter_context(self._lock(thread_id))
            yield
            before, self._held = self._held, wanted.pop_all()
            before.close()

    @contextmanager
    def _lock(self, thread_id: str) -> Iterator[None]:
        name = hashlib.blake2b(f"{self._server}\0{thread_id}".encode(), digest_size=16).hexdigest()
        path = self._folder / f"{name}.lock"
        self._folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as opened:
            while True:
                lock = opened.enter_context(opened_lock(path))
                if not try_lock(lock):
                    raise ThreadInUseError(
                        f"thread {thread_id!r} is open in another run; end that one, or talk on another --thread"
                    )
                if _is_at(path, lock):
                    break
                opened.close()  # whoever held it has just removed the file
            try:
                yield
            finally:
                if _is_at(path, lock):
                    path.unlink()


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False

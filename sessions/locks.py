"""Locks on files between processes, which die with their holders; a finalizer of the thread that holds one waits."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dlite_agent.errors import ServerStartError

_POLL_S = 0.02


class _Own(threading.local):
    """What this thread is to do when it gives back the locks that it holds, by path."""

    def __init__(self) -> None:
        self.later: dict[Path, list[Callable[[], None]]] = {}


_own = _Own()


@contextmanager
def opened_lock(path: Path) -> Iterator[int]:
    """Open a lock's file, made if missing, without taking the lock; yields its descriptor."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        yield lock
    finally:
        os.close(lock)


def try_lock(lock: int) -> bool:
    """Take a lock alone, by its descriptor; say whether that could be done at once."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def locked(path: Path, *, timeout: float) -> Iterator[None]:
    """Hold a lock alone.

    Raises:
        ServerStartError: If another holds it for longer than `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    later: list[Callable[[], None]] = []
    try:
        with opened_lock(path) as lock:
            while not try_lock(lock):
                if time.monotonic() > deadline:
                    raise ServerStartError(f"another process holds {path}; wait for it or end it")
                time.sleep(_POLL_S)
            _own.later[path] = later
            try:
                yield
            finally:
                del _own.later[path]
    finally:
        for work in later:
            work()


def when_given_back(path: Path, work: Callable[[], None]) -> None:
    """Do something once this thread does not hold a lock: now, or right behind the body of its `locked`.

    A finalizer runs wherever its thread is just then. One that waited for a lock of its own thread would wait for ever.
    """
    later = _own.later.get(path)
    if later is None:
        work()
    else:
        later.append(work)

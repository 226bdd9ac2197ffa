"""Where the engine's life ends: at the interpreter's exit, and at a fork.

A thread that is in torch when the interpreter goes aborts the process, so the exit stops the engine and waits for it.

A forked child has none of its parent's threads, so it must wait for none. Nor can it compute: OpenMP's thread pool and
the locks of torch are there as the fork found them, and the first parallel operation, also of a new model, may hang.
"""

from __future__ import annotations

import atexit
import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from traceback import clear_frames

from dlite_agent.errors import DLiteError

_EXIT_S = 60.0


class _Life:
    """What the exit has to stop. It belongs to the process that began it: a fork's copy is not touched."""

    def __init__(self) -> None:
        self.pid: int | None = None
        self.is_exiting = False
        self.num_working = 0
        self.closers: list[Callable[..., None]] = []
        self.changed = threading.Condition()

    def begin(self) -> None:
        """Note, under the lock, that the engine runs in this process."""
        check_life()
        if self.pid is None:
            self.pid = os.getpid()
            atexit.register(self.end)

    def end(self) -> None:
        if is_forked():
            return
        with self.changed:
            self.is_exiting = True
            closers = self.closers[::-1]
        for close in closers:
            close(timeout=_EXIT_S)
        with self.changed:
            self.changed.wait_for(lambda: not self.num_working, _EXIT_S)


_life = _Life()


def is_forked() -> bool:
    """Whether the engine ran in the process that this one was forked from: then none of its threads is here."""
    return _life.pid is not None and _life.pid != os.getpid()


def check_fork() -> None:
    """Refuse to wait for a thread that is not here.

    Raises:
        DLiteError: The engine ran in the process that this one was forked from.
    """
    if is_forked():
        raise DLiteError(
            "a model was loaded in the process that this one was forked from, and torch does not survive a fork; start"
            " processes with the spawn method (multiprocessing.get_context('spawn')), or fork before a model is loaded"
        )


def check_life() -> None:
    """Refuse to begin what cannot be ended.

    Raises:
        DLiteError: The engine ran in the process that this one was forked from, or the interpreter exits.
    """
    check_fork()
    if _life.is_exiting:
        raise DLiteError("the interpreter exits, so the engine is closed; end the calls before the program ends")


def close_at_exit(close: Callable[..., None]) -> None:
    """Have `close(timeout=seconds)` called at the interpreter's exit, the latest first.

    Raises:
        DLiteError: As `check_life`.
    """
    check_life()
    with _life.changed:
        _life.begin()
        _life.closers.append(close)


def forget(close: Callable[..., None]) -> None:
    """Undo `close_at_exit`; what was closed would be kept in memory."""
    with _life.changed:
        if close in _life.closers:
            _life.closers.remove(close)


@contextmanager
def quiet_exit() -> Iterator[None]:
    """Let a daemon thread whose call the exit cuts short end without a word, as such threads do."""
    try:
        yield
    except DLiteError as error:
        if _is_cut_short():
            raise SystemExit(str(error)) from None
        raise


def _is_cut_short() -> bool:
    return _life.is_exiting and threading.current_thread().daemon


def release_frames(error: BaseException) -> None:
    """At the exit, free what an error's frames hold while the exit still waits: freeing a tensor runs torch, too."""
    link: BaseException | None = error if _life.is_exiting else None
    while link is not None:
        clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__


@contextmanager
def awaited_at_exit() -> Iterator[None]:
    """Have the interpreter's exit wait for the body, which runs torch on a thread that may be a daemon.

    Raises:
        DLiteError: As `check_life`.
    """
    with quiet_exit():
        check_life()
        with _life.changed:
            _life.begin()
            _life.num_working += 1
        try:
            yield
        except Exception as error:
            release_frames(error)
            if _is_cut_short():
                raise SystemExit(str(error)) from None
            raise
        finally:
            if _life.is_exiting:
                gc.collect()
            with _life.changed:
                _life.num_working -= 1
                _life.changed.notify_all()

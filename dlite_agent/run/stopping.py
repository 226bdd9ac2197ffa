"""Ctrl-C: the first one ends the step a turn is in, LangGraph's way, so that the thread stays whole."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

from langgraph.runtime import RunControl


class Stopper:
    """Handles SIGINT while it is entered.

    In a turn it drains the graph: a model call is cancelled, a tool that runs is waited for, and nothing new begins. A
    second one in the same turn is a KeyboardInterrupt, as is one outside of turns.
    """

    def __init__(self) -> None:
        self.cancel: Callable[[], None] = lambda: None
        """Cancels running model calls; it is called in a signal handler and on any thread."""
        self._control: RunControl | None = None
        self._before: Any = None

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self._before)

    @contextmanager
    def turn(self) -> Iterator[RunControl]:
        """Let SIGINT drain what runs under the control that is yielded."""
        self._control = control = RunControl()
        try:
            yield control
        finally:
            self._control = None

    def check(self) -> None:
        """Cancel a model call that began as the signal came; call it where a turn gets on."""
        control = self._control
        if control is not None and control.drain_requested:
            self.cancel()

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        control = self._control
        if control is None or control.drain_requested:
            raise KeyboardInterrupt
        control.request_drain("stopped by the person")
        self.cancel()

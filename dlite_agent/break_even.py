"""Whether fetching stored rows is faster than computing them again, by what both took here lately.

On a CPU fetching wins by far; a fast accelerator behind a slow network may be the other way round. Nothing is assumed:
until both have been seen rows are fetched, and where computing wins, fetching is tried again now and then.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

_MEMORY = 0.8  # weight of what was seen before
_RETRY = 16
_MIN_ROWS = 16  # fewer say more about the overhead than about the rate


@dataclass(slots=True)
class _Rate:
    seconds_per_row: float | None = None

    def see(self, rows: int, seconds: float) -> None:
        now = seconds / rows
        before = self.seconds_per_row
        self.seconds_per_row = now if before is None else _MEMORY * before + (1 - _MEMORY) * now


class BreakEven:
    """Running rates of fetching and of computing rows. Safe to share between threads."""

    def __init__(self) -> None:
        self._fetching = _Rate()
        self._computing = _Rate()
        self._num_skipped = 0
        self._lock = threading.Lock()

    def fetched(self, rows: int, seconds: float) -> None:
        """Learn from rows that were fetched."""
        self._see(self._fetching, rows, seconds)

    def computed(self, rows: int, seconds: float) -> None:
        """Learn from prompt rows that were computed."""
        self._see(self._computing, rows, seconds)

    def is_fetching_faster(self) -> bool:
        """Say whether to fetch; every so often yes, to learn whether it still does not pay."""
        with self._lock:
            fetching, computing = self._fetching.seconds_per_row, self._computing.seconds_per_row
            if fetching is None or computing is None or fetching <= computing:
                return True
            self._num_skipped = (self._num_skipped + 1) % _RETRY
            return self._num_skipped == 0

    def _see(self, rate: _Rate, rows: int, seconds: float) -> None:
        if rows >= _MIN_ROWS:
            with self._lock:
                rate.see(rows, seconds)

"""What reads and commits met: the numbers that say whether a store is well."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field


@dataclass(slots=True)
class Counters:
    """What reads and commits met since the store was made.

    Attributes:
        hits: Records read and found sound.
        misses: Records that were not there.
        corrupt: Records and heads that were damaged.
        foreign: Records of another target, chain, kind, shape or version than was asked for.
        bytes_read: Bytes of the hits.
        bytes_written: Bytes of blocks and snapshots that were not there before, and of pivot rows.
        committed: Commits that moved a head.
        duplicate: Commits that had been made before.
        sibling: Commits that left a moved head alone.
        fenced: Commits refused because another worker had acquired the session.
        failed: Commits that the server did not take.
    """

    hits: int = 0
    misses: int = 0
    corrupt: int = 0
    foreign: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    committed: int = 0
    duplicate: int = 0
    sibling: int = 0
    fenced: int = 0
    failed: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False, compare=False)

    def add(self, **amounts: int) -> None:
        """Count, from any thread."""
        with self._lock:
            for name, amount in amounts.items():
                setattr(self, name, getattr(self, name) + amount)

    def as_dict(self) -> dict[str, int]:
        """Return the numbers by name."""
        return {name: getattr(self, name) for name in self.__slots__ if name != "_lock"}

"""Reading records: a few at a time, the next ones on their way while the last ones are checked.

What is fetched is bytes of a server, not yet believed; the caller's `unpack` says what they are or raises. Hashing and
receiving both let other Python threads run, so a thread that fetches ahead takes the shorter of the two off a restore.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from dlite_agent.errors import RecordError
from dlite_agent.sessions.client import RedisClient, check_replies, is_wrong_type, translated
from dlite_agent.sessions.counters import Counters
from dlite_agent.sessions.record_codec import ForeignRecordError

_SLICE = 16  # records per round trip
_AHEAD = 1  # slices that wait to be checked

T = TypeVar("T")
_Slice = list[object] | BaseException


class RecordReader:
    """Reads records, extends their lives, and counts what they were."""

    def __init__(self, client: RedisClient, *, counters: Counters, damaged: set[str]) -> None:
        """Read through a client; keys of records that are not believed are put into `damaged`."""
        self._client = client
        self._counters = counters
        self._damaged = damaged

    def read(self, key: str, *, ttl_s: int, unpack: Callable[[bytes], T]) -> T | None:
        """Read one record; None if it is missing or not believed."""
        (record,) = self._fetch([key], ttl_s)
        return self._checked(key, record, unpack)

    def stream(self, keys: Sequence[str], *, ttl_s: int, unpack: Callable[[int, bytes], T]) -> Iterator[T | None]:
        """Yield records in order, None where one is missing or not believed.

        Args:
            keys: Where they are.
            ttl_s: What their lives are extended to as they are read.
            unpack: Makes the record of an index of its bytes, or raises a RecordError.
        """
        slices = [keys[start : start + _SLICE] for start in range(0, len(keys), _SLICE)]
        index = 0
        for some, records in zip(slices, self._fetched_ahead(slices, ttl_s), strict=True):
            for key, record in zip(some, records, strict=True):
                at = index
                yield self._checked(key, record, lambda data: unpack(at, data))  # noqa: B023  (called at once)
                index += 1

    def reject(self, key: str) -> None:
        """Count a record that was believed, but is not what its key promised; the next write replaces it."""
        self._counters.add(foreign=1)
        self._damaged.add(key)

    def _fetched_ahead(self, slices: Sequence[Sequence[str]], ttl_s: int) -> Iterator[list[object]]:
        """Yield the replies of each slice; while the caller looks at one, a thread fetches the next."""
        if len(slices) < 2:
            yield from (self._fetch(some, ttl_s) for some in slices)
            return
        ready: queue.Queue[_Slice] = queue.Queue(_AHEAD)
        is_left = threading.Event()
        thread = threading.Thread(target=self._fetch_all, args=(slices, ttl_s, ready, is_left), daemon=True)
        thread.start()
        try:
            for _ in slices:
                found = ready.get()
                if isinstance(found, BaseException):
                    raise found
                yield found
        finally:
            is_left.set()
            while thread.is_alive():  # it may be waiting for room
                try:
                    ready.get(timeout=0.01)
                except queue.Empty:
                    continue
            thread.join()

    def _fetch_all(
        self, slices: Sequence[Sequence[str]], ttl_s: int, ready: queue.Queue[_Slice], is_left: threading.Event
    ) -> None:
        try:
            for some in slices:
                if is_left.is_set():
                    return
                ready.put(self._fetch(some, ttl_s))
        except BaseException as error:  # raised where the slices are asked for
            ready.put(error)

    def _fetch(self, keys: Sequence[str], ttl_s: int) -> list[object]:
        with translated("reading records"):
            pipe = self._client.pipeline(transaction=False)
            for key in keys:
                pipe.getex(key, ex=ttl_s)
            replies: list[object] = pipe.execute(raise_on_error=False)
            check_replies([reply for reply in replies if not is_wrong_type(reply)])
        return replies

    def _checked(self, key: str, record: object, unpack: Callable[[bytes], T]) -> T | None:
        if record is None:
            self._counters.add(misses=1)
            return None
        try:
            if not isinstance(record, bytes):
                raise ForeignRecordError("the key holds no string")
            found = unpack(record)
        except ForeignRecordError:
            self.reject(key)
            return None
        except RecordError:
            self._counters.add(corrupt=1)
            self._damaged.add(key)
            return None
        self._counters.add(hits=1, bytes_read=len(record))
        return found

"""Writing immutable records: each is stored once, and finding it there extends its life instead."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from dlite_agent.sessions.client import RedisClient, check_replies, translated

_WRITE_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class Write:
    """One record to store.

    Attributes:
        key: Where.
        record: What.
        replaces: Whether it replaces a record that is there.
    """

    key: str
    record: bytes
    replaces: bool = False


class RecordWriter:
    """Stores records that are not there yet.

    Attributes:
        damaged: Keys whose records were found damaged: the next write replaces them.
    """

    def __init__(self, client: RedisClient) -> None:
        self._client = client
        self.damaged: set[str] = set()

    def write(self, writes: Iterable[Write], ttl_s: int) -> list[int]:
        """Write the records that are not there yet and extend the others; return the bytes written for each."""
        sizes: list[int] = []
        for batch in _batches(writes):
            written = dict.fromkeys((write.key for write in batch), 0)
            pending = batch
            while pending:  # more than once only if a record expires just now
                for write in self._set_new(pending, ttl_s):
                    written[write.key] = len(write.record)
                old = [write for write in pending if not written[write.key]]
                there = self.expire([write.key for write in old], ttl_s)
                pending = [write for write, is_there in zip(old, there, strict=True) if not is_there]
            sizes.extend(written[write.key] for write in batch)
        return sizes

    def expire(self, keys: Sequence[str], ttl_s: int) -> list[bool]:
        """Extend the lives of keys; say for each whether it is there."""
        with translated("extending the lives of records"):
            pipe = self._client.pipeline(transaction=False)
            for key in keys:
                pipe.expire(key, ttl_s)
            replies = pipe.execute(raise_on_error=False)
            check_replies(replies)
        return [bool(reply) for reply in replies]

    def _set_new(self, writes: Sequence[Write], ttl_s: int) -> list[Write]:
        with translated("writing records"):
            pipe = self._client.pipeline(transaction=False)
            for write in writes:
                pipe.set(write.key, write.record, ex=ttl_s, nx=not (write.replaces or write.key in self.damaged))
            replies = pipe.execute(raise_on_error=False)
            check_replies(replies)
        new = [write for write, reply in zip(writes, replies, strict=True) if reply]
        self.damaged.difference_update(write.key for write in new)
        return new


def _batches(writes: Iterable[Write]) -> Iterator[list[Write]]:
    batch: list[Write] = []
    num_bytes = 0
    for write in writes:
        batch.append(write)
        num_bytes += len(write.record)
        if num_bytes >= _WRITE_BYTES:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch

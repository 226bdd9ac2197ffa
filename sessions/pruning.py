"""Removes checkpoints from LangGraph threads, and copies threads: what a saver does beside reading and writing.

A removal is one optimistic transaction: what it decides on cannot change before it is done, so it never takes a blob or
a write that a running graph has just stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from dlite_agent.sessions.client import RedisClient, translated
from dlite_agent.sessions.threads import (
    BLOB,
    CHECKPOINT,
    EMPTY,
    THREAD,
    WRITE,
    Thread,
    as_mapping,
    blob_name,
    channel_versions,
    check_whole,
    checkpoint_name,
    checkpoint_parts,
    decode,
    encode,
    split,
    write_parts,
)

Parse = Callable[[bytes], Any]


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """What decides whether a checkpoint stays.

    Attributes:
        parent: Name of the checkpoint before it, which may be gone.
        metadata: Its metadata.
        blobs: Name of each channel's blob.
    """

    parent: bytes
    metadata: Mapping[str, Any]
    blobs: Mapping[str, bytes]


Choice = Callable[[Mapping[bytes, StoredCheckpoint], Callable[[Iterable[bytes]], set[bytes]]], set[bytes]]
"""Names the checkpoints to remove, given all of a thread and a look at which of some blobs hold a value."""


def of_runs(run_ids: Iterable[str]) -> Choice:
    """Choose the checkpoints that these runs made."""
    wanted = set(run_ids)
    return lambda stored, _: {name for name, found in stored.items() if found.metadata.get("run_id") in wanted}


def all_but_latest(
    stored: Mapping[bytes, StoredCheckpoint], with_values: Callable[[Iterable[bytes]], set[bytes]]
) -> set[bytes]:
    """Choose all checkpoints but the newest of each namespace, and what its `DeltaChannel`s are replayed from.

    Such a channel stores its value now and then, and what tasks wrote to it in between; LangGraph counts in a
    checkpoint's metadata how far back the value lies.
    """
    latest: dict[bytes, bytes] = {}
    for name in sorted(stored):
        latest[checkpoint_parts(name)[0]] = name
    kept: set[bytes] = set()
    for name in latest.values():
        replayed = set(stored[name].metadata.get("counters_since_delta_snapshot") or ())
        while name in stored:
            kept.add(name)
            blobs = {channel: blob for channel, blob in stored[name].blobs.items() if channel in replayed}
            there = with_values(blobs.values()) if blobs else set()
            replayed -= {channel for channel, blob in blobs.items() if blob in there}
            if not replayed:
                break
            name = stored[name].parent
    return set(stored) - kept


def remove_checkpoints(client: RedisClient, thread: Thread, choose: Choice, *, parse: Parse) -> None:
    """Remove checkpoints of a thread, their writes, and the blobs that no other checkpoint refers to.

    Args:
        client: A binary client.
        thread: Where; one that there is not is no error.
        choose: Says which.
        parse: Reads a serialized value.

    Raises:
        RecordError: If the thread is damaged.
        StoreUnavailableError: If the server does not answer.
    """

    def edit(pipe: Any) -> None:
        names = set(pipe.hkeys(thread.data))
        check_whole(len(names), pipe.exists(thread.index))
        stored = _read(pipe, thread, sorted(name for name in names if name.startswith(CHECKPOINT)), parse)
        gone = choose(stored, lambda blobs: _with_values(pipe, thread, list(blobs)))
        garbage = _belongings(names, stored, gone)
        pipe.multi()
        if not gone:
            return
        if all(name.startswith((THREAD, BLOB)) for name in names - garbage):
            pipe.unlink(thread.data, thread.index)
            return
        pipe.hdel(thread.data, *garbage)
        pipe.zrem(thread.index, *garbage)

    with translated("removing checkpoints"):
        cast(Any, client).transaction(edit, thread.data)


def copy_records(client: RedisClient, source: Thread, target: Thread, *, ttl_s: int | None) -> None:
    """Add all that a thread holds to another one.

    Args:
        client: A binary client.
        source: Where from; one that there is not changes nothing.
        target: Where to.
        ttl_s: Seconds the target lives from now on, or None.

    Raises:
        RecordError: If half of the source is gone.
        StoreUnavailableError: If the server does not answer.
    """
    with translated("copying a thread"):
        pipe = client.pipeline(transaction=True)
        pipe.hgetall(source.data)
        pipe.exists(source.index)
        records, has_index = pipe.execute()
        check_whole(len(records), has_index)
        if not records:
            return
        pipe = client.pipeline(transaction=True)
        pipe.hset(target.data, mapping=records | {THREAD: encode(target.thread_id)})
        pipe.zadd(target.index, {name: 0 for name in records if name.startswith((CHECKPOINT, WRITE))})
        if ttl_s is not None:
            pipe.expire(target.data, ttl_s)
            pipe.expire(target.index, ttl_s)
        pipe.execute()


def _read(pipe: Any, thread: Thread, names: list[bytes], parse: Parse) -> dict[bytes, StoredCheckpoint]:
    records = pipe.hmget(thread.data, names) if names else []
    stored: dict[bytes, StoredCheckpoint] = {}
    for name, record in zip(names, records, strict=True):
        parent, checkpoint, metadata = split(record, 3)
        namespace = decode(checkpoint_parts(name)[0])
        versions = channel_versions(parse(checkpoint))
        blobs = {channel: blob_name(namespace, channel, version) for channel, version in versions.items()}
        known = as_mapping(parse(metadata), "metadata")
        stored[name] = StoredCheckpoint(checkpoint_name(namespace, decode(parent)), known, blobs)
    return stored


def _with_values(pipe: Any, thread: Thread, blobs: list[bytes]) -> set[bytes]:
    found = pipe.hmget(thread.data, blobs)
    return {name for name, value in zip(blobs, found, strict=True) if value not in (None, EMPTY)}


def _belongings(names: set[bytes], stored: Mapping[bytes, StoredCheckpoint], gone: set[bytes]) -> set[bytes]:
    """Name the records that go with these checkpoints."""
    parts = {checkpoint_parts(name) for name in gone}
    writes = {name for name in names if name.startswith(WRITE) and write_parts(name)[:2] in parts}
    theirs = {blob for name in gone for blob in stored[name].blobs.values()}
    others = {blob for name in stored.keys() - gone for blob in stored[name].blobs.values()}
    return gone | writes | (theirs - others)

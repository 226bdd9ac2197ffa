"""How a LangGraph thread lies in Redis, so that it is written, extended, expired and deleted as a whole.

Two keys of one cluster slot hold it:

* a hash of records: checkpoints without their channel values, one blob per channel *version* (a step stores only the
  channels it changed), pending writes, and the thread's id;
* a sorted set of names in byte order: the newest checkpoint of a namespace and the writes of a checkpoint are ranges.

Names are tuples of length-prefixed parts, so no thread id, namespace, channel or task id can be mistaken for another.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

from dlite_agent.errors import RecordError
from dlite_agent.sessions.keys import Keys, thread_hash, without_task_ids

CHECKPOINT, BLOB, WRITE, THREAD = b"c", b"b", b"w", b"t"
"""What the names of each kind of record start with; the last one is a whole name."""
EMPTY = b"empty"
"""The blob of a channel version without a value."""


@dataclass(frozen=True, slots=True)
class Thread:
    """A thread.

    Attributes:
        thread_id: What people call it.
        data: Key of its hash.
        index: Key of its sorted set.
    """

    thread_id: str
    data: str
    index: str

    @classmethod
    def named(cls, thread_id: str, keys: Keys) -> Thread:
        """Return a tenant's thread of this id; a number stands for its text."""
        thread_id = str(thread_id)
        hashed = thread_hash(thread_id)
        return cls(thread_id, keys.checkpoint_data(hashed), keys.checkpoint_index(hashed))


def namespace_of_name(name: bytes) -> str:
    """Read a checkpoint's namespace, without per-step task ids, from its name.

    Raises:
        RecordError: If it is damaged.
    """
    return without_task_ids(decode(checkpoint_parts(name)[0]))


def as_mapping(parsed: object, what: str) -> dict[Any, Any]:
    """Return a stored value that is to be a mapping.

    Raises:
        RecordError: If it is damaged.
    """
    if not isinstance(parsed, dict):
        raise RecordError(f"a checkpoint's {what} cannot be read; delete the thread or restore it")
    return parsed


def channel_versions(checkpoint: object) -> dict[str, Any]:
    """Return the version of each channel of a stored checkpoint.

    Raises:
        RecordError: If it is damaged.
    """
    versions = as_mapping(as_mapping(checkpoint, "fields").get("channel_versions"), "channel versions")
    if not all(isinstance(channel, str) for channel in versions):
        raise RecordError("a checkpoint's channels have no names; delete the thread or restore it")
    return versions


def check_whole(has_data: int, has_index: int) -> None:
    """Raise RecordError if only one of a thread's two keys is there."""
    if bool(has_data) != bool(has_index):
        raise RecordError(
            "half of a thread is gone from Redis; delete the thread or restore it, and use a volatile-* eviction policy"
        )


def checkpoint_name(namespace: str, checkpoint_id: str) -> bytes:
    """Name a checkpoint so that those of one namespace sort by id: the id comes last, without its length."""
    return CHECKPOINT + join(encode(namespace)) + encode(checkpoint_id)


def checkpoint_parts(name: bytes) -> tuple[bytes, bytes]:
    """Split a checkpoint's name into namespace and id.

    Raises:
        RecordError: If it is damaged.
    """
    size = int.from_bytes(name[1:5], "big")
    if len(name) < 5 + size:
        raise RecordError("a checkpoint's name is cut off; delete the thread or restore it")
    return name[5 : 5 + size], name[5 + size :]


def blob_name(namespace: str, channel: str, version: str | int | float) -> bytes:
    """Name a channel's value of some version."""
    return BLOB + join(encode(namespace), encode(channel), type(version).__name__.encode(), encode(str(version)))


def write_name(namespace: str, checkpoint_id: str, task_id: str, index: int) -> bytes:
    """Name what a task wrote after a checkpoint; `index` is negative for errors, interrupts and resumes."""
    return WRITE + join(encode(namespace), encode(checkpoint_id), encode(task_id)) + struct.pack(">i", index)


def write_parts(name: bytes) -> tuple[bytes, bytes, bytes, int]:
    """Split a write's name into namespace, checkpoint id, task id and index.

    Raises:
        RecordError: If it is damaged.
    """
    namespace, checkpoint_id, task_id = split(name[1:-4], 3)
    return namespace, checkpoint_id, task_id, int.from_bytes(name[-4:], "big", signed=True)


def encode(text: str) -> bytes:
    """Write any text, lone surrogates too."""
    return text.encode("utf-8", "surrogatepass")


def decode(data: bytes) -> str:
    """Read what `encode` wrote.

    Raises:
        RecordError: If it is no text.
    """
    try:
        return data.decode("utf-8", "surrogatepass")
    except ValueError as error:
        raise RecordError(f"a name in a thread cannot be read ({error}); delete the thread or restore it") from error


def join(*parts: bytes) -> bytes:
    """Put parts after each other, each behind its length."""
    return b"".join(piece for part in parts for piece in (struct.pack(">I", len(part)), part))


def split(data: bytes, num_parts: int) -> list[bytes]:
    """Read what `join` wrote.

    Raises:
        RecordError: If it has another number of parts, or an end is missing.
    """
    parts: list[bytes] = []
    start = 0
    while start + 4 <= len(data):
        (size,) = struct.unpack_from(">I", data, start)
        parts.append(data[start + 4 : start + 4 + size])
        start += 4 + size
    if start != len(data) or len(parts) != num_parts:
        raise RecordError(f"a stored checkpoint has {len(parts)} parts in {len(data)} bytes; expected {num_parts}")
    return parts

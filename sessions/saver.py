"""LangGraph checkpoints in plain Redis: no modules, no pickle, and an outage is an error, never a fresh thread.

Two keys hold a thread, so it is written, extended, expired and deleted as a whole:

* a hash of records: checkpoints without their channel values, one blob per channel *version* (a step stores only the
  channels it changed), and pending writes;
* a sorted set of names in byte order: the newest checkpoint of a namespace and the writes of a checkpoint are ranges.

Names are tuples of length-prefixed parts, so no thread id, namespace, channel or task id can be mistaken for another.
"""

from __future__ import annotations

import asyncio
import builtins
import secrets
import struct
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import redis
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
    WRITES_IDX_MAP,
    BaseCheckpointSaver,
    ChannelVersions,
    Checkpoint,
    CheckpointMetadata,
    CheckpointTuple,
    PendingWrite,
    get_checkpoint_id,
    get_checkpoint_metadata,
    writes_sort_key,
)
from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from redis.client import Pipeline

from dlite_agent.errors import ConfigError, RecordError
from dlite_agent.sessions.client import require_binary, translated
from dlite_agent.sessions.keys import Keys, thread_hash, without_task_ids

_CHECKPOINT, _BLOB, _WRITE, _THREAD = b"c", b"b", b"w", b"t"
_EMPTY = b"empty"  # a channel version without a value
_AFTER_ALL = b"\xff"  # sorts after any length prefix and any UTF-8
_PAGE = 64


@dataclass(frozen=True, slots=True)
class _Thread:
    """A thread's two keys, and the id its tuples name."""

    thread_id: str
    data: str
    index: str


class RedisSaver(BaseCheckpointSaver[str]):
    """Keeps the checkpoints of LangGraph threads in Redis. Safe to share between threads and event loops.

    The async methods run the same code in worker threads. All methods raise StoreUnavailableError when the server does
    not answer, StoreFullError when it has no room and RecordError when stored data is damaged.
    """

    def __init__(
        self,
        client: redis.Redis,
        *,
        tenant: str = "default",
        ttl_s: int | None = None,
        serde: SerializerProtocol | None = None,
        allowed_types: Iterable[tuple[str, str] | type] = (),
    ) -> None:
        """Make a saver over a client.

        Args:
            client: A binary client (`decode_responses=False`).
            tenant: Tenants never see each other's threads.
            ttl_s: Seconds a thread lives after its last use; None keeps it until it is deleted.
            serde: Another serializer; the default writes msgpack and never pickle.
            allowed_types: Your own classes (or their module and name) that checkpoints may hold, beside LangChain's
                messages and plain data; any other is given back as plain data.

        Raises:
            ConfigError: If an argument cannot work.
        """
        require_binary(client)
        if ttl_s is not None and ttl_s < 1:
            raise ConfigError(f"ttl_s is {ttl_s}; expected at least one second, or None")
        allowed = tuple(allowed_types)
        super().__init__(
            serde=serde or JsonPlusSerializer(pickle_fallback=False, allowed_msgpack_modules=allowed or None)
        )
        self.client = client
        self.keys = Keys(tenant)
        self._ttl_s = ttl_s

    def get_next_version(self, current: str | int | float | None, channel: None) -> str:
        """Make a channel version that sorts after `current` and that no fork of the thread makes as well."""
        number = 0 if current is None else int(str(current).partition(".")[0])
        return f"{number + 1:032}.{secrets.randbelow(10**16):016}"

    def put(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """Store a checkpoint and the channels it changed, at once or not at all.

        Args:
            config: Names thread, namespace and, if any, the parent checkpoint.
            checkpoint: The checkpoint.
            metadata: Kept beside it.
            new_versions: Channels that changed, and their versions.

        Returns:
            The config that names the stored checkpoint.
        """
        thread, namespace = self._thread(config), _namespace(config)
        values = checkpoint["channel_values"]
        bare = {key: value for key, value in checkpoint.items() if key != "channel_values"}
        name = _checkpoint_name(namespace, checkpoint["id"])
        fields: dict[Any, Any] = {
            _blob_name(namespace, channel, version): self._dump(values[channel]) if channel in values else _EMPTY
            for channel, version in new_versions.items()
        }
        parent = _encode(get_checkpoint_id(config) or "")
        fields[name] = _join(parent, self._dump(bare), self._dump(get_checkpoint_metadata(config, metadata)))
        fields[_THREAD] = _encode(thread.thread_id)
        with translated("storing a checkpoint"):
            pipe = self.client.pipeline(transaction=True)
            pipe.hset(thread.data, mapping=fields)
            pipe.zadd(thread.index, {name: 0})
            self._extend(pipe, thread)
            pipe.execute()
        return _config(thread, namespace, checkpoint["id"])

    def put_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """Store what a task wrote after a checkpoint; repeating it changes nothing.

        Args:
            config: Names thread, namespace and checkpoint.
            writes: Pairs of channel and value.
            task_id: The task.
            task_path: Where the task is in the graph; decides the order of the writes.
        """
        thread, namespace = self._thread(config), _namespace(config)
        checkpoint_id = _where(config)["checkpoint_id"]
        prefix = _WRITE + _join(*map(_encode, (namespace, checkpoint_id, task_id)))
        with translated("storing a task's writes"):
            pipe = self.client.pipeline(transaction=True)
            for position, (channel, value) in enumerate(writes):
                index = WRITES_IDX_MAP.get(channel, position)
                name: Any = prefix + struct.pack(">i", index)
                record: Any = _join(_encode(channel), _encode(task_path), self._dump(value))
                if index < 0:  # errors, interrupts and resumes: the last one counts
                    pipe.hset(thread.data, name, record)
                else:
                    pipe.hsetnx(thread.data, name, record)
                pipe.zadd(thread.index, {name: 0})
            self._extend(pipe, thread)
            pipe.execute()

    def get_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """Read a checkpoint: the one the config names, or the newest of its thread and namespace.

        Args:
            config: Names thread, namespace and, if wanted, the checkpoint.

        Returns:
            The checkpoint, or None if there is none.
        """
        thread, namespace = self._thread(config), _namespace(config)
        wanted = get_checkpoint_id(config)
        if wanted:
            names = [_checkpoint_name(namespace, wanted)]
        else:
            names = self._names(thread, _CHECKPOINT + _join(_encode(namespace)), limit=1)
        return next(self._load(thread, names, only={}), None)

    def list(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> Iterator[CheckpointTuple]:
        """Read checkpoints, newest first.

        Args:
            config: Names a thread and, if wanted, a namespace and a checkpoint; None stands for all threads.
            filter: Metadata that must be equal.
            before: Names a checkpoint; only older ones are given.
            limit: Give at most so many.

        Yields:
            The checkpoints, thread by thread.
        """
        left = limit
        for thread in self._threads() if config is None else [self._thread(config)]:
            names = self._select(thread, config, before=get_checkpoint_id(before) if before else None)
            for start in range(0, len(names), _PAGE):
                for found in self._load(thread, names[start : start + _PAGE], only=filter or {}):
                    if left is not None and left <= 0:
                        return
                    left = None if left is None else left - 1
                    yield found

    def delete_thread(self, thread_id: str) -> None:
        """Remove all checkpoints and writes of a thread, in every namespace, at once.

        Args:
            thread_id: The thread; an unknown one is no error.
        """
        thread = self._named(thread_id)
        with translated("removing a thread"):
            self.client.unlink(thread.data, thread.index)

    async def aput(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """`put`, off the event loop."""
        return await asyncio.to_thread(self.put, config, checkpoint, metadata, new_versions)

    async def aput_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """`put_writes`, off the event loop."""
        await asyncio.to_thread(self.put_writes, config, writes, task_id, task_path)

    async def aget_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """`get_tuple`, off the event loop."""
        return await asyncio.to_thread(self.get_tuple, config)

    async def alist(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[CheckpointTuple]:
        """`list`, off the event loop."""
        found = self.list(config, filter=filter, before=before, limit=limit)
        while (item := await asyncio.to_thread(next, found, None)) is not None:
            yield item

    async def adelete_thread(self, thread_id: str) -> None:
        """`delete_thread`, off the event loop."""
        await asyncio.to_thread(self.delete_thread, thread_id)

    def _named(self, thread_id: str) -> _Thread:
        hashed = thread_hash(thread_id)
        return _Thread(thread_id, self.keys.checkpoint_data(hashed), self.keys.checkpoint_index(hashed))

    def _thread(self, config: RunnableConfig) -> _Thread:
        return self._named(str(_where(config)["thread_id"]))

    def _threads(self) -> Iterator[_Thread]:
        with translated("listing threads"):
            found = sorted(set(self.client.scan_iter(match=self.keys.checkpoints(), count=1000)))
        for key in found:
            with translated("listing threads"):
                name: Any = self.client.hget(key, cast(str, _THREAD))
            if name is not None:
                yield self._named(_decode(name))

    def _names(self, thread: _Thread, prefix: bytes, *, limit: int | None = None) -> builtins.list[bytes]:
        """List names that start with a prefix, last first."""
        with translated("listing checkpoints"):
            pipe = self.client.pipeline(transaction=True)
            bounds = (b"[" + prefix + _AFTER_ALL, b"[" + prefix)
            pipe.zrevrangebylex(thread.index, *bounds, start=0, num=-1 if limit is None else limit)
            pipe.exists(thread.data)
            pipe.exists(thread.index)
            names, has_data, has_index = pipe.execute()
        _check_whole(has_data, has_index)
        return cast(builtins.list[bytes], names)

    def _select(self, thread: _Thread, config: RunnableConfig | None, *, before: str | None) -> builtins.list[bytes]:
        """List the names of a thread's checkpoints that a config and a bound leave, newest first."""
        where = _where(config) if config else {}
        namespace = where.get("checkpoint_ns")
        prefix = _CHECKPOINT if namespace is None else _CHECKPOINT + _join(_encode(namespace))
        pairs = [(_checkpoint_id(name), name) for name in self._names(thread, prefix)]
        wanted = get_checkpoint_id(config) if config else None
        if wanted:
            pairs = [pair for pair in pairs if pair[0] == _encode(wanted)]
        if before:
            pairs = [pair for pair in pairs if pair[0] < _encode(before)]
        return [name for _, name in sorted(pairs, reverse=True)]

    def _load(self, thread: _Thread, names: Sequence[bytes], *, only: dict[str, Any]) -> Iterator[CheckpointTuple]:
        """Read the checkpoints of these names that exist and whose metadata holds what `only` holds."""
        if not names:
            return
        with translated("reading checkpoints"):
            pipe = self.client.pipeline(transaction=True)
            pipe.hmget(thread.data, cast(builtins.list[str], builtins.list(names)))
            for name in names:
                prefix = _WRITE + _join(*_checkpoint_parts(name))
                pipe.zrangebylex(thread.index, b"[" + prefix, b"[" + prefix + _AFTER_ALL)
            pipe.exists(thread.data)
            pipe.exists(thread.index)
            self._extend(pipe, thread)
            records, *rest = pipe.execute()
        _check_whole(rest[len(names)], rest[len(names) + 1])
        for name, record, writes in zip(names, records, rest[: len(names)], strict=True):
            if record is None:
                continue
            parent, checkpoint, metadata = _split(record, 3)
            known = self._parse(metadata)
            if all(known.get(key) == value for key, value in only.items()):
                bare = self._parse(checkpoint)
                yield self._assemble(thread, name, parent=parent, bare=bare, metadata=known, writes=writes)

    def _assemble(
        self,
        thread: _Thread,
        name: bytes,
        *,
        parent: bytes,
        bare: Any,
        metadata: CheckpointMetadata,
        writes: Sequence[bytes],
    ) -> CheckpointTuple:
        namespace, checkpoint_id = map(_decode, _checkpoint_parts(name))
        versions: ChannelVersions = bare["channel_versions"]
        fields: builtins.list[Any] = [_blob_name(namespace, channel, version) for channel, version in versions.items()]
        fields.extend(writes)
        with translated("reading a checkpoint's channels"):
            found: builtins.list[Any] = self.client.hmget(thread.data, fields) if fields else []
        blobs, records = found[: len(versions)], found[len(versions) :]
        values = {
            channel: self._parse(blob)
            for channel, blob in zip(versions, blobs, strict=True)
            if blob is not None and blob != _EMPTY
        }
        return CheckpointTuple(
            config=_config(thread, namespace, checkpoint_id),
            checkpoint=cast(Checkpoint, {**bare, "channel_values": values}),
            metadata=metadata,
            parent_config=_config(thread, namespace, _decode(parent)) if parent else None,
            pending_writes=self._parse_writes(writes, records),
        )

    def _parse_writes(self, names: Sequence[bytes], records: Sequence[bytes | None]) -> builtins.list[PendingWrite]:
        found: builtins.list[tuple[tuple[str, str, int], PendingWrite]] = []
        for name, record in zip(names, records, strict=True):
            if record is None:
                raise RecordError("a pending write is gone from its thread; delete the thread or restore it")
            task_id = _decode(_split(name[1:-4], 3)[2])
            channel, task_path, value = _split(record, 3)
            (index,) = struct.unpack(">i", name[-4:])
            key = writes_sort_key(_decode(task_path), task_id, index)
            found.append((key, (task_id, _decode(channel), self._parse(value))))
        return [write for _, write in sorted(found, key=lambda pair: pair[0])]

    def _dump(self, value: Any) -> bytes:
        kind, data = self.serde.dumps_typed(value)
        return _join(kind.encode(), data)

    def _parse(self, record: bytes) -> Any:
        kind, data = _split(record, 2)
        try:
            return self.serde.loads_typed((kind.decode(), data))
        except (NotImplementedError, ValueError) as error:
            raise RecordError(f"a checkpoint of type {kind!r} cannot be read: {error}") from error

    def _extend(self, pipe: Pipeline, thread: _Thread) -> None:
        if self._ttl_s is not None:
            pipe.expire(thread.data, self._ttl_s)
            pipe.expire(thread.index, self._ttl_s)


def thread_of_record(record: bytes) -> str:
    """Read the thread id that a thread's data key holds in its field `t`.

    Raises:
        RecordError: If it is damaged.
    """
    try:
        return _decode(record)
    except ValueError as error:
        raise RecordError(f"a thread's name cannot be read: {error}") from error


def namespace_of_name(name: bytes) -> str:
    """Read a checkpoint's namespace, without per-step task ids, from its name in a thread's index.

    Raises:
        RecordError: If it is damaged.
    """
    try:
        namespace = _decode(_checkpoint_parts(name)[0])
    except (ValueError, struct.error) as error:
        raise RecordError(f"a checkpoint's name cannot be read: {error}") from error
    return without_task_ids(namespace)


def _where(config: RunnableConfig) -> dict[str, Any]:
    return config.get("configurable", {})


def _namespace(config: RunnableConfig) -> str:
    return str(_where(config).get("checkpoint_ns", ""))


def _config(thread: _Thread, namespace: str, checkpoint_id: str) -> RunnableConfig:
    where = {"thread_id": thread.thread_id, "checkpoint_ns": namespace, "checkpoint_id": checkpoint_id}
    return {"configurable": where}


def _check_whole(has_data: int, has_index: int) -> None:
    if bool(has_data) != bool(has_index):
        raise RecordError(
            "half of a thread is gone from Redis; delete the thread or restore it, and use a volatile-* eviction policy"
        )


def _checkpoint_name(namespace: str, checkpoint_id: str) -> bytes:
    """Name a checkpoint so that those of one namespace sort by id: the id comes last, without its length."""
    return _CHECKPOINT + _join(_encode(namespace)) + _encode(checkpoint_id)


def _checkpoint_parts(name: bytes) -> tuple[bytes, bytes]:
    (size,) = struct.unpack_from(">I", name, 1)
    return name[5 : 5 + size], name[5 + size :]


def _checkpoint_id(name: bytes) -> bytes:
    return _checkpoint_parts(name)[1]


def _blob_name(namespace: str, channel: str, version: str | int | float) -> bytes:
    return _BLOB + _join(_encode(namespace), _encode(channel), type(version).__name__.encode(), _encode(str(version)))


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _decode(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def _join(*parts: bytes) -> bytes:
    return b"".join(piece for part in parts for piece in (struct.pack(">I", len(part)), part))


def _split(data: bytes, num_parts: int) -> builtins.list[bytes]:
    parts: builtins.list[bytes] = []
    start = 0
    while start + 4 <= len(data):
        (size,) = struct.unpack_from(">I", data, start)
        parts.append(data[start + 4 : start + 4 + size])
        start += 4 + size
    if start != len(data) or len(parts) != num_parts:
        raise RecordError(f"a stored checkpoint has {len(parts)} parts in {len(data)} bytes; expected {num_parts}")
    return parts

"""LangGraph checkpoints in plain Redis: no modules, no pickle, and an outage is an error, never a fresh thread.

`threads` says how a thread lies in Redis; here its records are made and read.
"""

from __future__ import annotations

import builtins
import secrets
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
    WRITES_IDX_MAP,
    ChannelVersions,
    Checkpoint,
    CheckpointMetadata,
    CheckpointTuple,
    PendingWrite,
    get_checkpoint_metadata,
    writes_sort_key,
)
from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer

from dlite_agent.errors import ConfigError, RecordError, UnstorableValueError
from dlite_agent.sessions.client import RedisClient, check_ttl, require_binary, translated
from dlite_agent.sessions.configs import checkpoint_id_of, config_of, named_in, namespace_of, where
from dlite_agent.sessions.keys import Keys
from dlite_agent.sessions.pruning import all_but_latest, copy_records, of_runs, remove_checkpoints
from dlite_agent.sessions.threaded import ThreadedSaver
from dlite_agent.sessions.threads import (
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
    join,
    split,
    write_name,
    write_parts,
)

_AFTER_ALL = b"\xff"  # sorts after any length prefix and any UTF-8
_PAGE = 64


class RedisSaver(ThreadedSaver):
    """Keeps the checkpoints of LangGraph threads in Redis. Safe to share between threads and event loops.

    The async methods run the same code in worker threads. All methods raise StoreUnavailableError when the server does
    not answer, StoreFullError when it has no room, RecordError when stored data is damaged, UnstorableValueError
    when a value has no form that can be stored, and ConfigError when a config lacks what it must name.
    """

    def __init__(
        self,
        client: RedisClient,
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
        if ttl_s is not None:
            check_ttl(ttl_s)
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
        thread, namespace = self._thread(config), namespace_of(config)
        values = checkpoint["channel_values"]
        bare = {key: value for key, value in checkpoint.items() if key != "channel_values"}
        name = checkpoint_name(namespace, checkpoint["id"])
        fields: dict[Any, Any] = {
            blob_name(namespace, channel, version): self._dump(channel, values[channel]) if channel in values else EMPTY
            for channel, version in new_versions.items()
        }
        parent = encode(checkpoint_id_of(config) or "")
        described = get_checkpoint_metadata(config, metadata)
        fields[name] = join(parent, self._dump("checkpoint", bare), self._dump("metadata", described))
        fields[THREAD] = encode(thread.thread_id)
        with translated("storing a checkpoint"):
            pipe = self.client.pipeline(transaction=True)
            pipe.hset(thread.data, mapping=fields)
            pipe.zadd(thread.index, {name: 0})
            self._extend(pipe, thread)
            pipe.execute()
        return config_of(thread, namespace, checkpoint["id"])

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
        thread, namespace = self._thread(config), namespace_of(config)
        checkpoint_id = str(named_in(config, "checkpoint_id"))
        with translated("storing a task's writes"):
            pipe = self.client.pipeline(transaction=True)
            for position, (channel, value) in enumerate(writes):
                index = WRITES_IDX_MAP.get(channel, position)
                name: Any = write_name(namespace, checkpoint_id, task_id, index)
                record: Any = join(encode(channel), encode(task_path), self._dump(channel, value))
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
        thread, namespace = self._thread(config), namespace_of(config)
        wanted = checkpoint_id_of(config)
        if wanted:
            names = [checkpoint_name(namespace, wanted)]
        else:
            names = self._names(thread, CHECKPOINT + join(encode(namespace)), limit=1)
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
            names = self._select(thread, config, before=checkpoint_id_of(before) if before else None)
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
        thread = Thread.named(thread_id, self.keys)
        with translated("removing a thread"):
            self.client.unlink(thread.data, thread.index)

    def delete_for_runs(self, run_ids: Sequence[str]) -> None:
        """Remove the checkpoints whose metadata name one of these runs as `run_id`, and their writes, in every thread.

        Reads all checkpoints of the tenant. A thread that goes on from a removed checkpoint loses the history of its
        `DeltaChannel`s before it.

        Args:
            run_ids: The runs; an unknown one is no error.
        """
        if run_ids:
            for thread in self._threads():
                remove_checkpoints(self.client, thread, of_runs(run_ids), parse=self._parse)

    def copy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """Add all checkpoints and writes of a thread, in every namespace, to another one.

        Args:
            source_thread_id: Where from; an unknown thread changes nothing.
            target_thread_id: Where to.
        """
        source, target = (Thread.named(name, self.keys) for name in (source_thread_id, target_thread_id))
        copy_records(self.client, source, target, ttl_s=self._ttl_s)

    def prune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        """Remove the history of threads. A run that goes on from an older checkpoint must have ended.

        Args:
            thread_ids: The threads; an unknown one is no error.
            strategy: "keep_latest" leaves the newest checkpoint of each namespace, and those that its `DeltaChannel`s
                are replayed from; "delete" leaves nothing.

        Raises:
            ConfigError: If there is no such strategy.
        """
        if strategy not in ("keep_latest", "delete"):
            raise ConfigError(f"strategy is {strategy!r}; expected keep_latest or delete")
        for thread_id in thread_ids:
            if strategy == "delete":
                self.delete_thread(thread_id)
            else:
                thread = Thread.named(thread_id, self.keys)
                remove_checkpoints(self.client, thread, all_but_latest, parse=self._parse)

    def _thread(self, config: RunnableConfig) -> Thread:
        return Thread.named(named_in(config, "thread_id"), self.keys)

    def _threads(self) -> Iterator[Thread]:
        with translated("listing threads"):
            found = sorted(set(self.client.scan_iter(match=self.keys.checkpoints(), count=1000)))
        for key in found:
            with translated("listing threads"):
                name: Any = self.client.hget(key, cast(str, THREAD))
            if name is not None:
                yield Thread.named(decode(name), self.keys)

    def _names(self, thread: Thread, prefix: bytes, *, limit: int | None = None) -> builtins.list[bytes]:
        """List names that start with a prefix, last first."""
        with translated("listing checkpoints"):
            pipe = self.client.pipeline(transaction=True)
            bounds = (b"[" + prefix + _AFTER_ALL, b"[" + prefix)
            pipe.zrevrangebylex(thread.index, *bounds, start=0, num=-1 if limit is None else limit)
            pipe.exists(thread.data)
            pipe.exists(thread.index)
            names, has_data, has_index = pipe.execute()
        check_whole(has_data, has_index)
        return cast(builtins.list[bytes], names)

    def _select(self, thread: Thread, config: RunnableConfig | None, *, before: str | None) -> builtins.list[bytes]:
        """List the names of a thread's checkpoints that a config and a bound leave, newest first."""
        namespace = where(config).get("checkpoint_ns") if config else None
        prefix = CHECKPOINT if namespace is None else CHECKPOINT + join(encode(namespace))
        pairs = [(checkpoint_parts(name)[1], name) for name in self._names(thread, prefix)]
        wanted = checkpoint_id_of(config) if config else None
        if wanted:
            pairs = [pair for pair in pairs if pair[0] == encode(wanted)]
        if before:
            pairs = [pair for pair in pairs if pair[0] < encode(before)]
        return [name for _, name in sorted(pairs, reverse=True)]

    def _load(self, thread: Thread, names: Sequence[bytes], *, only: dict[str, Any]) -> Iterator[CheckpointTuple]:
        """Read the checkpoints of these names that exist and whose metadata holds what `only` holds."""
        if not names:
            return
        with translated("reading checkpoints"):
            pipe = self.client.pipeline(transaction=True)
            pipe.hmget(thread.data, cast(builtins.list[str], builtins.list(names)))
            for name in names:
                prefix = WRITE + join(*checkpoint_parts(name))
                pipe.zrangebylex(thread.index, b"[" + prefix, b"[" + prefix + _AFTER_ALL)
            pipe.exists(thread.data)
            pipe.exists(thread.index)
            self._extend(pipe, thread)
            records, *rest = pipe.execute()
        check_whole(rest[len(names)], rest[len(names) + 1])
        for name, record, writes in zip(names, records, rest[: len(names)], strict=True):
            if record is None:
                continue
            parent, checkpoint, metadata = split(record, 3)
            known = as_mapping(self._parse(metadata), "metadata")
            if all(known.get(key) == value for key, value in only.items()):
                bare = self._parse(checkpoint)
                found = self._assemble(thread, name, parent=parent, bare=bare, metadata=known, writes=writes)
                if found is not None:
                    yield found

    def _assemble(
        self,
        thread: Thread,
        name: bytes,
        *,
        parent: bytes,
        bare: Any,
        metadata: dict[str, Any],
        writes: Sequence[bytes],
    ) -> CheckpointTuple | None:
        """Read what belongs to a checkpoint; None if the checkpoint has been removed since it was read."""
        namespace, checkpoint_id = map(decode, checkpoint_parts(name))
        versions = channel_versions(bare)
        fields: builtins.list[Any] = [blob_name(namespace, channel, version) for channel, version in versions.items()]
        fields += [*writes, name]
        with translated("reading a checkpoint's channels"):
            *found, still_there = self.client.hmget(thread.data, fields)
        if still_there is None:
            return None
        blobs: Any = found[: len(versions)]
        records: Any = found[len(versions) :]
        values = {
            channel: self._parse(blob)
            for channel, blob in zip(versions, blobs, strict=True)
            if blob is not None and blob != EMPTY
        }
        return CheckpointTuple(
            config=config_of(thread, namespace, checkpoint_id),
            checkpoint=cast(Checkpoint, {**bare, "channel_values": values}),
            metadata=cast(CheckpointMetadata, metadata),
            parent_config=config_of(thread, namespace, decode(parent)) if parent else None,
            pending_writes=self._parse_writes(writes, records),
        )

    def _parse_writes(self, names: Sequence[bytes], records: Sequence[bytes | None]) -> builtins.list[PendingWrite]:
        found: builtins.list[tuple[tuple[str, str, int], PendingWrite]] = []
        for name, record in zip(names, records, strict=True):
            if record is None:
                raise RecordError("a pending write is gone from its thread; delete the thread or restore it")
            *_, task_id, index = write_parts(name)
            channel, task_path, value = split(record, 3)
            key = writes_sort_key(decode(task_path), decode(task_id), index)
            found.append((key, (decode(task_id), decode(channel), self._parse(value))))
        return [write for _, write in sorted(found, key=lambda pair: pair[0])]

    def _dump(self, channel: str, value: Any) -> bytes:
        try:
            kind, data = self.serde.dumps_typed(value)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise UnstorableValueError(
                f"{channel!r} cannot be stored ({error}); keep plain data in the state, or give the saver a serde"
            ) from error
        return join(kind.encode(), data)

    def _parse(self, record: bytes) -> Any:
        kind, data = split(record, 2)
        try:
            return self.serde.loads_typed((kind.decode(), data))
        except (NotImplementedError, ValueError) as error:
            raise RecordError(f"a checkpoint of type {kind!r} cannot be read: {error}") from error

    def _extend(self, pipe: Any, thread: Thread) -> None:
        if self._ttl_s is not None:
            pipe.expire(thread.data, self._ttl_s)
            pipe.expire(thread.index, self._ttl_s)

"""The session store: immutable KV blocks and snapshots, and one small mutable head per session, in Redis.

Why this shape: a commit first writes things nobody refers to yet (blocks, pivot row, snapshot), then moves the head in
one atomic compare-and-set. A crash at any point leaves the session at its last commit and, at worst, some records that
expire. Whatever is missing, damaged or foreign when read is a miss: the caller prefills those tokens again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from dlite_agent.errors import RecordError, StoreFullError, StoreUnavailableError
from dlite_agent.sessions.client import RedisClient, check_ttl, require_binary, translated
from dlite_agent.sessions.codecs import CodecName
from dlite_agent.sessions.counters import Counters
from dlite_agent.sessions.heads import CommitStatus, Heads, Lease
from dlite_agent.sessions.keys import Keys, SessionName, fingerprint_hash, is_snapshot_id
from dlite_agent.sessions.reading import RecordReader
from dlite_agent.sessions.record_codec import RecordCodec
from dlite_agent.sessions.records import Block, SideRow, Snapshot
from dlite_agent.sessions.writing import RecordWriter, Write

DEFAULT_TTL_S = 7 * 24 * 3600
BLOCK_TTL_FACTOR = 2
"""Blocks outlive the sessions that point at them by this factor."""

_SCAN_COUNT = 1000


@dataclass(frozen=True, slots=True)
class CommitReport:
    """What a commit did.

    Attributes:
        status: "committed", "duplicate" (this very commit had been made; its answer was lost) or "sibling" (the head
            had moved or was gone: the snapshot is stored and readable, the head was left alone; acquire again).
        snapshot_id: Id of the snapshot.
        lease: The lease for the next commit.
        bytes_written: Bytes of blocks and snapshots that were not there before, and of the pivot row.
        blocks_written: Blocks that were not there before.
        blocks_shared: Blocks that were given but were there already.
        blocks_missing: Chains the snapshot refers to that were neither given nor there any more.
    """

    status: CommitStatus
    snapshot_id: str
    lease: Lease
    bytes_written: int
    blocks_written: int
    blocks_shared: int
    blocks_missing: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class KindUsage:
    """Keys of one kind: how many, and how many bytes of the server's memory."""

    num_keys: int
    num_bytes: int


class SessionStore:
    """Keeps sessions of one tenant in Redis. Safe to share between threads.

    Every method raises StoreUnavailableError when the server does not answer and StoreFullError when it has no room;
    nothing is reported as absent because of an error.
    """

    def __init__(
        self,
        client: RedisClient,
        *,
        tenant: str = "default",
        secret: bytes = b"",
        ttl_s: int = DEFAULT_TTL_S,
        codec: CodecName = "raw",
    ) -> None:
        """Make a store over a client.

        Args:
            client: A binary client (`decode_responses=False`).
            tenant: Tenants never see each other's sessions or blocks.
            secret: Keys chains and seals, at most 64 bytes; b"" leaves them unkeyed.
            ttl_s: Seconds a session lives after its last use; its blocks live twice as long.
            codec: How blocks are written: "raw", or "zstd" for about 15 % (float32) or 30 % (bfloat16) less memory and
                slower commits and restores. Stores of one tenant may differ in it.

        Raises:
            ConfigError: If an argument cannot work.
            MissingDependencyError: If the codec's library is not installed.
        """
        require_binary(client)
        check_ttl(ttl_s)
        self.client = client
        self.keys = Keys(tenant)
        self.codec = RecordCodec(secret, codec)
        self.counters = Counters()
        self.ttl_s = ttl_s
        self.block_ttl_s = ttl_s * BLOCK_TTL_FACTOR
        self.writer = RecordWriter(client)
        self._reader = RecordReader(client, counters=self.counters, damaged=self.writer.damaged)
        self._heads = Heads(client, self.keys, ttl_s=ttl_s, counters=self.counters)

    def acquire(self, sid: str, *, name: SessionName | None = None) -> Lease:
        """Take a session over; every earlier lease is stale from now on.

        Args:
            sid: A `session_id`.
            name: What people call it, kept in the head for `dlite-agent sessions`; None leaves the head's as it is.

        Returns:
            The lease, with the snapshot the session is at (None if it is new).
        """
        return self._heads.acquire(sid, name)

    def head(self, sid: str) -> Lease | None:
        """Look at a session without taking it over.

        Args:
            sid: A `session_id`.

        Returns:
            Its present fence, version and snapshot, or None if there is no such session or its head is damaged.
        """
        return self._heads.look(sid)

    def get_snapshot(self, sid: str, snapshot_id: str) -> Snapshot | None:
        """Read a snapshot and extend its life.

        Args:
            sid: A `session_id`.
            snapshot_id: From a head, a report or a message's metadata; a text that is no snapshot id is a miss.

        Returns:
            The snapshot, or None if it is missing, damaged or foreign (see `counters`).
        """
        if not is_snapshot_id(snapshot_id):
            self.counters.add(misses=1)
            return None
        unpack = partial(self.codec.unpack_snapshot, snapshot_id=snapshot_id)
        return self._reader.read(self.keys.snapshot(sid, snapshot_id), ttl_s=self.ttl_s, unpack=unpack)

    def get_blocks(self, fingerprint: str, chains: Sequence[bytes]) -> Iterator[Block | None]:
        """Read blocks, in order and a few at a time, and extend their lives.

        A restore uses the blocks up to the first None and prefills the rest.

        Args:
            fingerprint: The target they must be of.
            chains: Their chain hashes.

        Yields:
            A block, or None where it is missing, damaged or foreign (see `counters`).
        """
        target = fingerprint_hash(fingerprint)
        keys = [self.keys.block(target, chain) for chain in chains]

        def unpack(index: int, record: bytes) -> Block:
            return self.codec.unpack_block(record, fingerprint=target, chain=chains[index])

        return self._reader.stream(keys, ttl_s=self.block_ttl_s, unpack=unpack)

    def reject_block(self, fingerprint: str, chain: bytes) -> None:
        """Say that a block, sound as it is, cannot be used; it counts as foreign, and the next commit replaces it.

        Args:
            fingerprint: The target it was to be of.
            chain: Its chain hash.
        """
        self._reader.reject(self.keys.block(fingerprint_hash(fingerprint), chain))

    def get_pivot(self, fingerprint: str, chain: bytes, position: int) -> SideRow | None:
        """Read the hidden row at the end of a block and extend its life.

        Args:
            fingerprint: The target it must be of.
            chain: Chain hash of the block that ends at the position.
            position: The row's position in the sequence.

        Returns:
            The row, or None if it is missing, damaged or foreign (see `counters`).
        """
        key = self.keys.side(fingerprint_hash(fingerprint), chain, position)
        unpack = partial(self.codec.unpack_side, fingerprint=fingerprint, chain=chain, position=position)
        return self._reader.read(key, ttl_s=self.block_ttl_s, unpack=unpack)

    def commit(
        self, lease: Lease, snapshot: Snapshot, *, blocks: Sequence[Block] = (), pivot: SideRow | None = None
    ) -> CommitReport:
        """Store what a turn added, then move the head to it.

        The order is what makes a crash harmless: blocks, pivot row, snapshot, and only then the head. A commit whose
        answer was lost may be repeated with the same arguments. Blocks that reads found damaged are written anew.

        Args:
            lease: From `acquire` or from the report of the commit before.
            snapshot: What the session is now.
            blocks: The blocks of it that are new; one that is there already is sent, but not stored again.
            pivot: The hidden row at `num_kv - 1`, if `snapshot.pivot`.

        Returns:
            What was done; see `CommitReport`.

        Raises:
            FencedError: If another worker has acquired the session. The snapshot is stored and readable, the head is
                the other's.
            RecordError: If the snapshot does not fit its ids, the blocks or the pivot, or is too large.
        """
        self._check_commit(snapshot, blocks=blocks, pivot=pivot)
        try:
            return self._commit_checked(lease, snapshot, blocks=blocks, pivot=pivot)
        except (StoreUnavailableError, StoreFullError):
            self.counters.add(failed=1)
            raise

    def touch(self, sid: str, snapshot: Snapshot) -> None:
        """Extend the lives of a session, one of its snapshots and everything that refers to.

        Args:
            sid: A `session_id`.
            snapshot: The snapshot in use.
        """
        target = fingerprint_hash(snapshot.fingerprint)
        blocks = [self.keys.block(target, ref.chain) for ref in snapshot.blocks]
        if snapshot.pivot:
            blocks.append(self.keys.side(target, snapshot.blocks[-1].chain, snapshot.num_kv - 1))
        self.writer.expire(blocks, self.block_ttl_s)
        self.writer.expire([self.keys.snapshot(sid, snapshot.snapshot_id), self.keys.head(sid)], self.ttl_s)

    def delete_session(self, sid: str) -> int:
        """Remove a session's head and snapshots at once.

        Blocks may be shared with other sessions: they expire. A worker that still holds a lease cannot bring the
        session back, its commits become siblings.

        Args:
            sid: A `session_id`.

        Returns:
            The number of keys removed.
        """
        with translated("removing a session"):
            removed = self.client.unlink(self.keys.head(sid))
            for key in self.client.scan_iter(match=self.keys.snapshots(sid), count=_SCAN_COUNT):
                removed += self.client.unlink(key)
        return removed

    def usage(self) -> dict[str, KindUsage]:
        """Measure all of the tenant's keys, LangGraph checkpoints included.

        Returns:
            Number of keys and bytes of server memory per kind; kinds are `keys.KINDS`, or "unknown".
        """
        with translated("measuring usage"):
            found = list(set(self.client.scan_iter(match=self.keys.everything(), count=_SCAN_COUNT)))
            usage: dict[str, KindUsage] = {}
            for start in range(0, len(found), _SCAN_COUNT):
                some = found[start : start + _SCAN_COUNT]
                pipe = self.client.pipeline(transaction=False)
                for key in some:
                    pipe.memory_usage(key, samples=0)
                for key, size in zip(some, pipe.execute(), strict=True):
                    old = usage.get(self.keys.kind(key), KindUsage(0, 0))
                    usage[self.keys.kind(key)] = KindUsage(old.num_keys + 1, old.num_bytes + (size or 0))
        return usage

    def _commit_checked(
        self, lease: Lease, snapshot: Snapshot, *, blocks: Sequence[Block], pivot: SideRow | None
    ) -> CommitReport:
        snapshot_id = snapshot.snapshot_id
        record = self.codec.pack_snapshot(snapshot)
        sizes = self.writer.write(self._block_writes(snapshot.fingerprint, blocks), self.block_ttl_s)
        missing = self._keep_blocks(snapshot, {block.chain for block in blocks})
        num_bytes = sum(sizes)
        num_bytes += sum(self.writer.write(self._pivot_writes(snapshot.fingerprint, pivot), self.block_ttl_s))
        num_bytes += sum(self.writer.write([Write(self.keys.snapshot(lease.sid, snapshot_id), record)], self.ttl_s))
        self.counters.add(bytes_written=num_bytes)
        status, next_lease = self._heads.move(lease, snapshot_id)
        return CommitReport(
            status=status,
            snapshot_id=snapshot_id,
            lease=next_lease,
            bytes_written=num_bytes,
            blocks_written=sum(1 for size in sizes if size),
            blocks_shared=sizes.count(0),
            blocks_missing=missing,
        )

    def _check_commit(self, snapshot: Snapshot, *, blocks: Sequence[Block], pivot: SideRow | None) -> None:
        self.codec.check_chain(snapshot)
        refs = set(snapshot.blocks)
        for block in blocks:
            if block.ref() not in refs:
                raise RecordError(f"block {block.chain.hex()[:16]} is not in the snapshot; expected its ref() there")
        if snapshot.pivot != (pivot is not None):
            raise RecordError(f"the snapshot says pivot={snapshot.pivot}; expected a row exactly if it is True")
        if pivot and (pivot.chain, pivot.position) != (snapshot.blocks[-1].chain, snapshot.num_kv - 1):
            raise RecordError(f"the pivot row is of position {pivot.position}; expected {snapshot.num_kv - 1}")

    def _keep_blocks(self, snapshot: Snapshot, given: set[bytes]) -> tuple[bytes, ...]:
        """Extend the lives of the blocks that are not being written; return the chains that are gone or damaged."""
        chains = [ref.chain for ref in snapshot.blocks if ref.chain not in given]
        target = fingerprint_hash(snapshot.fingerprint)
        keys = [self.keys.block(target, chain) for chain in chains]
        there = self.writer.expire(keys, self.block_ttl_s)
        return tuple(
            chain
            for chain, key, is_there in zip(chains, keys, there, strict=True)
            if not is_there or key in self.writer.damaged
        )

    def _block_writes(self, fingerprint: str, blocks: Sequence[Block]) -> Iterator[Write]:
        target = fingerprint_hash(fingerprint)
        for block in blocks:
            record = self.codec.pack_block(fingerprint, block)
            yield Write(self.keys.block(target, block.chain), record)

    def _pivot_writes(self, fingerprint: str, pivot: SideRow | None) -> Iterator[Write]:
        if pivot is not None:
            key = self.keys.side(fingerprint_hash(fingerprint), pivot.chain, pivot.position)
            # replaces: a drafter that looks at other layers needs another row of the same position
            yield Write(key, self.codec.pack_side(fingerprint, pivot), replaces=True)

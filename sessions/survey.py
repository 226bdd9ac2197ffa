"""A look at everything one tenant keeps, that changes nothing: reading here extends no life.

Commands for people and scripts start from a survey: which records there are, and which snapshot refers to which.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from dlite_agent.errors import RecordError
from dlite_agent.sessions.client import check_replies, is_wrong_type, translated
from dlite_agent.sessions.keys import KeyParts, SessionName, fingerprint_hash
from dlite_agent.sessions.records import Snapshot
from dlite_agent.sessions.store import SessionStore

_SCAN_COUNT = 1000
_READ_KEYS = 64
_HEAD_FIELDS = ("version", "fence", "snapshot", "thread", "namespace")


@dataclass(frozen=True, slots=True)
class Head:
    """What a session's head holds.

    Attributes:
        version: Number of commits.
        fence: Number of acquisitions.
        snapshot_id: The snapshot the session is at, or None if nothing was committed.
        name: What people call the session, its end cut off if it is long; None if a head does not say.
        expires_s: Seconds it lives on unless it is used; None if it does not expire.
    """

    version: int
    fence: int
    snapshot_id: str | None
    name: SessionName | None
    expires_s: int | None


@dataclass(frozen=True, slots=True)
class SnapshotFacts:
    """A snapshot without its token ids.

    Attributes:
        parent: Id of the snapshot it continues, or None.
        target: `fingerprint_hash` of its target.
        num_tokens: Tokens of the session then.
        num_kv: Leading tokens that have KV rows.
        created_at: Seconds since 1970.
        blocks: Keys of its blocks, in order.
        side: Key of its pivot row, or None.
        block_tokens: Tokens of each block.
    """

    parent: str | None
    target: bytes
    num_tokens: int
    num_kv: int
    created_at: float
    blocks: tuple[str, ...] = field(repr=False)
    side: str | None
    block_tokens: tuple[int, ...] = field(repr=False)

    @property
    def records(self) -> tuple[str, ...]:
        """Keys of everything it refers to."""
        return self.blocks if self.side is None else (*self.blocks, self.side)


@dataclass(slots=True)
class Survey:
    """What a tenant keeps.

    Attributes:
        sizes: Bytes of server memory of every key of this package.
        parts: What each of those keys says.
        unknown: Keys under the tenant's prefix that this package never writes.
        heads: Head of each session; None if it cannot be read.
        snapshots: Snapshots of each session by id; None for one that cannot be read.
        problems: Why those cannot be read, by key.
    """

    sizes: dict[str, int] = field(default_factory=dict)
    parts: dict[str, KeyParts] = field(default_factory=dict)
    unknown: list[bytes] = field(default_factory=list)
    heads: dict[str, Head | None] = field(default_factory=dict)
    snapshots: dict[str, dict[str, SnapshotFacts | None]] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)

    def keys_of(self, *kinds: str) -> list[str]:
        """List the keys of some kinds."""
        return [key for key, parts in self.parts.items() if parts.kind in kinds]


def survey(store: SessionStore) -> Survey:
    """Look at everything the store's tenant keeps.

    Args:
        store: Says server, tenant and secret.

    Returns:
        What there is. Damaged records are in it, as problems; blocks and pivot rows are not read.

    Raises:
        StoreUnavailableError: If the server does not answer.
    """
    seen = Survey()
    with translated("listing records"):
        found = set(store.client.scan_iter(match=store.keys.everything(), count=_SCAN_COUNT))
    for key in sorted(found):
        parts = store.keys.parse(key)
        if parts.kind == "unknown":
            seen.unknown.append(key)
        else:
            seen.parts[key.decode()] = parts
    _measure(store, seen)
    _read_heads(store, seen)
    _read_snapshots(store, seen)
    return seen


def peek(store: SessionStore, keys: Sequence[str]) -> list[bytes | RecordError | None]:
    """Read records without extending their lives.

    Args:
        store: Says where.
        keys: Their keys.

    Returns:
        For each its bytes, None if it is gone, or an error if the key holds something else.

    Raises:
        StoreUnavailableError: If the server does not answer.
    """
    with translated("reading records"):
        pipe = store.client.pipeline(transaction=False)
        for key in keys:
            pipe.get(key)
        replies = pipe.execute(raise_on_error=False)
        check_replies([reply for reply in replies if not is_wrong_type(reply)])
    return [RecordError("the key holds no string") if is_wrong_type(reply) else reply for reply in replies]


def facts_of(store: SessionStore, snapshot: Snapshot) -> SnapshotFacts:
    """Reduce a snapshot to what a survey keeps of it."""
    target = fingerprint_hash(snapshot.fingerprint)
    side = None
    if snapshot.pivot:
        side = store.keys.side(target, snapshot.blocks[-1].chain, snapshot.num_kv - 1)
    return SnapshotFacts(
        parent=snapshot.parent,
        target=target,
        num_tokens=snapshot.num_tokens,
        num_kv=snapshot.num_kv,
        created_at=snapshot.created_at,
        blocks=tuple(store.keys.block(target, ref.chain) for ref in snapshot.blocks),
        side=side,
        block_tokens=tuple(ref.num_tokens for ref in snapshot.blocks),
    )


def batches(keys: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    """Cut keys into runs of at most `size`."""
    for start in range(0, len(keys), size):
        yield keys[start : start + size]


def _measure(store: SessionStore, seen: Survey) -> None:
    for keys in batches(list(seen.parts), _SCAN_COUNT):
        with translated("measuring records"):
            pipe = store.client.pipeline(transaction=False)
            for key in keys:
                pipe.memory_usage(key, samples=0)
            sizes = pipe.execute()
        for key, size in zip(keys, sizes, strict=True):
            if size is None:  # gone since it was listed
                del seen.parts[key]
            else:
                seen.sizes[key] = size


def _read_heads(store: SessionStore, seen: Survey) -> None:
    for keys in batches(seen.keys_of("head"), _SCAN_COUNT):
        with translated("reading heads"):
            pipe = store.client.pipeline(transaction=False)
            for key in keys:
                pipe.hmget(key, list(_HEAD_FIELDS))
                pipe.ttl(key)
            replies = pipe.execute(raise_on_error=False)
            check_replies([reply for reply in replies if not is_wrong_type(reply)])
        for key, fields, ttl in zip(keys, replies[::2], replies[1::2], strict=True):
            sid = seen.parts[key].sid
            try:
                seen.heads[sid] = _parse_head(fields, ttl)
            except RecordError as error:
                seen.heads[sid] = None
                seen.problems[key] = str(error)


def _parse_head(fields: object, ttl: int) -> Head:
    if not isinstance(fields, list):
        raise RecordError("the key holds no hash")
    version, fence, snapshot_id, thread, namespace = fields
    try:
        name = None
        if thread is not None:
            name = SessionName(_text(thread), _text(namespace or b""))
        return Head(
            version=int(version or 0),
            fence=int(fence or 0),
            snapshot_id=None if snapshot_id is None else snapshot_id.decode("ascii"),
            name=name,
            expires_s=ttl if ttl >= 0 else None,
        )
    except ValueError as error:
        raise RecordError(f"the head cannot be parsed: {error}") from error


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def _read_snapshots(store: SessionStore, seen: Survey) -> None:
    for keys in batches(seen.keys_of("snapshot"), _READ_KEYS):
        for key, record in zip(keys, peek(store, keys), strict=True):
            if record is None:
                continue
            parts = seen.parts[key]
            of_session = seen.snapshots.setdefault(parts.sid, {})
            try:
                if isinstance(record, RecordError):
                    raise record
                snapshot = store.codec.unpack_snapshot(record, snapshot_id=parts.snapshot_id)
                of_session[parts.snapshot_id] = facts_of(store, snapshot)
            except RecordError as error:
                of_session[parts.snapshot_id] = None
                seen.problems[key] = str(error)

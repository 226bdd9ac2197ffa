"""Sessions as people see them: under their thread's name, with size, age and what they share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from dlite_agent.errors import RecordError, UnknownSessionError
from dlite_agent.sessions.client import translated
from dlite_agent.sessions.keys import SessionName
from dlite_agent.sessions.store import SessionStore
from dlite_agent.sessions.survey import SnapshotFacts, Survey, survey
from dlite_agent.sessions.threads import decode, namespace_of_name

_AGENT_NODES = ("", "model", "agent")
"""Nodes in which LangChain's agents call their model; they are part of the namespace of such a call."""


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """One session.

    Attributes:
        sid: Its `session_id`.
        name: What people call it, or None if neither its head nor a `RedisSaver` checkpoint says.
        has_head: Whether it can be gone on with; its snapshots may outlive its head for a while.
        num_turns: Commits its head has seen.
        snapshot_id: The snapshot it is at, or None.
        target: `fingerprint_hash` of that snapshot's target, in hex, or None.
        num_tokens: Tokens of that snapshot.
        num_snapshots: Snapshots there are.
        created_at: When the oldest of them was made, seconds since 1970, or None.
        last_turn_at: When the head's was made, or None.
        expires_s: Seconds until the head expires unless it is used, or None.
        num_blocks: KV blocks its snapshots refer to that are there.
        num_shared: Those of them that other sessions refer to as well.
        num_missing: Records its snapshots refer to that are gone.
        num_bytes: Server memory of head, snapshots, blocks and pivot rows.
        shared_bytes: The part of it that other sessions refer to as well.
    """

    sid: str
    name: SessionName | None
    has_head: bool
    num_turns: int
    snapshot_id: str | None
    target: str | None
    num_tokens: int
    num_snapshots: int
    created_at: float | None
    last_turn_at: float | None
    expires_s: int | None
    num_blocks: int
    num_shared: int
    num_missing: int
    num_bytes: int
    shared_bytes: int

    @property
    def own_bytes(self) -> int:
        """Server memory that is freed when the session is removed with its blocks."""
        return self.num_bytes - self.shared_bytes


@dataclass(frozen=True, slots=True)
class Inventory:
    """All sessions of a tenant, and what was seen to make the list.

    Attributes:
        sessions: The sessions, the one used last first.
        seen: The survey behind them.
    """

    sessions: tuple[SessionInfo, ...]
    seen: Survey

    def find(self, thread_id: str, namespace: str | None = None) -> list[SessionInfo]:
        """Return the sessions of a thread.

        Args:
            thread_id: Any text.
            namespace: One of its namespaces; None for all.

        Raises:
            UnknownSessionError: If there is none.
        """
        spaces = {info.name.namespace for info in self.sessions if info.name} | set(_AGENT_NODES)
        wanted = {SessionName(thread_id, space).sid for space in (spaces if namespace is None else {namespace})}
        found = [info for info in self.sessions if info.sid in wanted]
        if not found:
            where = "" if namespace is None else f" in namespace {namespace[:80]!r}"
            raise UnknownSessionError(
                f"there is no session of thread {thread_id[:80]!r}{where}; see `dlite-agent sessions ls`"
            )
        return found

    def by_id(self, sid: str) -> SessionInfo:
        """Return the session whose id starts like this.

        Raises:
            UnknownSessionError: If there is none, or more than one.
        """
        found = [info for info in self.sessions if sid and info.sid.startswith(sid)]
        if len(found) != 1:
            raise UnknownSessionError(
                f"{len(found)} sessions have an id that starts with {sid[:80]!r}; expected one: "
                "see `dlite-agent sessions ls`"
            )
        return found[0]


def take_inventory(store: SessionStore) -> Inventory:
    """List a tenant's sessions; nothing is changed, no life extended.

    Raises:
        StoreUnavailableError: If the server does not answer.
    """
    seen = survey(store)
    names = dict(_names_in_checkpoints(store, seen))
    users = Counter(key for snapshots in seen.snapshots.values() for key in _records(snapshots.values()))
    found = [_describe(store, seen, sid, users, names) for sid in {**seen.heads, **seen.snapshots}]
    found.sort(key=lambda info: (info.last_turn_at or 0.0, info.sid), reverse=True)
    return Inventory(tuple(found), seen)


def _records(snapshots: Iterable[SnapshotFacts | None]) -> set[str]:
    return {key for facts in snapshots if facts is not None for key in facts.records}


def _describe(
    store: SessionStore, seen: Survey, sid: str, users: Counter[str], names: dict[str, SessionName]
) -> SessionInfo:
    head = seen.heads.get(sid)
    snapshots = seen.snapshots.get(sid, {})
    at = snapshots.get(head.snapshot_id) if head and head.snapshot_id else None
    records = _records(snapshots.values())
    there = {key for key in records if key in seen.sizes}
    shared = {key for key in there if users[key] > 1}
    own_keys = [store.keys.head(sid), *(store.keys.snapshot(sid, snapshot_id) for snapshot_id in snapshots)]
    return SessionInfo(
        sid=sid,
        name=(head.name if head else None) or names.get(sid),
        has_head=head is not None,
        num_turns=head.version if head else 0,
        snapshot_id=head.snapshot_id if head else None,
        target=at.target.hex() if at else None,
        num_tokens=at.num_tokens if at else 0,
        num_snapshots=len(snapshots),
        created_at=min((facts.created_at for facts in snapshots.values() if facts), default=None),
        last_turn_at=at.created_at if at else None,
        expires_s=head.expires_s if head else None,
        num_blocks=sum(seen.parts[key].kind == "block" for key in there),
        num_shared=sum(seen.parts[key].kind == "block" for key in shared),
        num_missing=len(records) - len(there),
        num_bytes=sum(seen.sizes.get(key, 0) for key in [*there, *own_keys]),
        shared_bytes=sum(seen.sizes[key] for key in shared),
    )


def _names_in_checkpoints(store: SessionStore, seen: Survey) -> Iterator[tuple[str, SessionName]]:
    """Name sessions after the threads whose checkpoints a `RedisSaver` keeps beside them."""
    threads = {seen.parts[key].sid for key in seen.keys_of("checkpoint")}
    for thread in sorted(threads):
        with translated("reading the names of threads"):
            pipe = store.client.pipeline(transaction=False)
            pipe.hget(store.keys.checkpoint_data(thread), "t")
            pipe.zrangebylex(store.keys.checkpoint_index(thread), "[c", "(d")
            record, names = pipe.execute(raise_on_error=False)
        if isinstance(record, bytes) and isinstance(names, list):
            with suppress(RecordError):  # a damaged thread is `verify`'s business
                thread_id = decode(record)
                for space in {"", *map(namespace_of_name, names)}:
                    for node in _AGENT_NODES:
                        name = SessionName(thread_id, "|".join(part for part in (space, node) if part))
                        yield name.sid, name

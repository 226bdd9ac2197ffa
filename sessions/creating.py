"""New sessions made of records that are there: a fork, or what an import has written."""

from __future__ import annotations

from dataclasses import dataclass

from dlite_agent.errors import SessionExistsError, UnknownSessionError
from dlite_agent.sessions.client import translated
from dlite_agent.sessions.heads import first_fence, name_fields
from dlite_agent.sessions.keys import SessionName
from dlite_agent.sessions.records import Snapshot
from dlite_agent.sessions.store import SessionStore
from dlite_agent.sessions.survey import facts_of

# KEYS: head, snapshot. ARGV: snapshot record, ttl, fence, version, snapshot id, then thread id and namespace if known.
_CREATE = """
if redis.call('EXISTS', KEYS[1]) == 1 then
  return 0
end
redis.call('SET', KEYS[2], ARGV[1], 'EX', ARGV[2])
redis.call('HSET', KEYS[1], 'fence', ARGV[3], 'version', ARGV[4], 'snapshot', ARGV[5])
if ARGV[6] then
  redis.call('HSET', KEYS[1], 'thread', ARGV[6], 'namespace', ARGV[7])
end
redis.call('EXPIRE', KEYS[1], ARGV[2])
return 1
"""


@dataclass(frozen=True, slots=True)
class Fork:
    """What a fork made.

    Attributes:
        sid: Its `session_id`.
        snapshot_id: The snapshot it starts at.
        num_tokens: Tokens of that.
        num_records: Blocks and pivot rows it shares; nothing of them was copied.
        num_missing: Those that are gone; they are computed again.
    """

    sid: str
    snapshot_id: str
    num_tokens: int
    num_records: int
    num_missing: int


def fork_session(store: SessionStore, sid: str, name: SessionName, *, snapshot_id: str | None = None) -> Fork:
    """Make a session that goes on from a snapshot of another; their blocks are stored once.

    Args:
        store: Says server, tenant and secret.
        sid: The session to fork, a `session_id`. It is not changed.
        name: The new session.
        snapshot_id: Where to start; None for where the session is.

    Returns:
        What was made.

    Raises:
        UnknownSessionError: If there is no such session, or no sound snapshot of this id.
        SessionExistsError: If the new session is there already.
        StoreUnavailableError: If the server does not answer.
    """
    if snapshot_id is None:
        head = store.head(sid)
        if head is None or head.snapshot is None:
            raise UnknownSessionError(f"session {sid} has no committed turn; see `dlite-agent sessions ls`")
        snapshot_id = head.snapshot
    snapshot = store.get_snapshot(sid, snapshot_id)
    if snapshot is None:
        raise UnknownSessionError(
            f"snapshot {snapshot_id[:80]!r} of session {sid} is not there or damaged; "
            "see `dlite-agent sessions show` and `dlite-agent sessions verify`"
        )
    records = facts_of(store, snapshot).records
    there = store.writer.expire(records, store.block_ttl_s)
    create_session(store, name.sid, snapshot, name=name)
    return Fork(name.sid, snapshot_id, snapshot.num_tokens, len(records), there.count(False))


def create_session(
    store: SessionStore, sid: str, snapshot: Snapshot, *, version: int = 1, name: SessionName | None = None
) -> None:
    """Write a snapshot and a head that points at it, at once or not at all.

    Args:
        store: Says server, tenant and secret.
        sid: The new session.
        snapshot: Where it starts; its blocks should be there already.
        version: Number of commits the head is to count.
        name: What people call it, if known.

    Raises:
        SessionExistsError: If there is a head already; nothing is changed.
    """
    keys = [store.keys.head(sid), store.keys.snapshot(sid, snapshot.snapshot_id)]
    record = store.codec.pack_snapshot(snapshot)
    args: list[bytes | str | int] = [record, store.ttl_s, first_fence(), version, snapshot.snapshot_id]
    args += name_fields(name)
    with translated("making a session"):
        is_made = store.client.register_script(_CREATE)(keys=keys, args=args)
    if not is_made:
        called = "" if name is None else f" (thread {name.thread_id[:80]!r})"
        raise SessionExistsError(f"session {sid}{called} exists; choose another name, or remove it first")

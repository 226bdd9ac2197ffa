"""Heads: the one mutable record of a session, moved by compare-and-set.

A head that holds nonsense, or a key that holds another type, is no head: the next acquisition makes it anew, and what
the session was is found by the snapshot that its messages name, or computed again.

Every answer echoes what it answers. Where replies and commands have fallen out of step (a read was given up, its reply
came later), another command's answer is not taken for this one's: the connections are dropped and the call has failed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Literal, cast

import redis

from dlite_agent.errors import FencedError, StoreUnavailableError
from dlite_agent.sessions.client import RedisClient, is_wrong_type, translated
from dlite_agent.sessions.counters import Counters
from dlite_agent.sessions.keys import Keys, SessionName, is_snapshot_id

_MAX_NAME = 1024  # characters of a thread id or namespace that a head keeps

# Numbers that Lua and Redis both hold exactly; nil for anything else.
_NUMBER = """
local function number(text)
  if not text then return 0 end
  if #text > 15 or not string.match(text, '^%d+$') then return nil end
  return tonumber(text)
end
"""

# Another type of value shows as an error of HMGET: a user needs no right to ask for the type. Any other error says
# nothing of the head.
_IS_DAMAGE = """
local function is_damage(head)
  return string.find(head['err'], 'WRONGTYPE', 1, true)
end
"""

# KEYS: head. ARGV: ttl, a fence for a head that is made anew, then thread id and namespace if known. Any earlier lease
# is stale from now on.
_ACQUIRE = f"""{_NUMBER}{_IS_DAMAGE}
local damaged = 0
local head = redis.pcall('HMGET', KEYS[1], 'fence', 'version', 'snapshot')
if head['err'] then
  if not is_damage(head) then
    return head
  end
  head = {{'damaged'}}
end
local fence, version, snapshot = number(head[1] or ARGV[2]), number(head[2]), head[3] or ''
if not fence or not version or (snapshot ~= '' and not string.match(snapshot, '^%x+$')) then
  redis.call('UNLINK', KEYS[1])
  fence, version, snapshot, damaged = tonumber(ARGV[2]), 0, '', 1
end
fence = fence + 1
redis.call('HSET', KEYS[1], 'fence', string.format('%.0f', fence))
if ARGV[3] then
  redis.call('HSET', KEYS[1], 'thread', ARGV[3], 'namespace', ARGV[4])
end
redis.call('EXPIRE', KEYS[1], ARGV[1])
return {{fence, version, snapshot, damaged, KEYS[1]}}
"""

# KEYS: head. ARGV: fence, version, nonce, snapshot, ttl. A head that was lost is not made anew by an old lease.
_COMMIT = f"""{_NUMBER}{_IS_DAMAGE}
local head = redis.pcall('HMGET', KEYS[1], 'fence', 'version', 'nonce')
if head['err'] and not is_damage(head) then
  return head
end
local fence, version = number(head[1]), number(head[2])
if not head[1] or not fence or not version then
  return {{'sibling', 0, ARGV[3]}}
end
if head[3] == ARGV[3] then
  redis.call('EXPIRE', KEYS[1], ARGV[5])
  return {{'duplicate', version, ARGV[3]}}
end
if fence > tonumber(ARGV[1]) then
  return {{'fenced', fence, ARGV[3]}}
end
if version ~= tonumber(ARGV[2]) then
  return {{'sibling', version, ARGV[3]}}
end
redis.call('HSET', KEYS[1], 'fence', ARGV[1], 'version', version + 1, 'nonce', ARGV[3], 'snapshot', ARGV[4])
redis.call('EXPIRE', KEYS[1], ARGV[5])
return {{'committed', version + 1, ARGV[3]}}
"""

CommitStatus = Literal["committed", "duplicate", "sibling"]


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to move a session's head, until someone else acquires it.

    Attributes:
        sid: The session.
        fence: Grows with every acquisition; the highest one may commit.
        version: Number of commits the head has seen.
        snapshot: Id of the snapshot the head points at, or None.
    """

    sid: str
    fence: int
    version: int
    snapshot: str | None


class Heads:
    """The heads of one tenant's sessions."""

    def __init__(self, client: RedisClient, keys: Keys, *, ttl_s: int, counters: Counters) -> None:
        self._client = client
        self._keys = keys
        self._ttl_s = ttl_s
        self._counters = counters
        self._acquire = client.register_script(_ACQUIRE)
        self._commit = client.register_script(_COMMIT)

    def acquire(self, sid: str, name: SessionName | None) -> Lease:
        """Take a session over; a damaged head is made anew, and counted."""
        key = self._keys.head(sid)
        with translated("acquiring the session"):
            reply = self._acquire(keys=[key], args=[self._ttl_s, first_fence(), *name_fields(name)])
        fields = self._answered(reply, key.encode(), length=5)
        fence, version, snapshot, is_damaged = cast(tuple[int, int, bytes, int], tuple(fields))
        if is_damaged:
            self._counters.add(corrupt=1)
        return Lease(sid, fence, version, snapshot.decode() or None)

    def look(self, sid: str) -> Lease | None:
        """Read a head; None if there is none, or one that holds nonsense (which is counted)."""
        with translated("reading the session's head"):
            try:
                found = self._client.hmget(self._keys.head(sid), ["fence", "version", "snapshot"])
            except redis.ResponseError as error:
                if not is_wrong_type(error):
                    raise
                found = [b"", b"", b""]
        fence, version, snapshot = found
        if fence is None:
            return None
        try:
            at = snapshot.decode("ascii") if isinstance(snapshot, bytes) else None
            lease = Lease(sid, int(fence), int(version or 0), at)
        except ValueError:
            lease = None
        if lease is None or not (lease.snapshot is None or is_snapshot_id(lease.snapshot)):
            self._counters.add(corrupt=1)
            return None
        return lease

    def move(self, lease: Lease, snapshot_id: str) -> tuple[CommitStatus, Lease]:
        """Move the head to a snapshot, if the lease still may; returns the lease for the next commit.

        Raises:
            FencedError: If another worker has acquired the session.
        """
        nonce = f"{snapshot_id}:{lease.fence}:{lease.version}"
        with translated("moving the session's head"):
            reply = self._commit(
                keys=[self._keys.head(lease.sid)], args=[lease.fence, lease.version, nonce, snapshot_id, self._ttl_s]
            )
        answer, number = cast(tuple[bytes, int], tuple(self._answered(reply, nonce.encode(), length=3)))
        status = answer.decode()
        self._counters.add(**{status: 1})
        if status == "fenced":
            raise FencedError(
                f"the session was acquired by another worker (fence {number}; this lease has {lease.fence}); "
                "acquire it again to go on from there"
            )
        if status == "sibling":
            return "sibling", lease
        return cast(CommitStatus, status), replace(lease, version=number, snapshot=snapshot_id)

    def _answered(self, reply: object, echo: bytes, *, length: int) -> list[object]:
        """Check that a reply is to this very command; return it without its echo."""
        if isinstance(reply, list) and len(reply) == length and reply[-1] == echo:
            return reply[:-1]
        drop_connections(self._client)
        raise StoreUnavailableError(
            "the server's replies have fallen out of step with the commands; the connections were dropped, try again"
        )


def drop_connections(client: RedisClient) -> None:
    """Close a client's idle connections, whose next replies cannot be trusted."""
    if isinstance(client, redis.Redis):
        client.connection_pool.disconnect(inuse_connections=False)
    else:
        client.disconnect_connection_pools()  # type: ignore[no-untyped-call]


def first_fence() -> int:
    """Return a fence for a head that is made anew, above that of any lease on a head of this session before it."""
    return int(time.time() * 1e5)  # in seconds, or from one on, an old lease would soon meet its own number again


def name_fields(name: SessionName | None) -> list[bytes]:
    """Write a name as a head keeps it: thread id and namespace, the ends of long ones cut off; nothing for None."""
    if name is None:
        return []
    return [text[:_MAX_NAME].encode("utf-8", "surrogatepass") for text in (name.thread_id, name.namespace)]

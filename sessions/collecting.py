"""Removes sessions, and records that nothing refers to any more.

Whatever is removed wrongly would only be computed again, but a commit writes its blocks before anything refers to them:
so a record that was used lately is left alone, and the server itself decides that, in the step that removes it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dlite_agent.errors import ConfigError, RecordError
from dlite_agent.sessions.client import translated
from dlite_agent.sessions.store import SessionStore
from dlite_agent.sessions.survey import Survey, batches, survey

DEFAULT_GRACE_S = 3600
_KEYS = 1000

# KEYS: a record. ARGV: grace, the life its last use gave it. A server that evicts by frequency knows no idle times.
_REMOVE_IDLE = """
local idle = redis.pcall('OBJECT', 'IDLETIME', KEYS[1])
if type(idle) ~= 'number' then
  idle = tonumber(ARGV[2]) - redis.call('TTL', KEYS[1])
end
if idle < tonumber(ARGV[1]) then
  return 0
end
return redis.call('UNLINK', KEYS[1])
"""


@dataclass(frozen=True, slots=True)
class Collection:
    """What a collection removed, or would.

    Attributes:
        num_removed: Records removed, per kind.
        num_bytes: Server memory they took.
        num_spared: Records that nothing refers to, but that were used within the grace time.
    """

    num_removed: dict[str, int]
    num_bytes: int
    num_spared: int


def collect_garbage(
    store: SessionStore, *, grace_s: int = DEFAULT_GRACE_S, is_dry: bool = False, with_damaged: bool = False
) -> Collection:
    """Remove the store's snapshots that have no head, and blocks and pivot rows that no other snapshot refers to.

    Args:
        store: Says server, tenant and secret.
        grace_s: Seconds since the last use (`verify` uses all) of a block or pivot row within which it stays; 0 removes
            it even while a worker is just about to refer to it, which costs that worker a prefill.
        is_dry: Only say what nothing refers to, whenever it was used.
        with_damaged: Remove snapshots that cannot be read as well.

    Returns:
        What was removed.

    Raises:
        ConfigError: If `grace_s` is negative.
        RecordError: If a snapshot cannot be read and `with_damaged` is not set: what it refers to is not known, and
            with a wrong secret none can be read. Nothing is removed.
        StoreUnavailableError: If the server does not answer.
    """
    if grace_s < 0:
        raise ConfigError(f"grace_s is {grace_s}; expected 0 or more seconds")
    seen = survey(store)
    unreadable = [key for key in seen.problems if seen.parts[key].kind == "snapshot"]
    if unreadable and not with_damaged:
        raise RecordError(
            f"{len(unreadable)} snapshots cannot be read ({unreadable[0]}: {seen.problems[unreadable[0]]}); "
            "check the secret, see `dlite-agent sessions verify`, or collect with damaged ones"
        )
    garbage = [*_orphans(store, seen), *unreadable]
    kept = _referred(seen, without=set(garbage), store=store)
    garbage += [key for key in seen.keys_of("block", "side") if key not in kept]
    return _remove(store, seen, dict.fromkeys(garbage), grace_s=grace_s, is_dry=is_dry)


def remove_session(store: SessionStore, sid: str, *, with_blocks: bool = False) -> Collection:
    """Remove a session; see `SessionStore.delete_session`.

    Args:
        store: Says server, tenant and secret.
        sid: A `session_id`; one that there is not is no error.
        with_blocks: Remove its blocks and pivot rows too, unless another session refers to them. Without it they stay
            until `collect_garbage` or their expiry.

    Returns:
        What was removed.

    Raises:
        RecordError: If `with_blocks` is set and a snapshot cannot be read; the session is removed, no block is.
        StoreUnavailableError: If the server does not answer.
    """
    seen = survey(store)
    own = [store.keys.head(sid), *(store.keys.snapshot(sid, name) for name in seen.snapshots.get(sid, {}))]
    own = [key for key in own if key in seen.sizes]
    store.delete_session(sid)
    removed: dict[str, int] = {}
    for key in own:
        removed[seen.parts[key].kind] = removed.get(seen.parts[key].kind, 0) + 1
    num_bytes = sum(seen.sizes[key] for key in own)
    if not with_blocks:
        return Collection(removed, num_bytes, 0)
    mine = {key for facts in seen.snapshots.get(sid, {}).values() if facts for key in facts.records}
    seen = survey(store)  # what others refer to now
    if any(facts is None for snapshots in seen.snapshots.values() for facts in snapshots.values()):
        raise RecordError(
            f"session {sid} was removed, but none of its blocks: a snapshot of another session cannot be read, so what "
            "it shares is not known; check the secret, see `dlite-agent sessions verify`, and run `gc` later"
        )
    shared = _referred(seen, without=set(), store=store)
    freed = [key for key in mine if key in seen.sizes and key not in shared]
    blocks = _remove(store, seen, freed, grace_s=0, is_dry=False)
    return Collection(removed | blocks.num_removed, num_bytes + blocks.num_bytes, 0)


def _orphans(store: SessionStore, seen: Survey) -> list[str]:
    return [
        store.keys.snapshot(sid, snapshot_id)
        for sid, snapshots in seen.snapshots.items()
        if sid not in seen.heads
        for snapshot_id, facts in snapshots.items()
        if facts is not None
    ]


def _referred(seen: Survey, *, without: set[str], store: SessionStore) -> set[str]:
    return {
        key
        for sid, snapshots in seen.snapshots.items()
        for snapshot_id, facts in snapshots.items()
        if facts is not None and store.keys.snapshot(sid, snapshot_id) not in without
        for key in facts.records
    }


def _remove(store: SessionStore, seen: Survey, keys: Iterable[str], *, grace_s: int, is_dry: bool) -> Collection:
    """Remove records that were not used lately."""
    found = [key for key in keys if key in seen.sizes]
    script = store.client.register_script(_REMOVE_IDLE)
    removed: dict[str, int] = {}
    num_bytes = num_spared = 0
    for some in batches(found, _KEYS):
        gone = [True] * len(some) if is_dry else []
        for key in () if is_dry else some:
            is_snapshot = seen.parts[key].kind == "snapshot"  # a commit needs a head before it writes one
            with translated("removing records"):
                gone.append(bool(script(keys=[key], args=[0 if is_snapshot else grace_s, store.block_ttl_s])))
        for key, is_gone in zip(some, gone, strict=True):
            if not is_gone:
                num_spared += 1
                continue
            kind = seen.parts[key].kind
            removed[kind] = removed.get(kind, 0) + 1
            num_bytes += seen.sizes[key]
    return Collection(removed, num_bytes, num_spared)

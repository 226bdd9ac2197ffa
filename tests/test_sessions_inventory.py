"""What people do with stored sessions, on a real server: look, fork, check, collect. Looking changes nothing."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest
import redis
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import empty_checkpoint

from dlite_agent.errors import ConfigError, RecordError, SessionExistsError, UnknownSessionError
from dlite_agent.sessions.checking import verify
from dlite_agent.sessions.client import RedisClient
from dlite_agent.sessions.collecting import collect_garbage, remove_session
from dlite_agent.sessions.creating import fork_session
from dlite_agent.sessions.inventory import take_inventory
from dlite_agent.sessions.keys import SessionName, fingerprint_hash
from dlite_agent.sessions.records import Block, Snapshot
from dlite_agent.sessions.saver import RedisSaver
from dlite_agent.sessions.store import SessionStore

Commit = Callable[..., Snapshot]
ONE = SessionName("one", "model")
TWO = SessionName("two", "model")
HOSTILE = ["", "*", "{}", "a:b", "{a}:h", "x\ny", "\x1b[31m", "é☃", "\ud800", "a" * 10_000, "dlite:1:*", "?[a-z]\\"]


@pytest.fixture
def store(client: redis.Redis) -> SessionStore:
    return SessionStore(client)


def contents(client: RedisClient) -> dict[bytes, bytes | None]:
    return {key: client.dump(key) for key in client.scan_iter()}


def keys_of(store: SessionStore, snapshot: Snapshot) -> list[str]:
    return [store.keys.block(fingerprint_hash(snapshot.fingerprint), ref.chain) for ref in snapshot.blocks]


def is_restorable(store: SessionStore, sid: str, snapshot_id: str) -> bool:
    found = store.get_snapshot(sid, snapshot_id)
    return found is not None and None not in list(
        store.get_blocks(found.fingerprint, [ref.chain for ref in found.blocks])
    )


def test_sessions_are_listed_with_names_turns_and_what_they_share(store: SessionStore, commit_turn: Commit) -> None:
    commit_turn(store, ONE, range(20), [8, 4])
    commit_turn(store, ONE, range(30), [8, 4, 16])
    commit_turn(store, TWO, [*range(8), 99, 98, 97], [8, 2])
    two, one = take_inventory(store).sessions
    assert (one.name, two.name) == (ONE, TWO)
    assert (one.num_turns, one.num_snapshots, one.num_tokens, one.num_blocks) == (2, 2, 30, 3)
    assert (two.num_turns, two.num_snapshots, two.num_tokens, two.num_blocks) == (1, 1, 11, 2)
    assert one.num_shared == two.num_shared == 1
    (shared,) = set(keys_of(store, commit_turn(store, TWO, range(8), [8])))
    assert one.shared_bytes == store.client.memory_usage(shared, samples=0)
    assert 0 < one.shared_bytes < one.num_bytes
    assert one.created_at is not None
    assert one.last_turn_at is not None
    assert one.created_at < one.last_turn_at
    assert one.expires_s is not None
    assert 0 < one.expires_s <= store.ttl_s


def test_bytes_that_are_shared_are_counted_once_in_all(store: SessionStore, commit_turn: Commit) -> None:
    commit_turn(store, ONE, range(20), [8, 8])
    one_alone = take_inventory(store).sessions[0].num_bytes
    fork_session(store, ONE.sid, TWO)
    inventory = take_inventory(store)
    all_bytes = sum(inventory.seen.sizes.values())
    shared = {info.shared_bytes for info in inventory.sessions}
    assert len(shared) == 1
    assert all_bytes == sum(info.own_bytes for info in inventory.sessions) + shared.pop()
    assert all_bytes < 2 * one_alone


def test_looking_changes_nothing_and_extends_no_life(
    store: SessionStore, client: redis.Redis, commit_turn: Commit
) -> None:
    commit_turn(store, ONE, range(20), [8, 4])
    for key in client.scan_iter():
        client.expire(key, 1000)
    before = contents(client)
    take_inventory(store)
    assert not verify(store).findings
    collect_garbage(store, grace_s=0)
    assert contents(client) == before
    assert all(0 < client.ttl(key) <= 1000 for key in before)


@pytest.mark.parametrize("text", HOSTILE)
def test_any_thread_id_is_found_and_only_itself_is_removed(store: SessionStore, commit_turn: Commit, text: str) -> None:
    commit_turn(store, ONE, range(9), [8])
    commit_turn(store, SessionName(text, "node*{}:\n"), range(20, 40), [8])
    (found,) = take_inventory(store).find(text)
    assert found.sid == SessionName(text, "node*{}:\n").sid
    assert found.name is not None
    assert text.startswith(found.name.thread_id)
    assert take_inventory(store).find(text, "node*{}:\n") == [found]
    remove_session(store, found.sid, with_blocks=True)
    assert [info.name for info in take_inventory(store).sessions] == [ONE]
    assert not verify(store).findings
    with pytest.raises(UnknownSessionError, match="sessions ls"):
        take_inventory(store).find(text)


def test_a_session_without_a_name_is_named_after_its_thread_s_checkpoints(
    store: SessionStore, commit_turn: Commit
) -> None:
    commit_turn(store, SessionName("t:*\n", "sub|model"), range(9), [8], is_named=False)
    assert take_inventory(store).sessions[0].name is None
    config: RunnableConfig = {"configurable": {"thread_id": "t:*\n", "checkpoint_ns": "sub:1234"}}
    RedisSaver(store.client).put(config, empty_checkpoint(), {}, {})
    assert take_inventory(store).sessions[0].name == SessionName("t:*\n", "sub|model")


def test_a_name_is_kept_by_workers_that_do_not_know_it(store: SessionStore, commit_turn: Commit) -> None:
    commit_turn(store, ONE, range(9), [8])
    commit_turn(store, ONE, range(12), [8, 2], is_named=False)
    assert take_inventory(store).sessions[0].name == ONE


def test_ids_may_be_shortened_while_they_are_plain(store: SessionStore, commit_turn: Commit) -> None:
    commit_turn(store, ONE, range(9), [8])
    inventory = take_inventory(store)
    assert inventory.by_id(ONE.sid[:8]).sid == ONE.sid
    for sid in ("", "zz"):
        with pytest.raises(UnknownSessionError, match="expected one"):
            inventory.by_id(sid)


def test_tenants_see_and_touch_only_their_own(store: SessionStore, commit_turn: Commit) -> None:
    other = SessionStore(store.client, tenant="other")
    commit_turn(store, ONE, range(20), [8, 8])
    commit_turn(other, ONE, range(20), [8])
    before = take_inventory(store).sessions
    remove_session(other, ONE.sid, with_blocks=True)
    collect_garbage(other, grace_s=0, with_damaged=True)
    assert take_inventory(other).sessions == ()
    assert list(store.client.scan_iter(match=other.keys.everything())) == []
    (after,) = take_inventory(store).sessions
    assert after.num_bytes == before[0].num_bytes


def test_a_fork_goes_on_by_itself_and_stores_no_block(store: SessionStore, commit_turn: Commit) -> None:
    first = commit_turn(store, ONE, range(20), [8, 8])
    commit_turn(store, ONE, range(30), [8, 8, 8])
    blocks = store.usage()["block"]
    fork = fork_session(store, ONE.sid, TWO, snapshot_id=first.snapshot_id)
    assert (fork.snapshot_id, fork.num_tokens, fork.num_records, fork.num_missing) == (first.snapshot_id, 20, 3, 0)
    assert store.usage()["block"] == blocks
    head = store.head(TWO.sid)
    assert head is not None
    assert head.snapshot == first.snapshot_id
    commit_turn(store, TWO, [*range(20), 50, 51], [8, 8, 4])
    old = store.head(ONE.sid)
    assert old is not None
    assert old.snapshot != first.snapshot_id
    remove_session(store, ONE.sid, with_blocks=True)
    assert is_restorable(store, TWO.sid, first.snapshot_id)
    assert not verify(store).findings


def test_ten_forks_store_the_blocks_of_one_session(store: SessionStore, commit_turn: Commit) -> None:
    commit_turn(store, ONE, range(1000), [32] * 31)
    one = store.usage()
    for number in range(10):
        fork_session(store, ONE.sid, SessionName(f"fork {number}", "model"))
    after = store.usage()
    assert (after["block"], after["side"]) == (one["block"], one["side"])
    assert after["snapshot"].num_keys == 11
    assert {info.num_shared for info in take_inventory(store).sessions} == {31}


def test_what_cannot_be_forked_is_said(store: SessionStore, commit_turn: Commit) -> None:
    snapshot = commit_turn(store, ONE, range(9), [8])
    commit_turn(store, TWO, range(20, 30), [8])
    with pytest.raises(SessionExistsError, match="another name"):
        fork_session(store, ONE.sid, TWO)
    with pytest.raises(UnknownSessionError, match="snapshot"):
        fork_session(store, ONE.sid, SessionName("new"), snapshot_id="0" * 64)
    with pytest.raises(UnknownSessionError, match="snapshot"):
        fork_session(store, ONE.sid, SessionName("new"), snapshot_id="*")
    with pytest.raises(UnknownSessionError, match="no committed turn"):
        fork_session(store, SessionName("nobody").sid, SessionName("new"))
    assert len(take_inventory(store).sessions) == 2
    store.client.unlink(keys_of(store, snapshot)[0])
    assert fork_session(store, ONE.sid, SessionName("new")).num_missing == 1


def test_a_worker_of_a_removed_session_cannot_move_its_successor(store: SessionStore, commit_turn: Commit) -> None:
    commit_turn(store, ONE, range(9), [8])
    commit_turn(store, TWO, range(20, 30), [8])
    stale = store.acquire(TWO.sid)
    remove_session(store, TWO.sid)
    fork_session(store, ONE.sid, TWO)
    head = store.head(TWO.sid)
    assert head is not None
    assert head.fence > stale.fence


def test_removing_keeps_what_others_share(store: SessionStore, commit_turn: Commit) -> None:
    one = commit_turn(store, ONE, [*range(8), 1, 2, 3, 4], [8, 3])
    two = commit_turn(store, TWO, [*range(8), 5, 6, 7, 8], [8, 3])
    removed = remove_session(store, ONE.sid, with_blocks=True)
    assert removed.num_removed == {"head": 1, "snapshot": 1, "block": 1, "side": 1}
    assert is_restorable(store, TWO.sid, two.snapshot_id)
    assert not store.client.exists(keys_of(store, one)[1])
    assert not verify(store).findings


def test_collecting_removes_what_nothing_refers_to_and_nothing_else(store: SessionStore, commit_turn: Commit) -> None:
    commit_turn(store, ONE, [*range(8), 1, 2, 3, 4], [8, 3])
    two = commit_turn(store, TWO, [*range(8), 5, 6, 7, 8], [8, 3])
    remove_session(store, ONE.sid)
    would = collect_garbage(store, is_dry=True)
    assert collect_garbage(store).num_spared == 2  # they were used just now: a worker may be about to refer to them
    done = collect_garbage(store, grace_s=0)
    assert done.num_removed == would.num_removed == {"block": 1, "side": 1}
    assert done.num_bytes == would.num_bytes > 0
    assert is_restorable(store, TWO.sid, two.snapshot_id)
    assert collect_garbage(store, grace_s=0).num_removed == {}


def test_snapshots_without_a_head_are_collected_with_their_blocks(store: SessionStore, commit_turn: Commit) -> None:
    commit_turn(store, ONE, range(9), [8])
    store.client.unlink(store.keys.head(ONE.sid))
    assert not take_inventory(store).sessions[0].has_head
    assert collect_garbage(store, grace_s=0).num_removed == {"snapshot": 1, "block": 1, "side": 1}
    assert list(store.client.scan_iter()) == []


def test_collecting_where_the_server_knows_no_idle_times_goes_by_the_time_to_live(
    store: SessionStore, commit_turn: Commit
) -> None:
    client = store.client
    before = str(client.config_get("maxmemory-policy")["maxmemory-policy"])
    client.config_set("maxmemory-policy", "volatile-lfu")
    try:
        old, new = (commit_turn(store, name, ids, [8]) for name, ids in ((ONE, range(9)), (TWO, range(20, 30))))
        for name in (ONE, TWO):
            remove_session(store, name.sid)
        (key,) = keys_of(store, old)
        client.expire(key, store.block_ttl_s - 4000)
        assert collect_garbage(store, grace_s=3600).num_removed == {"block": 1}
        assert not client.exists(key)
        assert client.exists(*keys_of(store, new)) == 1
    finally:
        client.config_set("maxmemory-policy", before)


def test_nothing_is_collected_while_a_snapshot_cannot_be_read(store: SessionStore, commit_turn: Commit) -> None:
    keyed = SessionStore(store.client, secret=b"secret")
    commit_turn(keyed, ONE, range(9), [8])
    before = contents(store.client)
    with pytest.raises(RecordError, match="secret"):
        collect_garbage(store, grace_s=0)  # without the secret every snapshot looks damaged
    assert contents(store.client) == before
    with pytest.raises(ConfigError, match="grace_s"):
        collect_garbage(store, grace_s=-1)


def test_damaged_snapshots_are_collected_when_asked(store: SessionStore, commit_turn: Commit) -> None:
    damaged = commit_turn(store, ONE, range(9), [8])
    commit_turn(store, TWO, range(20, 30), [8])
    store.client.set(store.keys.snapshot(ONE.sid, damaged.snapshot_id), b"junk")
    removed = collect_garbage(store, grace_s=0, with_damaged=True).num_removed
    assert removed == {"snapshot": 1, "block": 1, "side": 1}


def flip(client: RedisClient, key: str) -> None:
    record = client.get(key)
    assert isinstance(record, bytes)
    client.set(key, record[:-1] + bytes([record[-1] ^ 1]))


@pytest.mark.parametrize(
    ("plant", "fault"),
    [
        ("flip block", "damaged"),
        ("flip side", "damaged"),
        ("flip snapshot", "damaged"),
        ("cut block", "damaged"),
        ("pickle block", "damaged"),
        ("list block", "damaged"),
        ("swap blocks", "foreign"),
        ("lose block", "missing"),
        ("lose side", "missing"),
        ("lose snapshot", "missing"),
        ("text head", "damaged"),
        ("odd head", "damaged"),
        ("strange key", "unknown"),
        ("half thread", "missing"),
    ],
)
def test_every_planted_damage_is_found(store: SessionStore, commit_turn: Commit, plant: str, fault: str) -> None:
    client = store.client
    snapshot = commit_turn(store, ONE, range(20), [8, 8])
    commit_turn(store, TWO, range(30, 50), [8, 8])
    first, second = keys_of(store, snapshot)
    side = store.keys.side(fingerprint_hash("target"), snapshot.blocks[-1].chain, 15)
    named = {"block": first, "side": side, "snapshot": store.keys.snapshot(ONE.sid, snapshot.snapshot_id)}
    assert not verify(store).findings
    verb, noun = plant.split()
    key = named.get(noun, "")
    if verb == "flip":
        flip(client, key)
    elif verb == "cut":
        client.set(key, (client.get(key) or b"")[:-9])
    elif verb == "pickle":
        client.set(key, pickle.dumps({"a": 1}))
    elif verb == "list":
        client.unlink(key)
        client.rpush(key, "x")
    elif verb == "swap":
        key = second
        client.set(second, client.get(first) or b"")
    elif verb == "lose":
        client.unlink(key)
    elif verb == "text":
        key = store.keys.head(ONE.sid)
        client.set(key, "x")
    elif verb == "odd":
        key = store.keys.head(ONE.sid)
        client.hset(key, "snapshot", "*")
    elif verb == "strange":
        key = f"{store.keys.prefix}:draft:\n"
        client.set(key, "x")
    else:
        config: RunnableConfig = {"configurable": {"thread_id": "t", "checkpoint_ns": ""}}
        saver = RedisSaver(client)
        saver.put(config, empty_checkpoint(), {}, {})
        assert not verify(store).findings
        (key,) = [name.decode() for name in client.scan_iter(match="*:k:i")]
        client.unlink(key)
    (finding,) = verify(store).findings
    assert (finding.key, finding.fault) == (key, fault)
    take_inventory(store)  # damage is no reason not to list


def test_a_block_of_another_length_than_its_snapshot_says_is_found(store: SessionStore, commit_turn: Commit) -> None:
    snapshot = commit_turn(store, ONE, range(20), [8, 8])
    chain = snapshot.blocks[0].chain
    store.client.set(keys_of(store, snapshot)[0], store.codec.pack_block("target", Block(chain, 7, "int8", (1,), b"x")))
    (finding,) = verify(store).findings
    assert "holds 7 tokens" in finding.what

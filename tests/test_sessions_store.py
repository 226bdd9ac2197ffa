"""The store on a real server: a commit is whole or invisible, a damaged record is a miss, an error is an error."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from dlite_agent.bench.sessions.proxy import Proxy
from dlite_agent.errors import ConfigError, FencedError, RecordError, StoreFullError, StoreUnavailableError
from dlite_agent.sessions.embedded import EmbeddedServer
from dlite_agent.sessions.heads import Lease
from dlite_agent.sessions.keys import (
    KINDS,
    chain_blocks,
    chain_next,
    chain_root,
    fingerprint_hash,
    ids_to_bytes,
    session_id,
)
from dlite_agent.sessions.records import Block, BlockRef, SideRow, Snapshot
from dlite_agent.sessions.store import BLOCK_TTL_FACTOR, SessionStore

TARGET = "target"
SID = session_id("thread")


@pytest.fixture
def store(client: redis.Redis) -> SessionStore:
    return SessionStore(client)


class Turn:
    """What a worker would commit after a turn: a snapshot, its new blocks, its pivot row."""

    def __init__(self, tokens: list[int], counts: list[int], *, after: Turn | None = None, secret: bytes = b"") -> None:
        old: tuple[BlockRef, ...] = after.snapshot.blocks if after else ()
        all_counts = [ref.num_tokens for ref in old] + counts
        chains = chain_blocks(chain_root(TARGET, secret), tokens, all_counts)
        new = list(zip(chains, all_counts, strict=True))[len(old) :]
        self.blocks = [Block(chain, n, "float32", (2, n, 8), os.urandom(64 * n)) for chain, n in new]
        self.pivot = SideRow(chains[-1], sum(all_counts) - 1, "float32", (5, 8), os.urandom(160))
        self.snapshot: Snapshot = Snapshot(
            parent=after.snapshot.snapshot_id if after else None,
            fingerprint=TARGET,
            ids=ids_to_bytes(tokens),
            num_kv=sum(all_counts),
            blocks=(*old, *(block.ref() for block in self.blocks)),
            pivot=True,
        )

    @property
    def id(self) -> str:
        return self.snapshot.snapshot_id

    @property
    def chains(self) -> list[bytes]:
        return [ref.chain for ref in self.snapshot.blocks]

    def block_key(self, store: SessionStore, position: int) -> str:
        return store.keys.block(fingerprint_hash(TARGET), self.chains[position])


def is_restorable(store: SessionStore, turn: Turn) -> bool:
    found = store.get_snapshot(SID, turn.id)
    blocks = list(store.get_blocks(TARGET, turn.chains))
    pivot = store.get_pivot(TARGET, turn.chains[-1], turn.snapshot.num_kv - 1)
    return found == turn.snapshot and None not in blocks and pivot == turn.pivot


def commit(store: SessionStore, turn: Turn, sid: str = SID) -> None:
    report = store.commit(store.acquire(sid), turn.snapshot, blocks=turn.blocks, pivot=turn.pivot)
    assert report.status == "committed"


def test_another_store_reads_what_one_committed(store: SessionStore, server: EmbeddedServer) -> None:
    turn = Turn(list(range(12)), [7, 4])
    lease = store.acquire(SID)
    assert lease.snapshot is None
    report = store.commit(lease, turn.snapshot, blocks=turn.blocks, pivot=turn.pivot)
    assert (report.status, report.snapshot_id) == ("committed", turn.id)
    with server.client() as client:
        other = SessionStore(client)
        head = other.head(SID)
        assert head is not None
        assert head.snapshot == turn.id
        assert list(other.get_blocks(TARGET, turn.chains)) == turn.blocks
        assert is_restorable(other, turn)
        assert other.acquire(SID).snapshot == turn.id


def test_an_unknown_session_has_no_head_and_looking_makes_none(store: SessionStore) -> None:
    assert store.head(SID) is None
    assert store.head(SID) is None
    assert store.usage() == {}


def test_a_turn_writes_only_its_own_blocks(store: SessionStore, client: redis.Redis) -> None:
    tokens = list(range(3000))
    first = Turn(tokens[:2000], [1000, 1000])
    report = store.commit(store.acquire(SID), first.snapshot, blocks=first.blocks, pivot=first.pivot)
    second = Turn(tokens, [1000], after=first)
    report = store.commit(report.lease, second.snapshot, blocks=second.blocks, pivot=second.pivot)
    assert (report.status, report.blocks_written, report.blocks_missing) == ("committed", 1, ())
    new_kv = sum(len(block.payload) for block in second.blocks)
    assert new_kv < report.bytes_written < 1.25 * new_kv  # beside 64 bytes of KV a token's id is 4; real KV is 24 kB
    assert is_restorable(store, second)
    assert store.get_snapshot(SID, first.id) == first.snapshot


def test_blocks_of_a_common_prefix_are_stored_once(store: SessionStore) -> None:
    tokens = list(range(20))
    base = Turn(tokens[:10], [10])
    commit(store, base)
    for fork in range(3):
        turn = Turn([*tokens[:10], 100 + fork], [1], after=base)
        lease = store.acquire(session_id(f"fork {fork}"))
        report = store.commit(lease, turn.snapshot, blocks=[*base.blocks, *turn.blocks], pivot=turn.pivot)
        assert (report.blocks_written, report.blocks_shared) == (1, 1)
    assert store.usage()["block"].num_keys == 4


def test_a_repeated_commit_is_a_duplicate_and_a_success(store: SessionStore) -> None:
    turn = Turn([1, 2, 3], [3])
    lease = store.acquire(SID)
    first = store.commit(lease, turn.snapshot, blocks=turn.blocks, pivot=turn.pivot)
    again = store.commit(lease, turn.snapshot, blocks=turn.blocks, pivot=turn.pivot)
    assert (again.status, again.lease, again.blocks_written) == ("duplicate", first.lease, 0)
    rebuilt = replace(turn.snapshot, created_at=0.0)
    assert store.commit(lease, rebuilt, blocks=turn.blocks, pivot=turn.pivot).status == "duplicate"
    store.acquire(SID)
    assert store.commit(lease, turn.snapshot, blocks=turn.blocks, pivot=turn.pivot).status == "duplicate"
    assert store.counters.duplicate == 3


def test_a_stale_worker_is_fenced_and_its_turn_stays_readable(store: SessionStore) -> None:
    ours, theirs = Turn([1, 2, 3], [3]), Turn([1, 2, 4], [3])
    stale = store.acquire(SID)
    commit(store, theirs)
    with pytest.raises(FencedError, match="acquire it again"):
        store.commit(stale, ours.snapshot, blocks=ours.blocks, pivot=ours.pivot)
    head = store.head(SID)
    assert head is not None
    assert head.snapshot == theirs.id
    assert is_restorable(store, ours)
    assert is_restorable(store, theirs)
    assert store.counters.fenced == 1


def test_a_branch_beside_a_moved_head_becomes_a_sibling(store: SessionStore) -> None:
    one, two = Turn([1, 2, 3], [3]), Turn([1, 2, 4], [3])
    lease = store.acquire(SID)
    store.commit(lease, one.snapshot, blocks=one.blocks, pivot=one.pivot)
    report = store.commit(lease, two.snapshot, blocks=two.blocks, pivot=two.pivot)
    assert (report.status, report.lease) == ("sibling", lease)
    head = store.head(SID)
    assert head is not None
    assert head.snapshot == one.id
    assert is_restorable(store, one)
    assert is_restorable(store, two)


def test_of_many_workers_that_race_exactly_one_moves_the_head(store: SessionStore) -> None:
    turns = [Turn([1, 2, n], [3]) for n in range(8)]
    lease = store.acquire(SID)
    statuses: list[str] = []

    def work(turn: Turn) -> None:
        statuses.append(store.commit(lease, turn.snapshot, blocks=turn.blocks, pivot=turn.pivot).status)

    threads = [threading.Thread(target=work, args=(turn,)) for turn in turns]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(statuses) == ["committed"] + ["sibling"] * 7
    assert all(is_restorable(store, turn) for turn in turns)


def test_a_deleted_session_is_not_brought_back_by_an_old_lease(store: SessionStore) -> None:
    first = Turn([1, 2, 3], [3])
    lease = store.acquire(SID)
    lease = store.commit(lease, first.snapshot, blocks=first.blocks, pivot=first.pivot).lease
    other = session_id("thread", "subgraph")
    commit(store, first, other)
    assert store.delete_session(SID) == 2
    assert store.head(SID) is None
    assert store.get_snapshot(SID, first.id) is None
    second = Turn([1, 2, 3, 4], [1], after=first)
    assert store.commit(lease, second.snapshot, blocks=second.blocks, pivot=second.pivot).status == "sibling"
    assert store.head(SID) is None
    assert store.get_snapshot(other, first.id) == first.snapshot


def test_a_session_removed_in_its_first_turn_is_not_brought_back(store: SessionStore) -> None:
    turn = Turn([1, 2, 3], [3])
    lease = store.acquire(SID)
    store.delete_session(SID)
    assert store.commit(lease, turn.snapshot, blocks=turn.blocks, pivot=turn.pivot).status == "sibling"
    assert store.head(SID) is None


@pytest.mark.parametrize("num_turns", [0, 1])
def test_a_lease_on_a_removed_session_is_stale_where_the_name_is_used_again(
    store: SessionStore, num_turns: int
) -> None:
    old, new = Turn([1, 2, 3], [3]), Turn([1, 2, 4], [3])
    stale = store.acquire(SID)
    for _ in range(num_turns):
        stale = store.commit(stale, old.snapshot, blocks=old.blocks, pivot=old.pivot).lease
    store.delete_session(SID)
    lease = store.acquire(SID)
    for _ in range(num_turns):
        lease = store.commit(lease, new.snapshot, blocks=new.blocks, pivot=new.pivot).lease
    late = Turn([1, 2, 3, 5], [4])
    with pytest.raises(FencedError):
        store.commit(stale, late.snapshot, blocks=late.blocks, pivot=late.pivot)
    assert store.head(SID) == lease


def flip(record: bytes) -> bytes:
    return record[:-1] + bytes([record[-1] ^ 1])


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "flipped byte": flip,
    "flipped header": lambda record: record[:20] + bytes([record[20] ^ 1]) + record[21:],
    "truncated": lambda record: record[:-1],
    "header only": lambda record: record[:50],
    "empty": lambda record: b"",
    "pickle": lambda record: pickle.dumps(record),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_record_is_a_miss_and_is_counted(store: SessionStore, client: redis.Redis, damage: str) -> None:
    turn = Turn(list(range(9)), [3, 3, 3])
    commit(store, turn)
    keys = [
        turn.block_key(store, 1),
        store.keys.snapshot(SID, turn.id),
        store.keys.side(fingerprint_hash(TARGET), turn.chains[-1], 8),
    ]
    for key in keys:
        record = client.get(key)
        assert isinstance(record, bytes)
        client.set(key, DAMAGES[damage](record))
    assert [block is None for block in store.get_blocks(TARGET, turn.chains)] == [False, True, False]
    assert store.get_snapshot(SID, turn.id) is None
    assert store.get_pivot(TARGET, turn.chains[-1], 8) is None
    assert (store.counters.corrupt, store.counters.misses, store.counters.hits) == (3, 0, 2)


def test_a_record_of_a_codec_that_is_not_known_is_a_miss_and_is_counted(
    store: SessionStore, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    compressing = SessionStore(client, codec="zstd")
    chain = chain_next(chain_root(TARGET, b""), [1])
    block = Block(chain, 1, "float32", (512,), bytes(2048))
    refs = (block.ref(),)
    snapshot = Snapshot(parent=None, fingerprint=TARGET, ids=ids_to_bytes([1, 2]), num_kv=1, blocks=refs)
    compressing.commit(compressing.acquire(SID), snapshot, blocks=[block])
    assert list(store.get_blocks(TARGET, [chain])) == [block]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)  # a worker without the library
    assert list(store.get_blocks(TARGET, [chain])) == [None]
    assert (store.counters.hits, store.counters.foreign) == (1, 1)
    report = store.commit(store.acquire(SID), snapshot, blocks=[block])
    assert report.blocks_written == 1  # it can read the block from now on, as everyone can
    assert list(store.get_blocks(TARGET, [chain])) == [block]


def test_a_damaged_record_is_written_anew_by_the_next_commit(store: SessionStore, client: redis.Redis) -> None:
    turn = Turn(list(range(6)), [3, 3])
    commit(store, turn)
    for position in (0, 1):
        client.set(turn.block_key(store, position), b"damage")
    assert list(store.get_blocks(TARGET, turn.chains)) == [None, None]
    later = Turn(list(range(7)), [1], after=turn)
    lease = store.acquire(SID)
    report = store.commit(lease, later.snapshot, blocks=[turn.blocks[0], *later.blocks], pivot=later.pivot)
    assert (report.blocks_written, report.blocks_missing) == (2, (turn.chains[1],))
    assert [block is None for block in store.get_blocks(TARGET, later.chains)] == [False, True, False]


def test_a_record_under_anothers_name_is_foreign(store: SessionStore, client: redis.Redis) -> None:
    turn = Turn(list(range(6)), [3, 3])
    commit(store, turn)
    first, second = turn.block_key(store, 0), turn.block_key(store, 1)
    elsewhere = store.keys.block(fingerprint_hash("changed weights"), turn.chains[0])
    record = client.get(first)
    assert isinstance(record, bytes)
    client.mset({second: record, elsewhere: record})
    assert list(store.get_blocks(TARGET, turn.chains)) == [turn.blocks[0], None]
    assert list(store.get_blocks("changed weights", turn.chains[:1])) == [None]
    client.delete(second)
    client.hset(second, "a", "b")
    assert list(store.get_blocks(TARGET, turn.chains)) == [turn.blocks[0], None]
    assert store.counters.foreign == 3
    assert store.counters.corrupt == 0


def test_other_weights_find_nothing(store: SessionStore) -> None:
    turn = Turn([1, 2, 3], [3])
    commit(store, turn)
    chain = chain_next(chain_root("other", b""), [1, 2, 3])
    assert list(store.get_blocks("other", [chain])) == [None]
    assert store.counters.misses == 1


def test_an_evicted_block_is_a_miss_between_hits(store: SessionStore, client: redis.Redis) -> None:
    turn = Turn(list(range(60)), [1] * 60)
    commit(store, turn)
    client.delete(turn.block_key(store, 40))
    found = list(store.get_blocks(TARGET, turn.chains))
    assert [position for position, block in enumerate(found) if block is None] == [40]
    assert store.counters.misses == 1
    later = Turn(list(range(61)), [1], after=turn)
    report = store.commit(store.acquire(SID), later.snapshot, blocks=later.blocks, pivot=later.pivot)
    assert report.blocks_missing == (turn.chains[40],)


def test_the_last_pivot_row_of_a_position_counts(store: SessionStore) -> None:
    turn = Turn([1, 2, 3], [3])
    commit(store, turn)
    other_layers = SideRow(turn.chains[-1], 2, "float32", (3, 8), os.urandom(96))
    store.commit(store.acquire(SID), turn.snapshot, blocks=turn.blocks, pivot=other_layers)
    assert store.get_pivot(TARGET, turn.chains[-1], 2) == other_layers


@pytest.mark.parametrize("text", ["", "*", "a" * 64, "A" * 64, "../" * 20, "0" * 64])
def test_a_snapshot_id_from_anywhere_is_at_most_a_miss(store: SessionStore, text: str) -> None:
    assert store.get_snapshot(SID, text) is None
    assert store.counters.misses == 1


def test_blocks_outlive_their_session_and_use_extends_both(client: redis.Redis) -> None:
    store = SessionStore(client, ttl_s=100)
    turn = Turn(list(range(6)), [3, 3])
    commit(store, turn)

    def expected(key: str) -> int:
        is_block = store.keys.kind(key.encode()) in ("block", "side")
        return 100 * BLOCK_TTL_FACTOR if is_block else 100

    def lives() -> dict[str, int]:
        return {key.decode(): client.ttl(key) for key in client.scan_iter()}

    assert len(lives()) == 5
    uses: list[Callable[[], Any]] = [
        lambda: None,
        lambda: store.touch(SID, turn.snapshot),
        lambda: (is_restorable(store, turn), store.acquire(SID)),
        lambda: commit(store, turn),
        lambda: commit(store, Turn(list(range(7)), [1], after=turn)),
    ]
    for use in uses:
        use()
        for key, life in lives().items():
            is_left_behind = use is uses[-1] and store.keys.kind(key.encode()) in ("snapshot", "side")
            assert is_left_behind or expected(key) - 5 <= life <= expected(key)
        for key in lives():
            client.expire(key, 10)


def test_tenants_with_the_same_prompt_share_nothing(client: redis.Redis) -> None:
    names = ["a", "b", "a:b", "*", "{a}"]
    turn = Turn([1, 2, 3], [3])
    stores = [SessionStore(client, tenant=name) for name in names]
    for store in stores:
        assert store.head(SID) is None
        assert list(store.get_blocks(TARGET, turn.chains)) == [None]
        commit(store, turn)
        assert {kind: used.num_keys for kind, used in store.usage().items()} == {
            "block": 1,
            "side": 1,
            "snapshot": 1,
            "head": 1,
        }
    assert client.dbsize() == 4 * len(names)
    stores[0].delete_session(SID)
    assert all(is_restorable(store, turn) for store in stores[1:])


def test_a_secret_keeps_others_blocks_out(client: redis.Redis) -> None:
    with_secret = SessionStore(client, secret=b"secret")
    turn = Turn([1, 2, 3], [3], secret=b"secret")
    commit(with_secret, turn)
    assert is_restorable(with_secret, turn)
    without = SessionStore(client)
    assert list(without.get_blocks(TARGET, turn.chains)) == [None]
    assert without.get_snapshot(SID, turn.id) is None
    assert without.counters.corrupt == 2


@pytest.mark.parametrize("thread", ["*", "{}", ":", "\n", "a" * 10_000, "}:h", "x}:c:*"])
def test_a_hostile_thread_id_names_only_its_own_session(store: SessionStore, thread: str) -> None:
    turn = Turn([1, 2, 3], [3])
    commit(store, turn)
    hostile = session_id(thread)
    assert store.head(hostile) is None
    commit(store, turn, hostile)
    store.delete_session(hostile)
    assert is_restorable(store, turn)
    head = store.head(SID)
    assert head is not None
    assert head.snapshot == turn.id


def test_every_key_is_of_a_known_kind_and_none_is_the_drafters(store: SessionStore) -> None:
    commit(store, Turn(list(range(6)), [3, 3]))
    usage = store.usage()
    assert set(usage) <= set(KINDS)
    assert usage["block"].num_keys == 2
    assert usage["block"].num_bytes > 6 * 64
    store.client.set(f"{store.keys.prefix}:draft", b"x")
    assert store.usage()["unknown"].num_keys == 1


def test_a_head_that_may_not_be_read_is_no_damaged_one(store: SessionStore, server: EmbeddedServer) -> None:
    turn = Turn([1, 2, 3], [3])
    commit(store, turn)
    before = store.head(SID)
    rights = ["+@all", "-hmget"]
    store.client.acl_setuser("half", reset=True, enabled=True, passwords=["+x"], keys=["*"], commands=rights)
    with redis.Redis(unix_socket_path=server.state.socket, username="half", password="x") as client:
        other = SessionStore(client)
        with pytest.raises(StoreUnavailableError, match=r"SESSIONS\.md"):
            other.acquire(SID)
        later = Turn([1, 2, 3, 4], [4])
        with pytest.raises(StoreUnavailableError, match=r"SESSIONS\.md"):
            other.commit(store.acquire(SID), later.snapshot, blocks=later.blocks, pivot=later.pivot)
    head = store.head(SID)
    assert before is not None
    assert head is not None
    assert (head.version, head.snapshot) == (before.version, turn.id)


@pytest.mark.parametrize("junk", [b"", b"\xff\x00", b"-1", b"nan", b"1e400", b"*", b"9" * 30])
@pytest.mark.parametrize("name", ["version", "fence", "snapshot"])
def test_a_head_that_holds_nonsense_is_made_anew(
    store: SessionStore, client: redis.Redis, name: str, junk: bytes
) -> None:
    first, second = Turn([1, 2, 3], [3]), Turn([1, 2, 3, 4], [4])
    old = store.acquire(SID)
    commit(store, first)
    client.hset(store.keys.head(SID), name, junk)
    found = store.head(SID)
    assert found is None or found.snapshot in (None, first.id)
    lease = store.acquire(SID)
    assert lease.fence > old.fence
    assert store.commit(lease, second.snapshot, blocks=second.blocks, pivot=second.pivot).status == "committed"
    with pytest.raises(FencedError):
        store.commit(old, first.snapshot, blocks=first.blocks, pivot=first.pivot)
    assert is_restorable(store, second)


def test_a_key_of_another_type_is_no_head(store: SessionStore, client: redis.Redis) -> None:
    turn = Turn([1, 2, 3], [3])
    lease = store.acquire(SID)
    client.set(store.keys.head(SID), b"planted")
    assert store.head(SID) is None
    assert store.commit(lease, turn.snapshot, blocks=turn.blocks, pivot=turn.pivot).status == "sibling"
    lease = store.acquire(SID)
    assert lease.snapshot is None
    assert store.counters.corrupt == 2
    assert store.commit(lease, turn.snapshot, blocks=turn.blocks, pivot=turn.pivot).status == "committed"


@pytest.mark.parametrize("late", range(1, 7))
def test_the_answer_to_an_earlier_commit_is_not_taken_for_a_later_ones(
    store: SessionStore, server: EmbeddedServer, late: int
) -> None:
    first, second = Turn([1, 2, 3], [3]), Turn([1, 2, 3, 4], [4])
    with Proxy(server.state.socket) as proxy:
        through = redis.Redis(unix_socket_path=proxy.socket, retry=Retry(NoBackoff(), 0))
        worker = SessionStore(through)
        lease = worker.acquire(SID)
        lease = worker.commit(lease, first.snapshot, blocks=first.blocks, pivot=first.pivot).lease
        proxy.stale_at = late
        statuses: list[str] = []
        for _ in range(3):
            try:
                statuses.append(worker.commit(lease, second.snapshot, blocks=second.blocks, pivot=second.pivot).status)
            except StoreUnavailableError:
                statuses.append("refused")
        through.close()
    assert proxy.num_faults == 1
    assert statuses[-1] in ("committed", "duplicate")
    head = store.head(SID)
    assert head is not None
    assert head.snapshot == second.id


@pytest.mark.parametrize("fault", ["foreign block", "no pivot", "wrong pivot", "wrong ids"])
def test_a_commit_that_contradicts_itself_writes_nothing(store: SessionStore, client: redis.Redis, fault: str) -> None:
    turn = Turn([1, 2, 3], [3])
    other = Turn([1, 2, 4], [3])
    lease = store.acquire(SID)
    wrong: dict[str, tuple[Snapshot, list[Block], SideRow | None]] = {
        "foreign block": (turn.snapshot, other.blocks, turn.pivot),
        "no pivot": (turn.snapshot, turn.blocks, None),
        "wrong pivot": (turn.snapshot, turn.blocks, other.pivot),
        "wrong ids": (replace(turn.snapshot, ids=other.snapshot.ids), turn.blocks, turn.pivot),
    }
    snapshot, blocks, pivot = wrong[fault]
    with pytest.raises(RecordError):
        store.commit(lease, snapshot, blocks=blocks, pivot=pivot)
    assert client.dbsize() == 1


def test_a_client_that_decodes_text_is_refused(server: EmbeddedServer) -> None:
    decoding = redis.Redis(unix_socket_path=server.state.socket, decode_responses=True)
    with pytest.raises(ConfigError, match="decode_responses=False"):
        SessionStore(decoding)


def test_a_full_server_is_an_error_and_the_head_stays(store: SessionStore, client: redis.Redis) -> None:
    first = Turn([1, 2, 3], [3])
    lease = store.acquire(SID)
    lease = store.commit(lease, first.snapshot, blocks=first.blocks, pivot=first.pivot).lease
    second = Turn(list(range(200_000)), [100_000, 100_000])
    client.config_set("maxmemory-policy", "noeviction")
    client.config_set("maxmemory", int(client.info("memory")["used_memory"]) + 2**20)
    try:
        with pytest.raises(StoreFullError, match="maxmemory"):
            store.commit(lease, second.snapshot, blocks=second.blocks, pivot=second.pivot)
        head = store.head(SID)
        assert head is not None
        assert (head.snapshot, head.version) == (first.id, 1)
        assert is_restorable(store, first)
    finally:
        client.config_set("maxmemory", 0)
    assert store.commit(lease, second.snapshot, blocks=second.blocks, pivot=second.pivot).status == "committed"
    assert is_restorable(store, second)


def test_a_killed_server_is_an_error_never_a_miss_and_loses_nothing(tmp_path: Path) -> None:
    with EmbeddedServer.start(tmp_path / "data") as server, server.client() as client:
        store = SessionStore(client)
        turn = Turn([1, 2, 3], [3])
        commit(store, turn)
        os.kill(int((tmp_path / "data" / "server.pid").read_text()), signal.SIGKILL)
        lease = Lease(SID, fence=1, version=1, snapshot=turn.id)
        calls: list[Callable[[], Any]] = [
            lambda: store.acquire(SID),
            lambda: store.head(SID),
            lambda: store.get_snapshot(SID, turn.id),
            lambda: list(store.get_blocks(TARGET, turn.chains)),
            lambda: store.get_pivot(TARGET, turn.chains[-1], 2),
            lambda: store.commit(lease, turn.snapshot, blocks=turn.blocks, pivot=turn.pivot),
            lambda: store.delete_session(SID),
            lambda: store.usage(),
        ]
        for call in calls:
            with pytest.raises(StoreUnavailableError, match="does not answer"):
                call()
        assert store.counters.misses == 0
        with EmbeddedServer.start(tmp_path / "data"):
            assert is_restorable(store, turn)
            assert store.acquire(SID).snapshot == turn.id


class CuttingProxy:
    """Stands between a client and a server and cuts every connection after so many bytes of one direction."""

    def __init__(self, upstream: str, path: Path) -> None:
        self.path = str(path)
        self.upstream = upstream
        self.budgets: dict[str, int | None] = {"requests": None, "replies": None}
        self.is_cut = False
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        self._listener.listen()
        self._run(self._accept)

    def _run(self, target: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                self._sockets += [near, far]
                if self.is_cut:
                    near.close()
                    continue
                far.connect(self.upstream)
                self._run(self._pump, near, far, "requests")
                self._run(self._pump, far, near, "replies")

    def _pump(self, source: socket.socket, sink: socket.socket, direction: str) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                with self._lock:
                    budget = self.budgets[direction]
                    if budget is not None:
                        self.budgets[direction] = max(0, budget - len(data))
                        self.is_cut |= len(data) > budget
                        data = data[:budget]
                sink.sendall(data)
                if self.is_cut:
                    break
        for each in (source, sink):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(5)
        for each in self._sockets:
            each.close()


@pytest.mark.parametrize("direction", ["requests", "replies"])
def test_a_connection_cut_anywhere_leaves_the_old_or_the_new_turn_and_a_retry_succeeds(
    store: SessionStore, server: EmbeddedServer, tmp_path: Path, direction: str
) -> None:
    tokens = list(range(40))
    old = Turn(tokens[:10], [4, 6])
    commit(store, old)
    outcomes = set()
    step, limit = (211, 9000) if direction == "requests" else (7, 160)
    for cut in range(0, limit, step):
        new = Turn([*tokens, cut], [20, 10, 1], after=old)
        lease = store.acquire(SID)
        proxy = CuttingProxy(server.state.socket, tmp_path / f"{cut}")
        through = redis.Redis(unix_socket_path=proxy.path, retry=Retry(NoBackoff(), 0))
        through.ping()
        proxy.budgets[direction] = cut
        try:
            SessionStore(through).commit(lease, new.snapshot, blocks=new.blocks, pivot=new.pivot)
            outcomes.add("answered")
        except StoreUnavailableError:
            outcomes.add("cut")
        finally:
            through.close()
            proxy.close()
        head = store.head(SID)
        assert head is not None
        if head.version == lease.version:
            assert head.snapshot == lease.snapshot
            expected = "committed"
        else:
            assert head.snapshot == new.id
            assert is_restorable(store, new)
            outcomes.add("moved")
            expected = "duplicate"
        assert is_restorable(store, old)
        report = store.commit(lease, new.snapshot, blocks=new.blocks, pivot=new.pivot)
        assert report.status == expected
        assert is_restorable(store, new)
    assert outcomes == {"answered", "cut", "moved"}

"""Session files: what comes out goes in again elsewhere, and nothing is believed of a file that is not whole."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import stat
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from dlite_agent.errors import (
    ConfigError,
    ForeignFileError,
    SessionExistsError,
    SessionFileError,
    StoreFullError,
    StoreUnavailableError,
    UnknownSessionError,
)
from dlite_agent.sessions.checking import verify
from dlite_agent.sessions.client import RedisClient
from dlite_agent.sessions.collecting import collect_garbage, remove_session
from dlite_agent.sessions.embedded import EmbeddedServer
from dlite_agent.sessions.inventory import take_inventory
from dlite_agent.sessions.keys import SessionName, fingerprint_hash
from dlite_agent.sessions.records import Snapshot
from dlite_agent.sessions.session_file import _digest
from dlite_agent.sessions.store import SessionStore
from dlite_agent.sessions.transfer import export_session, import_session

Commit = Callable[..., Snapshot]
ONE = SessionName("one\n*\ud800", "model")


@pytest.fixture
def store(server: EmbeddedServer) -> Iterator[SessionStore]:
    client = server.client()
    client.flushall()
    yield SessionStore(client)
    client.close()


@pytest.fixture
def exported(store: SessionStore, commit_turn: Commit, tmp_path: Path) -> Path:
    """The file of a session of two turns, which is not in the store any more."""
    commit_turn(store, ONE, range(20), [8, 8])
    commit_turn(store, ONE, range(30), [8, 8, 8])
    path = tmp_path / "one.session"
    export_session(store, ONE.sid, path)
    remove_session(store, ONE.sid, with_blocks=True)
    assert is_empty(store.client)
    return path


def is_empty(client: RedisClient) -> bool:
    return client.dbsize() == 0


def records(client: RedisClient) -> dict[bytes, bytes]:
    """Every record that is not a head."""
    found = {key: client.get(key) for key in client.scan_iter() if not key.endswith(b":h")}
    return {key: record for key, record in found.items() if isinstance(record, bytes)}


def test_a_session_comes_back_as_it_was(store: SessionStore, commit_turn: Commit, tmp_path: Path) -> None:
    commit_turn(store, ONE, range(20), [8, 8])
    last = commit_turn(store, ONE, range(30), [8, 8, 8])
    before = records(store.client)
    path = tmp_path / "one.session"
    done = export_session(store, ONE.sid, path)
    assert (done.num_snapshots, done.num_records, done.num_missing) == (2, 5, 0)
    assert done.num_bytes == path.stat().st_size
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]
    remove_session(store, ONE.sid, with_blocks=True)
    taken = import_session(store, path)
    assert records(store.client) == before
    assert taken.bytes_written == sum(map(len, before.values()))
    (info,) = take_inventory(store).sessions
    assert (info.name, info.num_turns, info.snapshot_id) == (ONE, 2, last.snapshot_id)
    assert not verify(store).findings
    commit_turn(store, ONE, range(40), [8, 8, 8, 8])


def test_a_session_that_is_there_is_not_overwritten(store: SessionStore, exported: Path) -> None:
    import_session(store, exported)
    head = store.client.hgetall(store.keys.head(ONE.sid))
    with pytest.raises(SessionExistsError, match="another name"):
        import_session(store, exported)
    assert store.client.hgetall(store.keys.head(ONE.sid)) == head
    again = import_session(store, exported, thread_id="two")
    assert again.sid == SessionName("two", "model").sid
    assert store.usage()["block"].num_keys == 3  # stored once
    assert not verify(store).findings


def test_what_was_gone_at_the_export_is_counted_and_no_damage(
    store: SessionStore, commit_turn: Commit, tmp_path: Path
) -> None:
    snapshot = commit_turn(store, ONE, range(20), [8, 8])
    keys = [store.keys.block(fingerprint_hash("target"), ref.chain) for ref in snapshot.blocks]
    store.client.unlink(keys[0])
    store.client.set(keys[1], b"junk")
    path = tmp_path / "one.session"
    assert export_session(store, ONE.sid, path).num_missing == 2
    store.client.flushall()
    assert import_session(store, path).num_missing == 2
    assert store.get_snapshot(ONE.sid, snapshot.snapshot_id) == snapshot


@pytest.mark.parametrize("where", ["start", "header", "snapshot", "block", "end"])
def test_every_flipped_bit_is_refused_before_anything_is_written(
    store: SessionStore, exported: Path, where: str
) -> None:
    data = exported.read_bytes()
    position = {"start": 3, "header": 60, "snapshot": 600, "block": len(data) // 2, "end": len(data) - 5}[where]
    exported.write_bytes(data[:position] + bytes([data[position] ^ 4]) + data[position + 1 :])
    with pytest.raises(SessionFileError):
        import_session(store, exported)
    assert is_empty(store.client)


def test_every_truncation_and_every_addition_is_refused(store: SessionStore, exported: Path) -> None:
    data = exported.read_bytes()
    for size in [*range(0, len(data), 97), len(data) - 1]:
        exported.write_bytes(data[:size])
        with pytest.raises(SessionFileError):
            import_session(store, exported)
    exported.write_bytes(data + b"x")
    with pytest.raises(SessionFileError, match="end"):
        import_session(store, exported)
    for junk in (b"", pickle.dumps({"a": 1}), b"\x00" * 4096):
        exported.write_bytes(junk)
        with pytest.raises(SessionFileError):
            import_session(store, exported)
    assert is_empty(store.client)


def frames(data: bytes) -> list[tuple[bytes, bytes]]:
    found, position = [], len(b"dlite session\n")
    while position < len(data):
        name_size, size = struct.unpack_from("<HI", data, position)
        start = position + 6
        found.append((data[start : start + name_size], data[start + name_size : start + name_size + size]))
        position = start + name_size + size + 32
    return found


def write_frames(path: Path, parts: list[tuple[bytes, bytes]]) -> None:
    """Write a file whose digests are right, whatever its parts are: what a forger without a secret to find would do."""
    whole = hashlib.blake2b(digest_size=32, person=b"file")
    out = [b"dlite session\n"]
    for number, (name, content) in enumerate(parts):
        body = struct.pack("<Q", number) + whole.digest() if name == b"end" else content
        head = struct.pack("<HI", len(name), len(body)) + name
        digest = _digest(b"", head, body)
        whole.update(digest)
        out += [head, body, digest]
    path.write_bytes(b"".join(out))


def test_a_file_that_is_written_anew_is_the_same(exported: Path) -> None:
    data = exported.read_bytes()
    write_frames(exported, frames(data))
    assert exported.read_bytes() == data


@pytest.mark.parametrize(
    "forgery",
    [
        "lose the head's snapshot",
        "repeat a block",
        "add a head",
        "add a stranger's block",
        "flip a record",
        "no header",
    ],
)
def test_a_forged_file_with_right_digests_is_refused(
    store: SessionStore, commit_turn: Commit, exported: Path, tmp_path: Path, forgery: str
) -> None:
    parts = frames(exported.read_bytes())
    names = [name for name, _ in parts]
    assert [name[:1] for name in names] == [b"h", b"{", b"{", b"b", b"b", b"s", b"b", b"s", b"e"]
    at = json.loads(parts[0][1])["snapshot_id"].encode()
    if forgery == "lose the head's snapshot":
        parts = [part for part in parts if at not in part[0]]
    elif forgery == "repeat a block":
        parts.insert(4, parts[3])
    elif forgery == "add a head":
        parts.insert(1, (f"{{{ONE.sid}}}:h".encode(), b"x"))
    elif forgery == "add a stranger's block":
        other = SessionName("other")
        commit_turn(store, other, range(50, 60), [8])
        export_session(store, other.sid, tmp_path / "other")
        parts.insert(3, next(part for part in frames((tmp_path / "other").read_bytes()) if part[0][:1] == b"b"))
        store.client.flushall()
    elif forgery == "flip a record":
        name, content = parts[3]
        parts[3] = (name, content[:-1] + bytes([content[-1] ^ 1]))
    else:
        parts = parts[1:]
    write_frames(exported, parts)
    with pytest.raises(SessionFileError):
        import_session(store, exported)
    assert is_empty(store.client)


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 2},
        {"sid": "*"},
        {"extra": 1},
        {"num_turns": 0},
        {"num_turns": "1"},
        {"thread": "zz"},
        {"thread": "ff"},
        {"thread": "6f6e65"},
        {"target": "0" * 32},
        {"prefix": "dlite:1:*"},
    ],
)
def test_a_header_that_does_not_fit_is_refused(store: SessionStore, exported: Path, changes: dict[str, object]) -> None:
    parts = frames(exported.read_bytes())
    parts[0] = (parts[0][0], json.dumps(json.loads(parts[0][1]) | changes).encode())
    write_frames(exported, parts)
    with pytest.raises(SessionFileError):
        import_session(store, exported)
    assert is_empty(store.client)


def test_files_of_another_tenant_secret_or_target_are_refused(store: SessionStore, exported: Path) -> None:
    with pytest.raises(ForeignFileError, match="tenant"):
        import_session(SessionStore(store.client, tenant="other"), exported)
    with pytest.raises(SessionFileError, match="secret"):
        import_session(SessionStore(store.client, secret=b"theirs"), exported)
    with pytest.raises(ForeignFileError, match="target"):
        import_session(store, exported, target="0" * 32)
    assert is_empty(store.client)
    import_session(store, exported, target=fingerprint_hash("target").hex())


def test_an_import_that_fails_half_way_leaves_no_session(store: SessionStore, exported: Path) -> None:
    store.client.config_set("maxmemory", store.client.info("memory")["used_memory"] + 500)
    store.client.config_set("maxmemory-policy", "noeviction")
    try:
        with pytest.raises(StoreFullError):
            import_session(store, exported)
        assert store.head(ONE.sid) is None
    finally:
        store.client.config_set("maxmemory", 0)
    collect_garbage(store, grace_s=0)
    assert is_empty(store.client)
    import_session(store, exported)
    assert not verify(store).findings


def test_a_session_without_a_name_needs_one_where_it_is_to_have_another(
    store: SessionStore, commit_turn: Commit, tmp_path: Path
) -> None:
    commit_turn(store, ONE, range(20), [8, 8], is_named=False)
    path = tmp_path / "one.session"
    export_session(store, ONE.sid, path)
    store.client.flushall()
    with pytest.raises(ConfigError, match="namespace"):
        import_session(store, path, thread_id="two")
    assert is_empty(store.client)
    assert import_session(store, path).sid == ONE.sid
    assert import_session(store, path, thread_id="two", namespace="n").sid == SessionName("two", "n").sid


def test_what_cannot_be_exported_is_said(store: SessionStore, exported: Path, tmp_path: Path) -> None:
    with pytest.raises(UnknownSessionError, match="sessions ls"):
        export_session(store, ONE.sid, tmp_path / "new")
    import_session(store, exported)
    with pytest.raises(SessionFileError, match="exists"):
        export_session(store, ONE.sid, exported)
    with pytest.raises(SessionFileError, match="cannot be written"):
        export_session(store, ONE.sid, tmp_path / "missing" / "file")
    with pytest.raises(SessionFileError, match="cannot be read"):
        import_session(store, tmp_path / "missing")


@pytest.mark.parametrize("name", ["a file/new", "x" * 300, "x" * 250, "a link to itself/new"])
def test_a_place_that_cannot_be_written_or_read_is_one_line(
    store: SessionStore, exported: Path, tmp_path: Path, name: str
) -> None:
    (tmp_path / "a file").touch()
    (tmp_path / "a link to itself").symlink_to("a link to itself")
    import_session(store, exported)
    with pytest.raises(SessionFileError, match="cannot be written"):
        export_session(store, ONE.sid, tmp_path / name)
    with pytest.raises(SessionFileError, match="cannot be read"):
        import_session(store, tmp_path / name)


def test_a_draft_of_another_export_is_left_alone(store: SessionStore, exported: Path, tmp_path: Path) -> None:
    import_session(store, exported)
    draft = tmp_path / f"new.{os.getpid()}.part"
    draft.touch()
    with pytest.raises(SessionFileError, match="cannot be written"):
        export_session(store, ONE.sid, tmp_path / "new")
    assert draft.exists()


def test_a_server_that_goes_meanwhile_is_not_called_a_fault_of_the_file(exported: Path, tmp_path: Path) -> None:
    server = EmbeddedServer.start(tmp_path / "server")
    lost = redis.Redis(unix_socket_path=server.state.socket, retry=Retry(NoBackoff(), 0))
    store = SessionStore(lost)
    server.stop()
    with pytest.raises(StoreUnavailableError, match="check that the server runs"):
        import_session(store, exported)


def test_a_namespace_alone_names_no_session(store: SessionStore, exported: Path) -> None:
    with pytest.raises(ConfigError, match="without a thread"):
        import_session(store, exported, namespace="n")
    assert is_empty(store.client)

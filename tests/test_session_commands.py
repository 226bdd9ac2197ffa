"""`dlite-agent sessions`: the commands on a real server, as people and scripts call them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dlite_agent.cli import main
from dlite_agent.sessions.embedded import EmbeddedServer
from dlite_agent.sessions.keys import SessionName, fingerprint_hash
from dlite_agent.sessions.records import Snapshot
from dlite_agent.sessions.store import SessionStore
from dlite_agent.testing import write_tiny_chat_model

Commit = Callable[..., Snapshot]
ONE = SessionName("one", "model")
HOSTILE = ["*", "{}", "a:b", "x\ny", "\x1b[2J", "é☃", "a" * 10_000, "--json", ""]


@pytest.fixture
def store(server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[SessionStore]:
    monkeypatch.setenv("REDIS_URL", f"unix://{server.state.socket}")
    client = server.client()
    client.flushall()
    yield SessionStore(client)
    client.close()


@pytest.fixture
def sessions(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command that must end with a code; returns what it printed."""

    def run(*arguments: str, code: int = 0) -> str:
        capsys.readouterr()
        assert main(["sessions", *arguments]) == code
        printed = capsys.readouterr()
        return printed.out if code == 0 else printed.out + printed.err

    return run


def as_json(text: str) -> dict[str, Any]:
    (line,) = text.splitlines()
    found: dict[str, Any] = json.loads(line)
    return found


def test_an_empty_store_is_no_error(store: SessionStore, sessions: Callable[..., str]) -> None:
    for action in ("ls", "du", "gc", "verify"):
        assert sessions(action)
    assert as_json(sessions("ls", "--json")) == {"sessions": []}


def test_sessions_are_listed_for_people_and_for_scripts(
    store: SessionStore, commit_turn: Commit, sessions: Callable[..., str]
) -> None:
    snapshot = commit_turn(store, ONE, range(20), [8, 8])
    header, row = sessions("ls").splitlines()
    assert header.split()[:3] == ["thread", "id", "turns"]
    assert row.startswith(f"one [model]  {ONE.sid[:12]}  1")
    (found,) = as_json(sessions("ls", "--json"))["sessions"]
    assert (found["thread"], found["namespace"], found["sid"]) == ("one", "model", ONE.sid)
    assert (found["num_turns"], found["num_blocks"], found["num_shared"]) == (1, 2, 0)
    shown = sessions("show", "one")
    assert snapshot.snapshot_id in shown
    assert fingerprint_hash("target").hex() in shown
    assert snapshot.snapshot_id in sessions("show", "--id", ONE.sid[:6])
    (found,) = as_json(sessions("show", "one", "--json"))["sessions"]
    assert [one["id"] for one in found["snapshots"]] == [snapshot.snapshot_id]
    assert "block" in sessions("du")
    assert as_json(sessions("du", "--json"))["kinds"]["block"]["keys"] == 2


@pytest.mark.parametrize("text", HOSTILE)
def test_names_that_a_terminal_would_act_on_are_escaped(
    store: SessionStore, commit_turn: Commit, sessions: Callable[..., str], text: str
) -> None:
    commit_turn(store, SessionName(text, "model"), range(9), [8])
    out = sessions("ls")
    assert len(out.splitlines()) == 2
    assert "\x1b" not in out
    assert max(map(len, out.splitlines())) < 160
    (found,) = as_json(sessions("ls", "--json"))["sessions"]
    assert found["thread"] == text[:1024]
    assert sessions("show", "--", text)
    sessions("rm", "--", text)
    assert store.client.keys("*:h") == []


def test_a_terminal_that_knows_only_ascii_is_no_trouble(
    store: SessionStore, commit_turn: Commit, server: EmbeddedServer
) -> None:
    commit_turn(store, SessionName("é☃", "model"), range(9), [8])
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "TERM": "dumb", "COLUMNS": "20"}
    command = [sys.executable, "-m", "dlite_agent.cli", "sessions", "ls"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert r"\xe9\u2603 [model]" in done.stdout
    assert len(done.stdout.splitlines()) == 2


def test_a_session_travels_by_file(
    store: SessionStore, commit_turn: Commit, sessions: Callable[..., str], tmp_path: Path
) -> None:
    commit_turn(store, ONE, range(20), [8, 8])
    path = tmp_path / "one"
    assert "1 snapshots, 3 records" in sessions("export", "one", str(path))
    assert "SessionExistsError" in sessions("import", str(path), code=1)
    sessions("rm", "one", "--gc")
    assert store.client.dbsize() == 0
    assert ONE.sid in sessions("import", str(path))
    target = fingerprint_hash("target").hex()
    taken = as_json(sessions("import", str(path), "--thread", "two", "--target", target, "--json"))
    assert taken["sid"] == SessionName("two", "model").sid
    assert "ForeignFileError" in sessions("import", str(path), "--thread", "x", "--target", "0" * 32, code=1)
    path.write_bytes(path.read_bytes()[:-1])
    assert "SessionFileError" in sessions("import", str(path), "--thread", "x", code=1)
    assert "all sound" in sessions("verify")


def test_a_fork_shares_its_blocks(store: SessionStore, commit_turn: Commit, sessions: Callable[..., str]) -> None:
    first = commit_turn(store, ONE, range(20), [8, 8])
    commit_turn(store, ONE, range(30), [8, 8, 8])
    assert "3 records shared" in sessions("fork", "one", "two", "--snapshot", first.snapshot_id)
    assert "SessionExistsError" in sessions("fork", "one", "two", code=1)
    assert as_json(sessions("fork", "--id", ONE.sid, "three", "--json"))["num_tokens"] == 30
    found = as_json(sessions("ls", "--json"))["sessions"]
    assert {(info["thread"], info["namespace"], info["num_tokens"]) for info in found} == {
        ("one", "model", 30),
        ("two", "model", 20),
        ("three", "model", 30),
    }


def test_a_thread_with_several_sessions_is_asked_which(
    store: SessionStore, commit_turn: Commit, sessions: Callable[..., str]
) -> None:
    for namespace in ("model", "sub|model"):
        commit_turn(store, SessionName("one", namespace), range(9), [8])
    assert "--namespace" in sessions("fork", "one", "two", code=1)
    sessions("fork", "one", "two", "--namespace", "sub|model")
    (found,) = as_json(sessions("show", "two", "--json"))["sessions"]
    assert found["namespace"] == "sub|model"
    assert len(as_json(sessions("rm", "one", "--json"))["removed"]) == 2


def test_removing_leaves_blocks_to_the_collection(
    store: SessionStore, commit_turn: Commit, sessions: Callable[..., str]
) -> None:
    commit_turn(store, ONE, range(20), [8, 8])
    assert "1 x head, 1 x snapshot" in sessions("rm", "one")
    assert "UnknownSessionError" in sessions("rm", "one", code=1)
    assert "would remove 2 x block, 1 x side" in sessions("gc", "--dry-run")
    assert "3 spared" in sessions("gc")
    assert as_json(sessions("gc", "--grace", "0", "--json"))["num_removed"] == {"block": 2, "side": 1}
    assert "ConfigError" in sessions("gc", "--grace", "-1", code=1)


def test_damage_is_a_finding_and_an_exit_code(
    store: SessionStore, commit_turn: Commit, sessions: Callable[..., str]
) -> None:
    snapshot = commit_turn(store, ONE, range(20), [8, 8])
    assert sessions("verify").startswith("5 records")
    key = store.keys.block(fingerprint_hash("target"), snapshot.blocks[0].chain)
    store.client.set(key, b"junk")
    assert f"damaged  {key}: the record has 4 bytes; expected at least 172\n" in sessions("verify", code=1)
    (finding,) = as_json(sessions("verify", "--json", code=1))["findings"]
    assert (finding["key"], finding["fault"]) == (key, "damaged")


def test_tenants_and_secrets_are_apart(
    store: SessionStore, commit_turn: Commit, sessions: Callable[..., str], tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    commit_turn(SessionStore(store.client, tenant="other", secret=b"secret"), ONE, range(20), [8, 8])
    assert as_json(sessions("ls", "--json"))["sessions"] == []
    assert "all sound" in sessions("verify", "--tenant", "other", "--secret-file", str(secret))
    assert "damaged" in sessions("verify", "--tenant", "other", code=1)
    assert "RecordError" in sessions("gc", "--tenant", "other", "--grace", "0", code=1)
    assert "--secret-file" in sessions("ls", "--secret-file", str(tmp_path / "none"), code=1)


def test_a_conversation_held_on_the_command_line_is_found_by_its_thread(
    store: SessionStore,
    sessions: Callable[..., str],
    type_lines: Callable[..., None],
    tmp_path: Path,
    command_home: None,
) -> None:
    folder = write_tiny_chat_model(tmp_path / "model", max_position_embeddings=16384)
    type_lines("hi", "more")
    arguments = ["--model", str(folder), "--workspace", str(tmp_path), "--max-tokens", "5", "--thread", "my thread*"]
    assert main(["run", *arguments]) == 0
    (found,) = as_json(sessions("show", "my thread*", "--json"))["sessions"]
    assert (found["thread"], found["num_turns"]) == ("my thread*", 2)
    assert "all sound" in sessions("verify")
    sessions("fork", "my thread*", "branch")
    path = tmp_path / "file"
    sessions("export", "branch", str(path))
    sessions("rm", "branch", "--gc")
    assert "all sound" in sessions("verify")
    sessions("import", str(path))
    assert {info["thread"] for info in as_json(sessions("ls", "--json"))["sessions"]} == {"my thread*", "branch"}
    assert "all sound" in sessions("verify")

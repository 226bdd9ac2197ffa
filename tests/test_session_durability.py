"""Commits in the background, on a real server: only the session's next call waits for them, and none goes wrong."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from langchain_core.messages import HumanMessage
from langchain_core.runnables import RunnableConfig

from dlite_agent import ChatDLite, Settings
from dlite_agent.config import Durability
from dlite_agent.drafters.lookup import LookupDrafter
from dlite_agent.engine.decode import decode
from dlite_agent.engine.request import Request
from dlite_agent.engine.target import Target
from dlite_agent.live_session import LiveSession
from dlite_agent.runtime import close_all
from dlite_agent.session_keeper import Committed, Reuse, SessionKeeper
from dlite_agent.sessions.checking import verify
from dlite_agent.sessions.client import RedisClient
from dlite_agent.sessions.embedded import EmbeddedServer
from dlite_agent.sessions.keys import session_id
from dlite_agent.sessions.store import SessionStore
from dlite_agent.testing import write_tiny_chat_model

KEY = session_id("thread")
PROMPT = [1 + i * 7 % 90 for i in range(37)]


@pytest.fixture
def store(server: EmbeddedServer, request: pytest.FixtureRequest) -> SessionStore:
    return SessionStore(server.client(), tenant=request.node.name)


@contextmanager
def writes_held(client: RedisClient) -> Iterator[None]:
    """Have the server answer reads, but no write until the end of the body."""
    client.client_pause(600_000, all=False)
    try:
        yield
    finally:
        client.client_unpause()


def keeper(
    target: Target, store: SessionStore | None, durability: Durability = "async", **options: int
) -> SessionKeeper:
    """A keeper without memory: what another process would have."""
    return SessionKeeper(target, store, block_tokens=8, durability=durability, **options)


def turn(
    keeper: SessionKeeper, prompt: Sequence[int], *, key: str = KEY, snapshot_id: str | None = None
) -> tuple[list[int], Reuse, Committed | None]:
    live = keeper.checkout(key, is_stored=True, snapshot_id=snapshot_id)
    reuse = keeper.restore(live, np.asarray(prompt, dtype=np.int32))
    steps = list(decode(keeper.target, live.state, LookupDrafter(), Request(prompt, max_new_tokens=10)))
    committed = keeper.commit(live)
    keeper.checkin(key, live)
    return [token for step in steps for token in step.tokens], reuse, committed


def cold(target: Target, prompt: Sequence[int]) -> list[int]:
    return turn(keeper(target, None), prompt)[0]


def committed_turn(keeper: SessionKeeper, prompt: Sequence[int]) -> tuple[list[int], str]:
    tokens, _, committed = turn(keeper, prompt)
    assert committed is not None
    return tokens, committed.snapshot_id


def at(store: SessionStore) -> str | None:
    head = store.head(KEY)
    return head.snapshot if head else None


def test_a_turn_ends_before_it_is_stored_and_knows_its_snapshot(llama: Target, store: SessionStore) -> None:
    warm = keeper(llama, store)
    live = warm.checkout(KEY, is_stored=True)
    list(decode(llama, live.state, LookupDrafter(), Request(PROMPT, max_new_tokens=10)))
    with writes_held(store.client):
        committed = warm.commit(live)  # in a turn-durable keeper this would not return
        assert committed is not None
        assert committed.num_bytes > 0
        assert at(store) is None
    warm.flush()
    assert at(store) == committed.snapshot_id
    snapshot = store.get_snapshot(KEY, committed.snapshot_id)
    assert snapshot is not None
    assert snapshot.token_ids().tolist() == live.state.ids.tolist()


@pytest.mark.parametrize("durability", ["turn", "async"])
def test_what_is_stored_does_not_depend_on_when(llama: Target, store: SessionStore, durability: Durability) -> None:
    other = SessionStore(store.client, tenant=f"{store.keys.tenant} as it was")
    plans: list[tuple[SessionStore, Durability]] = [(store, durability), (other, "turn")]
    ids = []
    for place, how in plans:
        warm = keeper(llama, place, how)
        first, one = committed_turn(warm, PROMPT)
        _, two = committed_turn(warm, [*PROMPT, *first, 5, 6])
        warm.flush()
        assert at(place) == two
        assert not verify(place).findings
        assert place.counters.committed == 2
        ids.append((one, two))
    assert ids[0] == ids[1]
    assert {kind: use.num_keys for kind, use in store.usage().items()} == {
        kind: use.num_keys for kind, use in other.usage().items()
    }


def test_the_next_call_on_a_session_waits_for_its_commit(llama: Target, store: SessionStore) -> None:
    warm = keeper(llama, store)
    live = warm.checkout(KEY, is_stored=True)
    list(decode(llama, live.state, LookupDrafter(), Request(PROMPT, max_new_tokens=10)))
    found: list[LiveSession] = []
    with writes_held(store.client):
        committed = warm.commit(live)
        warm.checkin(KEY, live)
        thread = threading.Thread(target=lambda: found.append(warm.checkout(KEY, is_stored=True)))
        thread.start()
        thread.join(0.2)  # time enough to go wrong in
        assert thread.is_alive()
    thread.join()
    assert committed is not None
    assert found[0].parent == committed.snapshot_id
    assert found[0].lease is not None
    assert found[0].lease.version == 1


def test_a_session_that_left_the_ram_while_its_commit_waited_is_found_in_the_store(
    llama: Target, store: SessionStore
) -> None:
    warm = keeper(llama, store, budget_bytes=1)
    live, other = warm.checkout(KEY, is_stored=True), warm.checkout(session_id("other"), is_stored=True)
    list(decode(llama, live.state, LookupDrafter(), Request(PROMPT, max_new_tokens=10)))
    with writes_held(store.client):
        warm.commit(live)
        warm.checkin(KEY, live)
        warm.checkin(session_id("other"), other)  # over the budget: the first is dropped
    _, reuse, _ = turn(warm, [*PROMPT, 3, 3])
    assert (reuse.from_ram, reuse.from_store) == (0, len(PROMPT))
    assert store.counters.fenced == 0


def test_a_failed_commit_is_logged_and_counted_and_made_up_for(
    llama: Target, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = EmbeddedServer.start(tmp_path)
    store = SessionStore(server.client())
    warm = keeper(llama, store)
    live = warm.checkout(KEY, is_stored=True)
    list(decode(llama, live.state, LookupDrafter(), Request(PROMPT, max_new_tokens=10)))
    server.stop()
    lost = warm.commit(live)
    warm.checkin(KEY, live)
    warm.flush()
    assert "not stored" in caplog.text
    assert store.counters.failed == 1
    assert lost is not None
    with EmbeddedServer.start(tmp_path):
        longer = [*PROMPT, *live.state.ids.tolist()[len(PROMPT) :], 5, 6]
        tokens, reuse, committed = turn(warm, longer, snapshot_id=lost.snapshot_id)
        assert reuse.from_ram == len(longer) - 3
        assert tokens == cold(llama, longer)
        warm.flush()
        assert committed is not None
        assert at(store) == committed.snapshot_id
        assert not verify(store).findings
        _, reuse, _ = turn(keeper(llama, store), [*longer, *tokens, 7])
        assert reuse.from_store == len(longer) + len(tokens) - 1


def test_a_stale_worker_is_fenced_in_the_background_and_goes_on(llama: Target, store: SessionStore) -> None:
    stale = keeper(llama, store)
    live = stale.checkout(KEY, is_stored=True)
    list(decode(llama, live.state, LookupDrafter(), Request([1, 2, 3], max_new_tokens=4)))
    other = keeper(llama, store)
    _, theirs = committed_turn(other, PROMPT)
    other.flush()
    assert stale.commit(live) is not None
    stale.checkin(KEY, live)
    stale.flush()
    assert store.counters.fenced == 1
    assert at(store) == theirs
    tokens, _, committed = turn(stale, [1, 2, 3, 4])
    stale.flush()
    assert committed is not None
    assert at(store) == committed.snapshot_id
    assert tokens == cold(llama, [1, 2, 3, 4])


def test_closing_stores_what_waits_and_later_commits_at_once(llama: Target, store: SessionStore) -> None:
    warm = keeper(llama, store)
    first, _ = committed_turn(warm, PROMPT)
    warm.close()
    assert store.counters.committed == 1
    _, second = committed_turn(warm, [*PROMPT, *first, 5])
    assert at(store) == second


def test_without_durability_nothing_is_written_nobody_fenced_and_all_is_read(
    llama: Target, store: SessionStore
) -> None:
    worker = keeper(llama, store, "turn")
    first, _ = committed_turn(worker, PROMPT)
    client = store.client
    before = {key: client.dump(key) for key in client.scan_iter(match=store.keys.everything())}
    tokens, reuse, committed = turn(keeper(llama, store, "none"), [*PROMPT, *first, 5])
    assert committed is None
    assert reuse.from_store == len(PROMPT) + len(first) - 1
    assert tokens == cold(llama, [*PROMPT, *first, 5])
    assert {key: client.dump(key) for key in client.scan_iter(match=store.keys.everything())} == before
    committed_turn(worker, [*PROMPT, *first, 5])
    assert store.counters.fenced == 0


CHILD = """
import os, signal, sys
sys.path.insert(0, os.path.dirname(sys.argv[1]))
from importlib.util import module_from_spec, spec_from_file_location
spec = spec_from_file_location("durability", sys.argv[1])
tests = module_from_spec(spec)
spec.loader.exec_module(tests)
import redis, torch
from dlite_agent.testing import tiny_target
torch.set_num_threads(1)
client = redis.Redis(unix_socket_path=sys.argv[2])
store = tests.SessionStore(client, tenant=sys.argv[3])
warm = tests.keeper(tiny_target("llama"), store)
first, one = tests.committed_turn(warm, tests.PROMPT)
warm.flush()
if sys.argv[4] == "kill":
    client.client_pause(600_000, all=False)
live = warm.checkout(tests.KEY, is_stored=True)
longer = [*tests.PROMPT, *first, 5]
list(tests.decode(warm.target, live.state, tests.LookupDrafter(), tests.Request(longer, max_new_tokens=10)))
two = warm.commit(live).snapshot_id
print(one, two, *live.state.ids.tolist()[len(longer):], flush=True)
if sys.argv[4] == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["exit", "kill"])
def test_an_exit_loses_nothing_and_a_crash_at_most_what_was_waiting(
    llama: Target, store: SessionStore, server: EmbeddedServer, end: str
) -> None:
    arguments = [sys.executable, "-c", CHILD, __file__, server.state.socket, store.keys.tenant, end]
    try:
        done = subprocess.run(arguments, capture_output=True, text=True, env=dict(os.environ), check=False)
    finally:
        store.client.client_unpause()
    assert done.returncode == (0 if end == "exit" else -signal.SIGKILL), done.stderr
    one, two, *numbers = done.stdout.split()
    second = [int(number) for number in numbers]
    assert at(store) == (two if end == "exit" else one)
    first = cold(llama, PROMPT)
    assert second == cold(llama, [*PROMPT, *first, 5])
    longer = [*PROMPT, *first, 5, *second, 6]
    tokens, reuse, committed = turn(keeper(llama, store, "turn"), longer, snapshot_id=two)
    assert reuse.from_store == (len(longer) - 2 if end == "exit" else len(PROMPT) + len(first) - 1)
    assert tokens == cold(llama, longer)
    assert committed is not None
    assert at(store) == committed.snapshot_id
    assert not verify(store).findings


def test_a_chat_model_names_a_snapshot_that_its_closing_has_stored(store: SessionStore, tmp_path: Path) -> None:
    folder = write_tiny_chat_model(tmp_path / "model")
    settings = Settings(home=tmp_path, redis_url=None, threads=1, offline=True, durability="async")
    model = ChatDLite(model=str(folder), settings=settings, max_tokens=8, session_store=store)
    config: RunnableConfig = {"configurable": {"thread_id": "thread"}}
    first = model.invoke([HumanMessage("hello")], config)
    second = model.invoke([HumanMessage("hello"), first, HumanMessage("more")], config)
    close_all()
    named = [message.response_metadata["dlite"]["snapshot"] for message in (first, second)]
    assert at(store) == named[1]
    snapshot = store.get_snapshot(KEY, named[1])
    assert snapshot is not None
    assert snapshot.parent == named[0]

"""Live sessions and Redis: what is stored is enough to go on exactly, and what is missing costs time, never tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from dlite_agent.drafters.lookup import LookupDrafter
from dlite_agent.drafters.null import NullDrafter
from dlite_agent.engine.decode import decode, resume
from dlite_agent.engine.request import Request
from dlite_agent.engine.state import TargetState
from dlite_agent.engine.target import Target
from dlite_agent.live_session import LiveSession
from dlite_agent.session_keeper import Reuse, SessionKeeper
from dlite_agent.sessions.embedded import EmbeddedServer
from dlite_agent.sessions.inventory import take_inventory
from dlite_agent.sessions.keys import KINDS, SessionName, fingerprint_hash, session_id
from dlite_agent.sessions.records import Block
from dlite_agent.sessions.store import SessionStore
from dlite_agent.testing import tiny_target

KEY = session_id("thread")
BLOCK = 8


@pytest.fixture
def store(server: EmbeddedServer, request: pytest.FixtureRequest) -> SessionStore:
    return SessionStore(server.client(), tenant=request.node.name)


def keeper(target: Target, store: SessionStore | None) -> SessionKeeper:
    """A keeper without memory: what another process would have."""
    return SessionKeeper(target, store, block_tokens=BLOCK)


def turn(
    keeper: SessionKeeper, prompt: Sequence[int], *, key: str = KEY, tokens: int = 10, snapshot_id: str | None = None
) -> tuple[list[int], Reuse, int, str | None]:
    """One call: returns its tokens, where rows came from, how many were prefilled, and the snapshot."""
    live = keeper.checkout(key, is_stored=True, snapshot_id=snapshot_id)
    reuse = keeper.restore(live, np.asarray(prompt, dtype=np.int32))
    steps = list(decode(keeper.target, live.state, LookupDrafter(), Request(prompt, max_new_tokens=tokens)))
    committed = keeper.commit(live)
    keeper.checkin(key, live)
    generated = [token for step in steps for token in step.tokens]
    return generated, reuse, steps[0].num_prefilled, None if committed is None else committed.snapshot_id


def cold(target: Target, prompt: Sequence[int], tokens: int = 10) -> list[int]:
    return turn(keeper(target, None), prompt, tokens=tokens)[0]


PROMPT = [1 + i * 7 % 90 for i in range(37)]


def test_another_process_prefills_only_what_was_not_committed(target: Target, store: SessionStore) -> None:
    first, *_ = turn(keeper(target, store), PROMPT)
    longer = [*PROMPT, *first, 5, 6, 7]
    second, reuse, prefilled, _ = turn(keeper(target, store), longer)
    assert reuse.from_store == len(PROMPT) + len(first) - 1  # all but the anchor, which was never run
    assert prefilled == 4
    assert second == cold(target, longer)


def test_the_same_process_needs_no_store(target: Target, store: SessionStore) -> None:
    warm = keeper(target, store)
    first, *_ = turn(warm, PROMPT)
    hits = store.counters.hits
    _, reuse, prefilled, _ = turn(warm, [*PROMPT, *first, 5])
    assert (reuse.from_ram, reuse.from_store, prefilled) == (len(PROMPT) + len(first) - 1, 0, 2)
    assert store.counters.hits == hits


@pytest.mark.parametrize("lost", [0, 2, -1])
def test_a_lost_block_costs_a_prefill_and_not_a_token(target: Target, store: SessionStore, lost: int) -> None:
    first, *_ = turn(keeper(target, store), PROMPT)
    longer = [*PROMPT, *first, 5, 6, 7]
    live = keeper(target, store).checkout(KEY, is_stored=True)
    chain = live.refs[lost].chain
    (key,) = [
        k for k in store.client.scan_iter(match=store.keys.everything()) if chain.hex().encode() in k and b":b:" in k
    ]
    assert store.client.unlink(key) == 1
    second, reuse, prefilled, _ = turn(keeper(target, store), longer)
    assert reuse.blocks_lost == 1
    assert reuse.from_store == sum(ref.num_tokens for ref in live.refs[:lost])
    assert prefilled == len(longer) - reuse.from_store
    assert second == cold(target, longer)
    third, reuse, prefilled, _ = turn(keeper(target, store), [*longer, *second, 9])
    assert (reuse.blocks_lost, prefilled) == (0, 2)  # the commit wrote the block again
    assert third == cold(target, [*longer, *second, 9])


def test_a_damaged_block_is_a_lost_block(llama: Target, store: SessionStore) -> None:
    first, *_ = turn(keeper(llama, store), PROMPT)
    for key in store.client.scan_iter(match=store.keys.everything()):
        if b":b:" in key:
            stored = store.client.get(key)
            assert isinstance(stored, bytes)
            record = bytearray(stored)
            record[-1] ^= 1
            store.client.set(key, bytes(record))
    longer = [*PROMPT, *first, 5]
    second, reuse, _, _ = turn(keeper(llama, store), longer)
    assert (reuse.from_store, reuse.blocks_lost) == (0, 1)
    assert second == cold(llama, longer)


def test_a_turn_writes_only_its_own_rows(llama: Target, store: SessionStore) -> None:
    warm = keeper(llama, store)
    first, *_ = turn(warm, PROMPT)
    before = dict.fromkeys(store.client.scan_iter(match=store.keys.everything()))
    turn(warm, [*PROMPT, *first, 5, 6])
    new = [k for k in store.client.scan_iter(match=store.keys.everything()) if k not in before and b":b:" in k]
    live = warm.checkout(KEY, is_stored=True)
    assert len(new) == -(-(live.state.num_rows - len(PROMPT) - len(first) + 1) // BLOCK)


def test_decoding_goes_on_behind_the_stored_anchor_without_a_single_row(target: Target, store: SessionStore) -> None:
    whole = cold(target, PROMPT, tokens=20)
    first, _, _, snapshot_id = turn(keeper(target, store), PROMPT, tokens=8)
    other = keeper(target, store)
    live = other.checkout(KEY, is_stored=True)
    assert snapshot_id is not None
    snapshot = store.get_snapshot(KEY, snapshot_id)
    assert snapshot is not None
    assert other.restore_pivot(live, snapshot)
    steps = resume(target, live.state, NullDrafter(), Request((), max_new_tokens=12))
    assert first + [token for step in steps for token in step.tokens] == whole


def test_the_stored_pivot_is_the_row_that_was_computed(llama: Target, store: SessionStore) -> None:
    warm = keeper(llama, store)
    _, _, _, snapshot_id = turn(warm, PROMPT)
    computed = warm.checkout(KEY, is_stored=True).state.pivot
    other = keeper(llama, store)
    live = other.checkout(KEY, is_stored=True)
    snapshot = store.get_snapshot(KEY, snapshot_id or "")
    assert snapshot is not None
    assert other.restore_pivot(live, snapshot)
    assert computed is not None
    assert live.state.pivot is not None
    assert torch.equal(live.state.pivot, computed)


def test_a_pivot_of_other_layers_is_not_taken(store: SessionStore) -> None:
    target = tiny_target("llama")
    _, _, _, snapshot_id = turn(keeper(target, store), PROMPT)
    target.tap((0, 3))
    snapshot = store.get_snapshot(KEY, snapshot_id or "")
    assert snapshot is not None
    other = keeper(target, store)
    assert not other.restore_pivot(other.checkout(KEY, is_stored=True), snapshot)


def test_other_weights_find_nothing(llama: Target, store: SessionStore) -> None:
    turn(keeper(llama, store), PROMPT)
    other = tiny_target("llama", seed=1)
    tokens, reuse, prefilled, _ = turn(keeper(other, store), PROMPT)
    assert (reuse.from_store, prefilled) == (0, len(PROMPT))
    assert tokens == cold(other, PROMPT)


def test_a_new_thread_starts_from_the_system_prompt_another_stored(llama: Target, store: SessionStore) -> None:
    turn(keeper(llama, store), PROMPT)
    other = [*PROMPT[:30], 2, 2, 2, 2]
    tokens, reuse, _, _ = turn(keeper(llama, store), other, key=session_id("another"))
    assert reuse.from_store == 24  # whole blocks of the common 30 tokens
    assert tokens == cold(llama, other)


def test_time_travel_finds_the_snapshot_a_message_names(llama: Target, store: SessionStore) -> None:
    warm = keeper(llama, store)
    first, _, _, old = turn(warm, PROMPT)
    turn(warm, [*PROMPT, *first, 5, 6, 7, 8])
    turn(warm, [3, 3, 3])  # the head is somewhere else now
    back = [*PROMPT, *first, 9]
    tokens, reuse, prefilled, _ = turn(keeper(llama, store), back, snapshot_id=old)
    assert (reuse.from_store, prefilled) == (len(back) - 2, 2)
    assert tokens == cold(llama, back)


def test_a_rewritten_history_costs_reuse_back_to_the_common_prefix(llama: Target, store: SessionStore) -> None:
    turn(keeper(llama, store), PROMPT)
    rewritten = [*PROMPT[:21], 4, 4, *PROMPT[23:]]
    tokens, reuse, prefilled, _ = turn(keeper(llama, store), rewritten)
    assert (reuse.from_store, prefilled) == (21, len(rewritten) - 21)
    assert tokens == cold(llama, rewritten)


def test_a_stale_worker_is_fenced_and_goes_on(llama: Target, store: SessionStore) -> None:
    stale = keeper(llama, store)
    live = stale.checkout(KEY, is_stored=True)
    turn(keeper(llama, store), PROMPT)  # another worker takes the session over
    list(decode(llama, live.state, NullDrafter(), Request([1, 2, 3], max_new_tokens=4)))
    assert stale.commit(live) is None
    assert store.counters.fenced == 1
    stale.checkin(KEY, live)
    tokens, _, _, snapshot_id = turn(stale, [1, 2, 3, 4])
    assert snapshot_id is not None
    assert tokens == cold(llama, [1, 2, 3, 4])


def test_workers_that_alternate_store_every_turn(llama: Target, store: SessionStore) -> None:
    workers = [keeper(llama, store) for _ in range(2)]
    prompt, snapshot_id = PROMPT, None
    for index, worker in enumerate([*workers, *workers, workers[1], *workers]):
        tokens, reuse, _, stored = turn(worker, prompt, snapshot_id=snapshot_id if index % 3 else None)
        assert tokens == cold(llama, prompt)
        assert stored is not None
        assert (reuse.from_ram + reuse.from_store > 0) == (index > 0)
        prompt, snapshot_id = [*prompt, *tokens, 5, index], stored
    head = store.head(KEY)
    assert head is not None
    assert head.snapshot == snapshot_id


def test_a_worker_whose_session_was_taken_and_left_alone_takes_it_back(llama: Target, store: SessionStore) -> None:
    worker = keeper(llama, store)
    first, *_ = turn(worker, PROMPT)
    store.acquire(KEY)  # by one that dies before it commits
    tokens, _, _, stored = turn(worker, [*PROMPT, *first, 5])
    assert stored is not None
    assert store.counters.fenced == 1
    assert tokens == cold(llama, [*PROMPT, *first, 5])


def test_a_sound_block_of_another_shape_is_replaced(llama: Target, store: SessionStore) -> None:
    first, *_ = turn(keeper(llama, store), PROMPT)
    live = keeper(llama, store).checkout(KEY, is_stored=True)
    chain = live.refs[1].chain
    wrong = Block(chain, BLOCK, "float32", (8, 2, 2, BLOCK, 8), bytes(8 * 2 * 2 * BLOCK * 8 * 4))
    target = fingerprint_hash(llama.fingerprint)
    store.client.set(store.keys.block(target, chain), store.codec.pack_block(llama.fingerprint, wrong))
    longer = [*PROMPT, *first, 5]
    tokens, reuse, _, _ = turn(keeper(llama, store), longer)
    assert (reuse.from_store, reuse.blocks_lost) == (BLOCK, 1)
    assert tokens == cold(llama, longer)
    again, reuse, _, _ = turn(keeper(llama, store), [*longer, *tokens, 6])
    assert reuse.from_store == len(longer) + len(tokens) - 1
    assert again == cold(llama, [*longer, *tokens, 6])


def test_rows_in_memory_are_not_fetched_again(llama: Target, store: SessionStore) -> None:
    here, elsewhere = keeper(llama, store), keeper(llama, store)
    first, *_ = turn(here, PROMPT)
    longer = [*PROMPT, *first, 5, 6]
    second, _, _, snapshot_id = turn(elsewhere, longer)
    hits = store.counters.hits
    tokens, reuse, _, _ = turn(here, [*longer, *second, 7], snapshot_id=snapshot_id)
    num_blocks = -(-(len(PROMPT) + len(first) - 1) // BLOCK)
    assert reuse.from_ram == len(PROMPT) + len(first) - 1
    assert reuse.from_ram + reuse.from_store == len(longer) + len(second) - 1
    assert store.counters.hits - hits < num_blocks
    assert tokens == cold(llama, [*longer, *second, 7])


def test_rows_are_computed_where_that_was_faster_and_fetching_is_tried_again(
    llama: Target, store: SessionStore
) -> None:
    turn(keeper(llama, store), PROMPT)
    other = keeper(llama, store)
    other.break_even.fetched(100, 10.0)
    other.break_even.computed(100, 1.0)
    reuses = []
    for _ in range(16):
        live = other.checkout(KEY, is_stored=True)
        reuses.append(other.restore(live, np.asarray([*PROMPT, 5], dtype=np.int32)).from_store)
    assert [bool(reuse) for reuse in reuses] == [False] * 15 + [True]
    other.break_even.computed(100, 1000.0)
    live = other.checkout(KEY, is_stored=True)
    assert other.restore(live, np.asarray([*PROMPT, 5], dtype=np.int32)).from_store


def test_a_session_is_stored_under_the_name_its_caller_gives(llama: Target, store: SessionStore) -> None:
    name = SessionName("thread")
    assert name.sid == KEY
    warm = keeper(llama, store)
    warm.checkin(KEY, warm.checkout(KEY, is_stored=True, name=name))
    turn(warm, PROMPT)
    (info,) = take_inventory(store).sessions
    assert (info.sid, info.name, info.num_turns) == (KEY, name, 1)


def test_nothing_of_a_drafter_is_stored(llama: Target, store: SessionStore) -> None:
    turn(keeper(llama, store), PROMPT)
    usage = store.usage()
    assert set(usage) == {"block", "side", "snapshot", "head"} <= set(KINDS)
    rows = len(PROMPT) + 9
    kv_bytes = rows * llama.num_layers * 2 * 2 * 8 * 4  # layers, K and V, heads, head_dim, float32
    assert kv_bytes <= usage["block"].num_bytes <= kv_bytes + usage["block"].num_keys * 1024
    assert usage["side"].num_keys == 1


def test_idle_sessions_over_the_budget_are_dropped_oldest_first(llama: Target) -> None:
    ram = SessionKeeper(llama, None, budget_bytes=1)
    for name in ("a", "b"):
        turn(ram, PROMPT, key=name)
    assert turn(ram, PROMPT, key="b")[1].from_ram == len(PROMPT) - 1
    assert turn(ram, PROMPT, key="a")[1].from_ram == 0


def test_pinned_sessions_are_dropped_last_and_in_their_turn_once_unpinned(llama: Target) -> None:
    rows = len(PROMPT) - 1
    one = TargetState(llama.new_cache())
    list(decode(llama, one, NullDrafter(), Request(PROMPT, max_new_tokens=10)))
    ram = SessionKeeper(llama, None, budget_bytes=2 * one.cache.nbytes)
    ram.pin("a")
    for name in ("a", "b", "c"):
        turn(ram, PROMPT, key=name)
    assert turn(ram, PROMPT, key="a")[1].from_ram == rows
    ram.unpin("a")
    for name in ("b", "c"):
        turn(ram, PROMPT, key=name)
    assert turn(ram, PROMPT, key="a")[1].from_ram == 0


def test_pins_do_not_break_the_budget(llama: Target) -> None:
    ram = SessionKeeper(llama, None, budget_bytes=1)
    for name in ("a", "b"):
        ram.pin(name)
        turn(ram, PROMPT, key=name)
    assert turn(ram, PROMPT, key="b")[1].from_ram == len(PROMPT) - 1
    assert turn(ram, PROMPT, key="a")[1].from_ram == 0


def test_two_calls_on_one_session_at_once_have_states_of_their_own(llama: Target) -> None:
    ram = keeper(llama, None)
    one, two = (ram.checkout(KEY, is_stored=False) for _ in range(2))
    assert isinstance(one, LiveSession)
    assert one.state is not two.state


def test_a_dead_server_stops_no_reply(llama: Target, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = EmbeddedServer.start(tmp_path)
    warm = keeper(llama, SessionStore(server.client()))
    live = warm.checkout(KEY, is_stored=True)
    steps = list(decode(llama, live.state, NullDrafter(), Request(PROMPT, max_new_tokens=5)))
    server.stop()
    assert warm.commit(live) is None
    assert "not stored" in caplog.text
    assert [token for step in steps for token in step.tokens] == cold(llama, PROMPT, tokens=5)

"""What stored sessions cost on a real model: restoring one, storing a turn, forking, and whose keys they are.

Each process measures for itself, as the product would: one makes the session and its turns; others, new ones, restore
it and compute it again, alternately. A restore and a prefill end with the first new token.
"""

from __future__ import annotations

import math
import multiprocessing
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import redis
import torch

from dlite_agent.bench.contest import Spread
from dlite_agent.bench.sessions.servers import ScratchServer
from dlite_agent.bench.sessions.trial import call, store_parts
from dlite_agent.config import Durability, Settings
from dlite_agent.engine.target import Target
from dlite_agent.session_keeper import SessionKeeper
from dlite_agent.session_rows import block_shape
from dlite_agent.sessions.creating import fork_session
from dlite_agent.sessions.keys import KINDS, SessionName
from dlite_agent.sessions.store import SessionStore

_NAME = SessionName("speed")
_TOOL_S = 0.2
_MESSAGE_TOKENS = 80
_REPLY_TOKENS = 16
_FORK_MESSAGE_TOKENS = 16
_NUM_FORKS = 10

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SpeedOptions:
    """What to measure on.

    Attributes:
        folder: The model's.
        settings: Threads and folders.
        num_tokens: Length of the session.
        num_turns: Turns whose commits are measured.
        num_rounds: Processes that restore.
        seed: Names the session's tokens.
    """

    folder: Path
    settings: Settings
    num_tokens: int
    num_turns: int
    num_rounds: int
    seed: int


@dataclass(slots=True)
class SpeedReport:
    """What was measured.

    Attributes:
        figures: Spreads by figure.
        details: What lies behind them.
        wrong: Restored sessions whose first token was not the computed one's.
    """

    figures: dict[str, Spread] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
    wrong: int = 0


def measure_speed(options: SpeedOptions, binary: Path, *, say: Callable[[str], None]) -> SpeedReport:
    """Make a session on a server of the benchmark's own, and restore it in new processes."""
    report = SpeedReport()
    with ScratchServer(binary) as server:
        say(f"a session of {options.num_tokens} tokens, {options.num_turns} turns and {_NUM_FORKS} forks")
        made = _in_new_process(_make_session, options, server.socket)
        report.details |= {"server": server.name, **made.details}
        report.figures |= {name: Spread.of(values) for name, values in made.figures.items()}
        say(f"restoring {len(made.ids)} tokens and computing them again, {options.num_rounds} times")
        rounds = [
            _in_new_process(_restore_round, options, server.socket, made.ids, number)
            for number in range(options.num_rounds)
        ]
    report.wrong = sum(one.restored_token != one.computed_token for one in rounds)
    report.figures["restore_over_prefill"] = Spread.of(one.restore_s / one.prefill_s for one in rounds)
    for name in ("restore_s", "prefill_s"):
        report.details[name] = Spread.of(getattr(one, name) for one in rounds).as_dict()
    report.details["from_store"] = [one.from_store for one in rounds]
    return report


@dataclass(slots=True)
class _Made:
    ids: tuple[int, ...] = ()
    figures: dict[str, list[float]] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Round:
    restore_s: float
    prefill_s: float
    restored_token: int
    computed_token: int
    from_store: int


def _in_new_process(work: Callable[..., T], *arguments: object) -> T:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as pool:
        return pool.submit(work, *arguments).result()


def _open(options: SpeedOptions, socket: str, durability: Durability) -> tuple[SessionKeeper, SessionStore]:
    torch.set_num_threads(options.settings.threads)
    target = Target.load(options.folder, cache_dir=options.settings.home / "calibration")
    store = SessionStore(redis.Redis(unix_socket_path=socket))
    return SessionKeeper(target, store, durability=durability), store


def _message(generator: random.Random, target: Target, length: int) -> list[int]:
    return [generator.randrange(100, target.vocab_size // 2) for _ in range(length)]


def _make_session(options: SpeedOptions, socket: str) -> _Made:
    """Compute a session, add turns whose commits are timed, and fork it."""
    made, generator = _Made(), random.Random(options.seed)
    keeper, store = _open(options, socket, "async")
    ids = _message(generator, keeper.target, options.num_tokens)
    ids += _turn(keeper, ids, _NAME)[0]
    keeper.flush()
    _measure_turns(keeper, store, ids, options.num_turns, generator, made)
    made.ids = tuple(ids)
    parts = store_parts(store)
    made.details["keys"] = parts
    foreign = int(store.client.dbsize()) - len(parts)
    made.figures["drafter_keys"] = [float(foreign + sum(kind not in KINDS for _, kind, _ in parts))]
    one = sum(num_bytes for *_, num_bytes in parts)
    for number in range(_NUM_FORKS):
        name = SessionName(f"fork {number}")
        fork_session(store, _NAME.sid, name)
        _turn(keeper, [*ids, *_message(generator, keeper.target, _FORK_MESSAGE_TOKENS)], name)
    keeper.close()
    many = sum(num_bytes for *_, num_bytes in store_parts(store))
    made.figures["ten_forks_over_one"] = [many / one]
    made.details |= {"session_bytes": one, "with_forks_bytes": many}
    return made


def _measure_turns(
    keeper: SessionKeeper,
    store: SessionStore,
    ids: list[int],
    num_turns: int,
    generator: random.Random,
    made: _Made,
) -> None:
    """Add turns with tools of 200 ms between them; `ids` grows."""
    waits: list[float] = []
    amplifications: list[float] = []
    row_bytes = math.prod(block_shape(keeper.target, 1)) * keeper.target.dtype.itemsize
    wait_s = 0.0
    for _ in range(num_turns + 1):
        before = _bytes_received(store)
        ids += _message(generator, keeper.target, _MESSAGE_TOKENS)
        old_rows = len(ids) - _MESSAGE_TOKENS - 1
        reply, checkout_s, commit_s = _turn(keeper, ids, _NAME)
        ids += reply
        waits.append(1000 * (wait_s + checkout_s))  # the commit before, and what the next call still waits for it
        wait_s = commit_s
        time.sleep(_TOOL_S)
        keeper.flush()
        amplifications.append((_bytes_received(store) - before) / ((len(ids) - 1 - old_rows) * row_bytes))
    made.figures["commit_visible_ms"] = waits[1:]
    made.figures["write_amplification"] = amplifications[1:]
    made.details["turn_kv_bytes"] = (_MESSAGE_TOKENS + _REPLY_TOKENS) * row_bytes


def _turn(keeper: SessionKeeper, prompt: Sequence[int], name: SessionName) -> tuple[list[int], float, float]:
    """Make a turn; returns its tokens, and the seconds its checkout and its commit took."""
    times: list[float] = []
    start = time.perf_counter()
    turn = call(
        keeper,
        prompt,
        _REPLY_TOKENS,
        name=name,
        reply=[],
        on_open=lambda: times.append(time.perf_counter() - start),
        on_text=lambda reply: times.append(time.perf_counter()),
    )
    return turn.tokens, times[0], time.perf_counter() - times[1]


def _restore_round(options: SpeedOptions, socket: str, ids: Sequence[int], number: int) -> _Round:
    """Restore the session and compute it, in this order or the other; each time until the first new token."""
    keeper, _ = _open(options, socket, "none")
    cold = SessionKeeper(keeper.target, None)
    call(cold, ids[:32], 1, name=SessionName("warm up"), reply=[])
    seconds: dict[bool, float] = {}
    tokens: dict[bool, int] = {}
    from_store = 0
    for is_restore in (True, False) if number % 2 == 0 else (False, True):
        start = time.perf_counter()
        turn = call(keeper if is_restore else cold, [*ids, 100], 1, name=_NAME, reply=[])
        seconds[is_restore] = time.perf_counter() - start
        tokens[is_restore] = turn.tokens[0]
        from_store += turn.reuse.from_store
    return _Round(seconds[True], seconds[False], tokens[True], tokens[False], from_store)


def _bytes_received(store: SessionStore) -> int:
    return int(store.client.info("stats")["total_net_input_bytes"])

"""A worker process that can be told to kill itself at a certain command, and one whose clock is wrong.

The command is counted in the connection, below the store: what is measured has no hooks for it, and the end is a real
SIGKILL. Workers are forked from a process that has imported everything, so that hundreds of them are affordable.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal, cast

import redis
import torch

from dlite_agent.bench.sessions.trial import BLOCK_TOKENS, call, quiet_logs
from dlite_agent.config import Durability
from dlite_agent.session_keeper import SessionKeeper
from dlite_agent.sessions.keys import SessionName
from dlite_agent.sessions.store import SessionStore
from dlite_agent.testing import tiny_target

_PATIENCE_S = 60.0

FuseMode = Literal["before", "within", "after"]
FUSE_MODES: tuple[FuseMode, ...] = ("before", "within", "after")


@dataclass(frozen=True, slots=True)
class Fuse:
    """When a worker kills itself.

    Attributes:
        turn: The turn, from 0, in which commands are counted.
        command: Which of its commands, from 1 (a pipeline counts as one).
        mode: Before it is sent, when half of it is, or as soon as it has been sent.
    """

    turn: int
    command: int
    mode: FuseMode


@dataclass(frozen=True, slots=True)
class Errand:
    """What a worker has to do.

    Attributes:
        socket: Of the server.
        name: The session.
        history: Token ids before the first turn.
        messages: A message for each turn.
        num_tokens: Tokens of each reply.
        fuse: When to die, or None.
        clock_offset_s: How wrong its wall clock is.
        durability: Of its keeper.
    """

    socket: str
    name: SessionName
    history: tuple[int, ...]
    messages: tuple[tuple[int, ...], ...]
    num_tokens: int
    fuse: Fuse | None = None
    clock_offset_s: float = 0.0
    durability: Durability = "turn"


@dataclass(frozen=True, slots=True)
class Said:
    """What a worker said before its end: the tokens of each turn, and the snapshots it was told are stored."""

    texts: tuple[tuple[int, ...], ...]
    snapshot_ids: tuple[str, ...]
    exit_code: int | None


def employ(errand: Errand) -> Said:
    """Have a new process do the errand, and listen until it ends or dies."""
    ours, theirs = _context().Pipe(duplex=False)
    process = _context().Process(target=_work, args=(errand, theirs), daemon=True)
    process.start()
    theirs.close()
    texts: list[tuple[int, ...]] = []
    snapshot_ids: list[str] = []
    try:
        while ours.poll(_PATIENCE_S):
            kind, value = ours.recv()
            (texts if kind == "text" else snapshot_ids).append(value)
    except EOFError:
        pass
    process.join(_PATIENCE_S)
    return Said(tuple(texts), tuple(snapshot_ids), process.exitcode)


def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def _work(errand: Errand, pipe: Connection) -> None:
    torch.set_num_threads(1)
    _shift_clock(errand.clock_offset_s)
    client = _fused_client(errand.socket)
    keeper = SessionKeeper(
        tiny_target("llama"), SessionStore(client), block_tokens=BLOCK_TOKENS, durability=errand.durability
    )
    history = list(errand.history)
    with quiet_logs():
        for index, message in enumerate(errand.messages):
            if errand.fuse is not None and errand.fuse.turn == index:
                FusedConnection.left = errand.fuse.command
                FusedConnection.mode = errand.fuse.mode
            _one_turn(keeper, errand, [*history, *message], history, pipe)
        keeper.close()


def _one_turn(
    keeper: SessionKeeper, errand: Errand, prompt: Sequence[int], history: list[int], pipe: Connection
) -> None:
    turn = call(
        keeper,
        prompt,
        errand.num_tokens,
        name=errand.name,
        reply=[],
        on_text=lambda reply: pipe.send(("text", tuple(reply))),
    )
    if turn.snapshot_id is not None:
        pipe.send(("snapshot", turn.snapshot_id))
    history[:] = [*prompt, *turn.tokens]


class FusedConnection(redis.UnixDomainSocketConnection):
    """A connection whose process ends at a certain command.

    Attributes:
        left: Commands until then, or None.
        mode: How far the last one gets.
    """

    left: int | None = None
    mode: FuseMode = "before"

    def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        """Send, or die."""
        kind = FusedConnection
        if kind.left is not None:
            kind.left -= 1
            if kind.left == 0:
                if kind.mode != "before":
                    data = command if isinstance(command, bytes) else b"".join(command)
                    assert self._sock is not None
                    self._sock.sendall(data[: len(data) // 2] if kind.mode == "within" else data)
                os.kill(os.getpid(), signal.SIGKILL)
        super().send_packed_command(command, check_health)  # type: ignore[no-untyped-call]


def _fused_client(socket: str) -> redis.Redis:
    return redis.Redis(connection_pool=redis.ConnectionPool(connection_class=cast(Any, FusedConnection), path=socket))


def _shift_clock(offset_s: float) -> None:
    """Have this process's wall clock be wrong."""
    if offset_s:
        true_time = time.time
        time.time = lambda: true_time() + offset_s

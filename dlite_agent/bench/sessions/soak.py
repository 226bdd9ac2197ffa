"""A soak: many sessions, several worker processes that are killed at random, and one ledger of what was acknowledged.

A turn goes to whichever worker is free. A worker that is killed leaves its turn to another one. Every text is compared
with a cold one; at its end each session must be at the last turn that was acknowledged. One worker is never killed: its
memory, and the server's, must stay where they are.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import median
from typing import Any

import redis
import torch

from dlite_agent.bench.sessions.servers import ScratchServer
from dlite_agent.bench.sessions.trial import BLOCK_TOKENS, call, quiet_logs
from dlite_agent.drafters.null import NullDrafter
from dlite_agent.engine.decode import decode
from dlite_agent.engine.request import Request
from dlite_agent.engine.state import TargetState
from dlite_agent.engine.target import Target
from dlite_agent.errors import DLiteError
from dlite_agent.session_keeper import SessionKeeper
from dlite_agent.sessions.keys import SessionName, fingerprint_hash
from dlite_agent.sessions.store import SessionStore
from dlite_agent.testing import tiny_target

_MAX_TOKENS = 200  # then a session ends, and a new one begins
_REPLY_TOKENS = 8
_BUDGET_BYTES = 8 << 20
_KILL_EVERY_S = (0.5, 4.0)


@dataclass(frozen=True, slots=True)
class SoakOptions:
    """How long, and with what.

    Attributes:
        minutes: Of the soak.
        num_sessions: Sessions at once.
        num_workers: Worker processes.
        seed: Names tokens and kills.
    """

    minutes: float
    num_sessions: int = 64
    num_workers: int = 4
    seed: int = 0


@dataclass(slots=True)
class SoakReport:
    """What the soak saw.

    Attributes:
        num_turns: Turns answered.
        num_kills: Workers killed.
        num_sessions: Sessions at once.
        num_ended: Sessions that ended and were removed.
        wrong: Texts that are not the cold ones.
        lost: Turns that were acknowledged and gone, or answered and not stored.
        errors: Errors a worker answered with.
        samples: (seconds, bytes of the server, bytes of the worker that lives) once a second.
    """

    num_turns: int = 0
    num_kills: int = 0
    num_sessions: int = 0
    num_ended: int = 0
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    samples: list[tuple[float, int, int]] = field(default_factory=list)

    def memory_growth(self) -> float | None:
        """Return the memory of the last quarter over that of the third, of the server or the worker, the larger one.

        None if the soak was too short: until each session has ended once on average, they grow as they should.
        """
        quarter = len(self.samples) // 4
        if not quarter or self.num_ended < self.num_sessions:
            return None
        third, last = self.samples[2 * quarter : 3 * quarter], self.samples[3 * quarter :]
        return max(median(s[at] for s in last) / median(s[at] for s in third) for at in (1, 2))


@dataclass(slots=True)
class _Session:
    number: int
    generation: int = 0
    history: list[int] = field(default_factory=list)
    snapshot_id: str | None = None
    prompt: list[int] = field(default_factory=list)

    @property
    def name(self) -> SessionName:
        return SessionName(f"soak {self.number}.{self.generation}")


@dataclass(slots=True)
class _Worker:
    process: BaseProcess
    pipe: Connection
    session: _Session | None = None


def soak(options: SoakOptions, binary: Path, *, say: Callable[[str], None]) -> SoakReport:
    """Run it on a server of the benchmark's own."""
    with ScratchServer(binary) as server:
        run = _Soak(options, server)
        say(f"{options.num_sessions} sessions, {options.num_workers} workers, {options.minutes:g} minutes")
        try:
            run.run()
        finally:
            run.close()
        return run.report


class _Soak:
    def __init__(self, options: SoakOptions, server: ScratchServer) -> None:
        self.report = SoakReport(num_sessions=options.num_sessions)
        self._options = options
        self._server = server
        self._random = random.Random(options.seed)
        self._target = tiny_target("llama")
        self._store = SessionStore(server.client())
        self._waiting = deque(_Session(number) for number in range(options.num_sessions))
        self._workers = [self._employ() for _ in range(options.num_workers)]
        self._rss = 0

    def run(self) -> None:
        start = time.monotonic()
        next_kill = start + self._pause()
        next_sample = start
        while time.monotonic() < start + 60 * self._options.minutes:
            self._hand_out()
            self._collect()
            now = time.monotonic()
            if now >= next_kill:
                self._kill()
                next_kill = now + self._pause()
            if now >= next_sample and self._rss:
                self.report.samples.append((now - start, self._server_bytes(), self._rss))
                next_sample = now + 1.0
        self._finish()

    def close(self) -> None:
        for worker in self._workers:
            worker.process.kill()
            worker.process.join()
            worker.pipe.close()
        self._store.client.close()

    def _pause(self) -> float:
        return self._random.uniform(*_KILL_EVERY_S)

    def _employ(self) -> _Worker:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(self._server.socket, theirs), daemon=True)
        process.start()
        theirs.close()
        return _Worker(process, ours)

    def _hand_out(self) -> None:
        """Give a waiting turn to every free worker; one that was interrupted keeps its prompt."""
        for index, worker in enumerate(self._workers):
            if worker.session is not None or not self._waiting:
                continue
            session = self._waiting.popleft()
            if not session.prompt:
                message = [self._random.randrange(1, 150) for _ in range(self._random.randint(4, 24))]
                session.prompt = [*session.history, *message]
            try:
                worker.pipe.send((session.name, session.prompt, session.snapshot_id))
            except OSError:
                self._replace(index, session)
                continue
            worker.session = session

    def _collect(self) -> None:
        for pipe in wait([worker.pipe for worker in self._workers if worker.session], timeout=0.05):
            index = next(i for i, worker in enumerate(self._workers) if worker.pipe is pipe)
            worker = self._workers[index]
            session, worker.session = worker.session, None
            assert session is not None
            try:
                reply, snapshot_id, rss, error = worker.pipe.recv()
            except (EOFError, OSError):  # killed: the turn is another's
                self._replace(index, session)
                continue
            self._rss = rss if index == 0 else self._rss
            self._check(session, reply, snapshot_id, error)

    def _check(self, session: _Session, reply: list[int], snapshot_id: str | None, error: str) -> None:
        self.report.num_turns += 1
        prompt, session.prompt = session.prompt, []
        expected = cold(self._target, prompt)
        if error:
            self.report.errors.append(f"{session.name.thread_id}: {error}")
        elif reply != expected:
            self.report.wrong.append(f"{session.name.thread_id}: got {reply}, expected {expected}")
        if snapshot_id is None:
            self.report.lost.append(f"{session.name.thread_id}: a turn was not stored ({error or 'fenced'})")
        else:
            session.snapshot_id = snapshot_id
        session.history = [*prompt, *expected]
        if len(session.history) > _MAX_TOKENS:
            self._end(session)
        self._waiting.append(session)

    def _end(self, session: _Session) -> None:
        """Check a session, remove it and its rows, which nobody shares, and begin another one."""
        self._check_head(session)
        at = self._store.get_snapshot(session.name.sid, session.snapshot_id or "")
        target = fingerprint_hash(self._target.fingerprint)
        for ref in at.blocks if at else ():
            pattern = self._store.keys.side(target, ref.chain, 0).removesuffix("0") + "*"
            sides = self._store.client.keys(pattern)
            self._store.client.unlink(self._store.keys.block(target, ref.chain), *sides)
        self._store.delete_session(session.name.sid)
        self.report.num_ended += 1
        session.generation += 1
        session.history, session.snapshot_id = [], None

    def _check_head(self, session: _Session) -> None:
        head = self._store.head(session.name.sid)
        at = head.snapshot if head else None
        if session.snapshot_id is not None and at != session.snapshot_id:
            self.report.lost.append(
                f"{session.name.thread_id}: {session.snapshot_id[:8]} acknowledged, at {str(at)[:8]}"
            )

    def _kill(self) -> None:
        index = self._random.randrange(1, len(self._workers))
        self._workers[index].process.kill()
        self.report.num_kills += 1
        if self._workers[index].session is None:
            self._replace(index, None)

    def _replace(self, index: int, session: _Session | None) -> None:
        worker = self._workers[index]
        worker.process.kill()
        worker.process.join()
        worker.pipe.close()
        if session is not None:
            self._waiting.appendleft(session)
        self._workers[index] = self._employ()

    def _finish(self) -> None:
        """Wait for the turns that are being made, and look at every head."""
        deadline = time.monotonic() + 60
        while any(worker.session for worker in self._workers) and time.monotonic() < deadline:
            self._collect()
        for session in self._waiting:
            if not session.prompt:  # else its worker died: it may be one turn further than was acknowledged
                self._check_head(session)

    def _server_bytes(self) -> int:
        return int(self._store.client.info("memory")["used_memory"])


def cold(target: Target, prompt: list[int]) -> list[int]:
    """Decode without any session, plainly."""
    request = Request(prompt, max_new_tokens=_REPLY_TOKENS)
    steps = decode(target, TargetState(target.new_cache()), NullDrafter(), request)
    return [token for step in steps for token in step.tokens]


def _work(socket: str, pipe: Any) -> None:
    """Answer turns until the pipe closes."""
    torch.set_num_threads(1)
    store = SessionStore(redis.Redis(unix_socket_path=socket))
    keeper = SessionKeeper(tiny_target("llama"), store, block_tokens=BLOCK_TOKENS, budget_bytes=_BUDGET_BYTES)
    with quiet_logs():
        while True:
            try:
                name, prompt, snapshot_id = pipe.recv()
            except EOFError:
                return
            reply: list[int] = []
            stored, error = None, ""
            try:
                stored = call(
                    keeper, prompt, _REPLY_TOKENS, name=name, reply=reply, snapshot_id=snapshot_id
                ).snapshot_id
            except DLiteError as raised:
                error = f"{type(raised).__name__}: {raised}"
            pipe.send((reply, stored, _resident_bytes(), error))


def _resident_bytes() -> int:
    """Return this process's memory; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")

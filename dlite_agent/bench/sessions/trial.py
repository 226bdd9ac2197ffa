"""One run of a scenario: a conversation, a fault, what came of it, and whether the session can be used afterwards."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import redis

from dlite_agent.bench.sessions.servers import Fsync, ScratchServer, Servers
from dlite_agent.config import Durability
from dlite_agent.drafters.lookup import LookupDrafter
from dlite_agent.drafters.null import NullDrafter
from dlite_agent.engine.decode import decode
from dlite_agent.engine.request import Request
from dlite_agent.engine.state import TargetState
from dlite_agent.engine.target import Target
from dlite_agent.errors import DLiteError
from dlite_agent.session_keeper import Reuse, SessionKeeper
from dlite_agent.sessions.keys import SessionName
from dlite_agent.sessions.store import SessionStore
from dlite_agent.testing import tiny_target

BLOCK_TOKENS = 8
_MAX_ID = 150  # of the tiny targets' 160 tokens


@dataclass(frozen=True, slots=True)
class TrialReport:
    """What one run saw; empty lists where all went well.

    Attributes:
        kind: The scenario.
        seed: Names the run.
        server: The server's name and version.
        wrong: Texts that are not those of a cold run.
        unusable: Ways in which the session, or the process, could not go on.
        lost: Acknowledged turns that were gone.
        errors: Typed errors that a caller saw before any token, by name.
        counters: Sum of the counters of all stores.
        note: What the fault was.
    """

    kind: str
    seed: int
    server: str
    wrong: tuple[str, ...]
    unusable: tuple[str, ...]
    lost: tuple[str, ...]
    errors: tuple[str, ...]
    counters: dict[str, int]
    note: str

    @property
    def is_fine(self) -> bool:
        """Whether nothing went wrong."""
        return not (self.wrong or self.unusable or self.lost)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> TrialReport:
        """Read what `dataclasses.asdict` and JSON made."""
        read: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in fields.items()}
        return cls(**read)


@dataclass(frozen=True, slots=True)
class Turn:
    """What one call gave.

    Attributes:
        tokens: The reply.
        reuse: Where the prompt's rows came from.
        snapshot_id: What was committed, or None.
    """

    tokens: list[int]
    reuse: Reuse
    snapshot_id: str | None


@dataclass(slots=True)
class Lab:
    """What the runs of one process share: servers, random targets, texts computed cold.

    Attributes:
        servers: The servers.
        folder: For files.
    """

    servers: Servers
    folder: Path
    _targets: dict[int, Target] = field(default_factory=dict)
    _cold: dict[tuple[int, int, tuple[int, ...]], list[int]] = field(default_factory=dict)

    def target(self, seed: int = 0) -> Target:
        """Return the tiny random target of a seed."""
        if seed not in self._targets:
            self._targets[seed] = tiny_target("llama", seed)
        return self._targets[seed]

    def cold(self, prompt: Sequence[int], num_tokens: int, *, seed: int = 0) -> list[int]:
        """Decode without any session, plainly."""
        key = (seed, num_tokens, tuple(prompt))
        if key not in self._cold:
            target = self.target(seed)
            request = Request(list(prompt), max_new_tokens=num_tokens)
            steps = decode(target, TargetState(target.new_cache()), NullDrafter(), request)
            self._cold[key] = [token for step in steps for token in step.tokens]
        return self._cold[key]


class Trial:
    """The state of one run. Scenarios say what is done; checks and records are made here.

    Attributes:
        names_snapshots: Whether messages name the snapshot of the turn before, as those of a LangGraph thread do.
    """

    def __init__(self, lab: Lab, kind: str, seed: int) -> None:
        """Name a run; the same lab, kind and seed do the same."""
        self.lab = lab
        self.kind = kind
        self.seed = seed
        self.random = random.Random(f"{kind} {seed}")
        self.name = SessionName(f"{kind} {seed}")
        self.history: list[int] = []
        self.acknowledged: list[str] = []
        self.names_snapshots = self.random.random() < 0.5
        self.note = ""
        self.wrong: list[str] = []
        self.unusable: list[str] = []
        self.lost: list[str] = []
        self.errors: list[str] = []
        self._stores: list[SessionStore] = []
        self._clients: list[redis.Redis] = []
        self.server = self.get_server("everysec")

    def get_server(self, fsync: Fsync) -> ScratchServer:
        """Use an emptied server of this `appendfsync`; programs take turns by seed."""
        binaries = self.lab.servers.binaries
        self.server = self.lab.servers.get(binaries[self.seed % len(binaries)], fsync)
        return self.server

    def client(self, socket: str | None = None, **options: object) -> redis.Redis:
        """Open a client to the server, or to a proxy's socket; it is closed at the end of the run."""
        client = self.server.client(**options)
        if socket is not None:
            client.connection_pool.connection_kwargs["path"] = socket
        self._clients.append(client)
        return client

    def store(self, client: redis.Redis | None = None, *, tenant: str = "default", secret: bytes = b"") -> SessionStore:
        """Open a store whose counters are part of the report."""
        store = SessionStore(client or self.client(), tenant=tenant, secret=secret)
        self._stores.append(store)
        return store

    def keeper(
        self, store: SessionStore | None = None, *, durability: Durability = "turn", seed: int = 0
    ) -> SessionKeeper:
        """Return a keeper without memory: what another process would have."""
        return SessionKeeper(
            self.lab.target(seed), store or self.store(), block_tokens=BLOCK_TOKENS, durability=durability
        )

    def message(self) -> list[int]:
        """Draw the tokens of a user's message."""
        return [self.random.randrange(1, _MAX_ID) for _ in range(self.random.randint(9, 30))]

    def turn(
        self,
        keeper: SessionKeeper,
        prompt: Sequence[int],
        *,
        name: SessionName | None = None,
        seed: int = 0,
        snapshot_id: str | None = None,
    ) -> Turn | None:
        """Make one call and compare its text with the cold one; None if a typed error came before any token."""
        num_tokens = self.random.randint(3, 12)
        name = name or self.name
        reply: list[int] = []
        try:
            turn = call(keeper, prompt, num_tokens, name=name, reply=reply, snapshot_id=snapshot_id)
        except DLiteError as error:
            if reply:
                self.unusable.append(f"{type(error).__name__} behind {len(reply)} tokens: {error}")
            self.errors.append(type(error).__name__)
            turn = None
        except Exception as error:  # whatever it is, it is what the run looks for
            self.unusable.append(f"{type(error).__name__}, which is not one of ours: {error}")
            turn = None
        expected = self.lab.cold(prompt, num_tokens, seed=seed)
        if reply != expected[: len(reply)] or (turn is not None and reply != expected):
            self.wrong.append(f"prompt of {len(prompt)} tokens: got {reply}, expected {expected}")
        return turn

    def converse(self, keeper: SessionKeeper, num_turns: int = 1) -> Turn | None:
        """Continue the conversation; returns the last turn, None where a call failed (its message is dropped)."""
        turn = None
        for _ in range(num_turns):
            prompt = [*self.history, *self.message()]
            named = self.acknowledged[-1] if self.acknowledged and self.names_snapshots else None
            turn = self.turn(keeper, prompt, snapshot_id=named)
            if turn is not None:
                self.history = [*prompt, *turn.tokens]
                self.acknowledged += [turn.snapshot_id] if turn.snapshot_id else []
        return turn

    def check_usable(self, *, must_reuse: bool = False) -> None:
        """Go on in two new processes: both must answer and store, and the second must reuse what the first stored."""
        first = self.converse(self.keeper())
        if first is None or first.snapshot_id is None:
            self.unusable.append("the next call was not answered and stored")
            return
        if must_reuse and not first.reuse.from_store:
            self.unusable.append("the next call reused nothing that was stored")
        second = self.converse(self.keeper())
        if second is None or second.snapshot_id is None or not second.reuse.from_store:
            self.unusable.append("the call after that reused nothing or was not stored")

    def check_kept(self) -> None:
        """Check that the head is at the last acknowledged turn, or at one that follows it, and that it is readable."""
        if not self.acknowledged:
            return
        store, last = self.store(), self.acknowledged[-1]
        head = store.head(self.name.sid)
        at = head.snapshot if head else None
        found = store.get_snapshot(self.name.sid, at) if at else None
        if found is None:
            self.lost.append(f"turn {last[:8]} was acknowledged; the head is at {at and at[:8]}")
            return
        if last not in (at, found.parent):
            self.lost.append(f"turn {last[:8]} was acknowledged; the head is at {str(at)[:8]}")
        blocks = list(store.get_blocks(found.fingerprint, [ref.chain for ref in found.blocks]))
        if None in blocks:
            self.lost.append(f"block {blocks.index(None)} of turn {str(at)[:8]} is gone")

    def report(self) -> TrialReport:
        """Close everything and say what was seen."""
        counters: dict[str, int] = {}
        for store in self._stores:
            for name, value in store.counters.as_dict().items():
                counters[name] = counters.get(name, 0) + value
        for client in self._clients:
            client.close()
        return TrialReport(
            kind=self.kind,
            seed=self.seed,
            server=self.server.name,
            wrong=tuple(self.wrong),
            unusable=tuple(self.unusable),
            lost=tuple(self.lost),
            errors=tuple(self.errors),
            counters=counters,
            note=self.note,
        )


def call(
    keeper: SessionKeeper,
    prompt: Sequence[int],
    num_tokens: int,
    *,
    name: SessionName,
    reply: list[int],
    snapshot_id: str | None = None,
    on_open: Callable[[], None] = lambda: None,
    on_text: Callable[[list[int]], None] = lambda reply: None,
) -> Turn:
    """Do what a chat model does with one call.

    Args:
        keeper: Of the process.
        prompt: All token ids.
        num_tokens: Length of the reply.
        name: The session.
        reply: Where the tokens are put as they come.
        snapshot_id: The snapshot that the newest message names, if any.
        on_open: Told when the session is there.
        on_text: Told the whole reply before it is committed.
    """
    live = keeper.checkout(name.sid, is_stored=True, snapshot_id=snapshot_id, name=name)
    on_open()
    try:
        reuse = keeper.restore(live, np.asarray(prompt, dtype=np.int32))
        for step in decode(
            keeper.target, live.state, LookupDrafter(), Request(list(prompt), max_new_tokens=num_tokens)
        ):
            reply += step.tokens
        on_text(reply)
        committed = keeper.commit(live)
    finally:
        keeper.checkin(name.sid, live)
    return Turn(list(reply), reuse, None if committed is None else committed.snapshot_id)


def store_parts(store: SessionStore) -> list[tuple[str, str, int]]:
    """List every key of the store's tenant: the key, its kind, and its bytes of the server's memory."""
    keys = sorted(set(store.client.scan_iter(match=store.keys.everything(), count=1000)))
    return [(key.decode(), store.keys.kind(key), int(store.client.memory_usage(key) or 0)) for key in keys]


@contextmanager
def quiet_logs() -> Iterator[None]:
    """Keep the warnings that faults are meant to raise off the screen."""
    loggers = [logging.getLogger(name) for name in ("dlite_agent.session_keeper", "dlite_agent.commit_queue")]
    for logger in loggers:
        logger.addFilter(_nothing)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(_nothing)


def _nothing(record: logging.LogRecord) -> bool:
    return False

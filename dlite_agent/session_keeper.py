"""Where live sessions meet Redis: which rows are in RAM, which can be fetched, which must be stored.

Live states are kept in RAM, the least recently used ones dropped when they exceed a budget, pinned ones (a tool runs,
and its result will go on from there) after all others; below them is the session store. A session found in neither
starts from the longest prefix another session has stored. Nothing of the drafter passes through here: there is nothing
of it to keep.

How long a caller waits for the store is its choice, `Durability`: "turn" returns a turn once it is stored, "async"
stores it behind the caller's back and has the session's next call wait for that, "none" stores nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from dlite_agent.break_even import BreakEven
from dlite_agent.commit_queue import CommitQueue
from dlite_agent.config import Durability
from dlite_agent.engine.state import Ids, TargetState, common_prefix
from dlite_agent.engine.target import Target
from dlite_agent.errors import FencedError, SessionError
from dlite_agent.live_session import LiveSession, TurnCommit
from dlite_agent.session_rows import append_rows, copy_blocks, read_pivot
from dlite_agent.sessions.heads import Lease
from dlite_agent.sessions.keys import SessionName, chain_blocks, chain_root
from dlite_agent.sessions.records import BlockRef, Snapshot
from dlite_agent.sessions.store import CommitReport, SessionStore

logger = logging.getLogger(__name__)

BLOCK_TOKENS = 32
DEFAULT_BUDGET_BYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class Reuse:
    """Where the rows of a prompt came from, in tokens, and which stored blocks were gone."""

    from_ram: int = 0
    from_store: int = 0
    blocks_lost: int = 0


@dataclass(frozen=True, slots=True)
class Committed:
    """What a commit stored, or is about to store in the background.

    Attributes:
        snapshot_id: The snapshot's id.
        num_bytes: Bytes that were new; of a commit in the background, bytes of the rows it has yet to store.
    """

    snapshot_id: str
    num_bytes: int


class SessionKeeper:
    """Hands out live sessions, one call at a time each, and brings them back to RAM and to the store."""

    def __init__(
        self,
        target: Target,
        store: SessionStore | None,
        *,
        block_tokens: int = BLOCK_TOKENS,
        budget_bytes: int = DEFAULT_BUDGET_BYTES,
        durability: Durability = "turn",
    ) -> None:
        """Keep sessions of one target.

        Args:
            target: The target whose KV rows are kept.
            store: Where sessions persist, or None to keep them in RAM only.
            block_tokens: Most tokens per stored block.
            budget_bytes: RAM for the KV rows of all sessions; those in use stay, the rest are dropped as need be,
                pinned ones last.
            durability: When a turn is stored. "turn": before `commit` returns. "async": in the background, before the
                session's next `checkout` or `close` returns, or the interpreter exits; a crash loses what was waiting.
                "none": never; what others stored is still read, and nobody is fenced.
        """
        self.target = target
        self.store = store
        if store is not None and not target.is_restorable:
            logger.warning("sessions of this model are kept in RAM only: KV rows alone do not restore it")
            self.store = None
        self._durability = durability
        self.break_even = BreakEven()
        self._queue = CommitQueue()
        self._block_tokens = block_tokens
        self._budget_bytes = budget_bytes
        self._idle: OrderedDict[str, LiveSession] = OrderedDict()
        self._in_use: dict[int, LiveSession] = {}
        self._pinned: set[str] = set()
        self._lock = threading.Lock()

    def checkout(
        self, key: str, *, is_stored: bool, snapshot_id: str | None = None, name: SessionName | None = None
    ) -> LiveSession:
        """Take a session for one call; a second call on the same key meanwhile gets a state of its own.

        Args:
            key: A `sessions.keys.session_id`, or a name for a session that is not stored.
            is_stored: Whether the session persists.
            snapshot_id: The snapshot a message names, for forks and time travel; the head's otherwise.
            name: What people call the session, for `dlite-agent sessions`; `key` is a hash of it.
        """
        if is_stored:
            self._queue.wait(key)  # its outcome is part of the session, and acquiring would fence it out
        with self._lock:
            live = self._idle.pop(key, None)
        sid = key if is_stored and self.store is not None else None
        if live is None:
            live = LiveSession(sid, TargetState(self.target.new_cache()), np.empty(0, dtype=np.int32))
        live.known_ids = live.state.ids.copy()
        with self._lock:
            self._in_use[id(live)] = live
        if sid is not None:
            try:
                head = self._take_lease(live, sid, name, named=snapshot_id)
                self._find_snapshot(live, named=snapshot_id, head=head)
            except SessionError:
                self.checkin(key, live)  # the store failed, not what is in RAM
                raise
        return live

    def checkin(self, key: str, live: LiveSession) -> None:
        """Give a session back; if another call did so meanwhile, the later one stays."""
        with self._lock:
            self._in_use.pop(id(live), None)
            self._idle[key] = live
            self._idle.move_to_end(key)
            self._drop_over_budget(newest=key)

    @property
    def pinned(self) -> frozenset[str]:
        """Sessions that are pinned."""
        return frozenset(self._pinned)

    def pin(self, key: str) -> None:
        """Let a session's rows go after those of all sessions that are not pinned, until it is unpinned."""
        with self._lock:
            self._pinned.add(key)

    def unpin(self, key: str) -> None:
        """Undo `pin`; nothing happens if the session is not pinned."""
        with self._lock:
            self._pinned.discard(key)

    def _drop_over_budget(self, *, newest: str) -> None:
        total = sum(session.state.cache.nbytes for session in [*self._idle.values(), *self._in_use.values()])
        for key in sorted(self._idle, key=self._pinned.__contains__):  # each kind from the least recently used on
            if total <= self._budget_bytes:
                return
            if key != newest:
                total -= self._idle.pop(key).state.cache.nbytes
                self._pinned.discard(key)  # its turn may have been left open

    @torch.inference_mode()
    def restore(self, live: LiveSession, prompt: Ids) -> Reuse:
        """Fetch stored rows that agree with the prompt and are not in RAM, up to the first that is missing."""
        state = live.state
        from_ram = min(common_prefix(state.ids[: state.num_rows], prompt), len(prompt) - 1)
        if self.store is None or live.sid is None:
            return Reuse(from_ram)
        is_guess = not live.refs and from_ram == 0
        if is_guess:
            self._guess_shared_prefix(live, prompt)
        usable = min(common_prefix(live.ref_ids, prompt), len(prompt) - 1)
        if usable <= from_ram or not self.break_even.is_fetching_faster():
            return Reuse(from_ram)
        kept = self._keep_whole_blocks(live, from_ram)
        num_rows = self._fetch(live, prompt, usable)
        return Reuse(kept, num_rows - kept, 0 if is_guess or num_rows == usable else 1)

    @torch.inference_mode()
    def restore_pivot(self, live: LiveSession, snapshot: Snapshot) -> bool:
        """Fetch all rows and the pivot of a snapshot, to continue behind its last token; False if any is gone."""
        assert self.store is not None
        ids = snapshot.token_ids()
        self._adopt(live, snapshot)
        live.state.rewind(0)
        restored = self._fetch(live, ids, snapshot.num_kv)
        if not snapshot.pivot or restored < snapshot.num_kv or snapshot.num_kv != len(ids) - 1:
            return False
        row = self.store.get_pivot(self.target.fingerprint, snapshot.blocks[-1].chain, snapshot.num_kv - 1)
        pivot = None if row is None else read_pivot(self.target, row)
        if pivot is None:
            return False
        live.state.append(ids[restored:])
        live.state.pivot = pivot
        return True

    @torch.inference_mode()
    def commit(self, live: LiveSession) -> Committed | None:
        """Store what the session gained since its last commit; None if it is not stored or the store failed.

        In the background (see `durability`) a failure shows as a log line and in the store's counters only. Either way
        it loses no token: the next commit, or a re-prefill, makes up for it.
        """
        if live.sid is not None:
            self._queue.wait(live.sid)
        if self.store is None or live.sid is None or live.lease is None or live.state.num_rows == 0:
            return None
        commit = TurnCommit.prepare(live, self.target, secret=self.store.codec.secret, block_tokens=self._block_tokens)
        if self._durability == "async":
            self._queue.submit(live.sid, commit.num_bytes, partial(self._write, live, commit))
            return Committed(commit.snapshot_id, commit.num_bytes)
        report = self._write(live, commit)
        return None if report is None else Committed(report.snapshot_id, report.bytes_written)

    def flush(self) -> None:
        """Wait until everything committed so far is stored, or has failed."""
        self._queue.drain()

    def close(self) -> None:
        """Wait as `flush` does, at most a minute; commits after that are stored at once."""
        self._queue.close()

    @torch.inference_mode()
    def _write(self, live: LiveSession, commit: TurnCommit) -> CommitReport | None:
        """Store a commit and tell the session; in the background nobody else uses it until that is done."""
        try:
            report = self._store(live, commit)
        except FencedError as error:
            logger.warning("session %s: %s", live.sid, error)
            live.lease = None
            return None
        except SessionError as error:
            logger.warning("the turn was not stored, the session goes on in RAM: %s", error)
            return None
        live.lease = None if report.status == "sibling" else report.lease
        live.parent = report.snapshot_id
        live.refs, live.ref_ids = list(commit.snapshot.blocks), commit.ids
        if report.blocks_missing:  # evicted meanwhile: the next commit writes them again
            live.refs, live.ref_ids = [], np.empty(0, dtype=np.int32)
        return report

    def _store(self, live: LiveSession, commit: TurnCommit) -> CommitReport:
        """Copy and store the turn's rows; where the lease is stale but the turn goes on from the head, take it back.

        That is the worker whose turns alternate with another's, or follow one's that died.
        """
        assert self.store is not None
        new = commit.snapshot.blocks[commit.num_old_blocks :]
        blocks = list(copy_blocks(live.state, new, commit.num_old_rows))
        try:
            return self.store.commit(commit.lease, commit.snapshot, blocks=blocks, pivot=commit.pivot)
        except FencedError:
            if not self._hides_nothing(self.store.head(commit.lease.sid), commit):
                raise
            lease = self.store.acquire(commit.lease.sid)
            if not self._hides_nothing(lease, commit):
                raise
            return self.store.commit(lease, commit.snapshot, blocks=blocks, pivot=commit.pivot)

    def _hides_nothing(self, head: Lease | None, commit: TurnCommit) -> bool:
        """Say whether a head may be moved: the commit has all tokens of its snapshot, or nobody can read that one."""
        assert self.store is not None
        if head is None or head.snapshot in (None, commit.snapshot.parent, commit.snapshot_id):
            return head is not None
        at = self.store.get_snapshot(head.sid, head.snapshot)
        return at is None or commit.snapshot.ids.startswith(at.ids)

    def _take_lease(self, live: LiveSession, sid: str, name: SessionName | None, *, named: str | None) -> str | None:
        """Take the session over, to commit to it; return the snapshot its head is at.

        A lease held since an earlier call is stale if the message names a snapshot that was not made here.
        """
        assert self.store is not None
        live.sid = sid
        if self._durability == "none":
            head = self.store.head(sid)
            return head.snapshot if head else None
        if live.lease is None or named not in (None, live.parent):
            live.lease = self.store.acquire(sid, name=name)
        return live.lease.snapshot

    def _find_snapshot(self, live: LiveSession, *, named: str | None, head: str | None) -> None:
        """Learn the session's ids and blocks from the snapshot a message names, else from the head's.

        The named one may be gone: a crash took it with the commits that were waiting.
        """
        assert self.store is not None and live.sid is not None
        for wanted in (named, head):
            if wanted is None:
                continue
            if wanted == live.parent:
                return
            snapshot = self.store.get_snapshot(live.sid, wanted)
            if snapshot is not None and snapshot.fingerprint == self.target.fingerprint:
                self._adopt(live, snapshot)
                return

    def _adopt(self, live: LiveSession, snapshot: Snapshot) -> None:
        live.parent = snapshot.snapshot_id
        live.known_ids = snapshot.token_ids().copy()
        live.refs = list(snapshot.blocks)
        live.ref_ids = live.known_ids[: snapshot.num_kv]

    def _guess_shared_prefix(self, live: LiveSession, prompt: Ids) -> None:
        """Name the full blocks of the prompt's start: another session may have stored the same system prompt."""
        assert self.store is not None
        size = self._block_tokens
        counts = [size] * ((len(prompt) - 1) // size)
        root = chain_root(self.target.fingerprint, self.store.codec.secret)
        chains = chain_blocks(root, prompt[: sum(counts)], counts)
        live.refs = [BlockRef(chain, size) for chain in chains]
        live.ref_ids = prompt[: sum(counts)].copy()

    def _keep_whole_blocks(self, live: LiveSession, num_rows: int) -> int:
        """Rewind the state to the last end of a stored block within its first rows; returns where that is."""
        kept = sum(ref.num_tokens for ref in live.stored_prefix(live.state.ids[:num_rows]))
        live.state.rewind(kept)
        return kept

    def _fetch(self, live: LiveSession, ids: Ids, num_rows: int) -> int:
        """Append stored rows to a state that ends where a block does, up to `num_rows` in all; returns how many it has.

        Refs from the first block that is gone on are forgotten, so the next commit writes those blocks again.
        """
        assert self.store is not None
        state, began, first_row = live.state, time.perf_counter(), live.state.num_rows
        first = len(live.covering(first_row))
        wanted = live.covering(num_rows)[first:]
        state.cache.reserve(len(ids))
        fingerprint = self.target.fingerprint
        blocks = self.store.get_blocks(fingerprint, [ref.chain for ref in wanted])
        for index, (ref, block) in enumerate(zip(wanted, blocks, strict=True), first):
            start = state.num_rows
            count = min(ref.num_tokens, num_rows - start)
            is_usable = block is not None and block.num_tokens == ref.num_tokens
            if block is None or not (is_usable and append_rows(self.target, state, block, count)):
                if block is not None:
                    self.store.reject_block(fingerprint, ref.chain)
                live.refs = live.refs[:index]
                live.ref_ids = live.ref_ids[: sum(each.num_tokens for each in live.refs)]
                break
            state.append(ids[start : start + count])
        self.break_even.fetched(state.num_rows - first_row, time.perf_counter() - began)
        return state.num_rows

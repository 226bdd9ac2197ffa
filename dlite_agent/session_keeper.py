"""Where live sessions meet Redis: which rows are in RAM, which can be fetched, which must be stored.

Live states are kept in RAM, the least recently used ones dropped when they exceed a budget; below them is the session
store. A session found in neither starts from the longest prefix another session has stored. Nothing of the drafter
passes through here: there is nothing of it to keep.

How long a caller waits for the store is its choice, `Durability`: "turn" returns a turn once it is stored, "async"
stores it behind the caller's back and has the session's next call wait for that, "none" stores nothing.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from dlite_agent.commit_queue import CommitQueue
from dlite_agent.config import Durability
from dlite_agent.engine.kv_codec import TensorBytes, append_block, block_bytes, from_bytes, to_bytes
from dlite_agent.engine.state import Ids, TargetState, common_prefix
from dlite_agent.engine.target import Target
from dlite_agent.errors import FencedError, SessionError
from dlite_agent.sessions.keys import DIGEST_BYTES, SessionName, chain_blocks, chain_next, chain_root, ids_to_bytes
from dlite_agent.sessions.records import Block, BlockRef, SideRow, Snapshot
from dlite_agent.sessions.store import CommitReport, Lease, SessionStore

logger = logging.getLogger(__name__)

BLOCK_TOKENS = 32
DEFAULT_BUDGET_BYTES = 4 << 30


@dataclass(slots=True)
class LiveSession:
    """One session while a call uses it.

    Attributes:
        sid: Its name in the store, or None for a session that is not stored.
        state: Its tokens, KV rows and pivot.
        known_ids: Ids of its text as far as they are known, in RAM or from a snapshot.
        lease: The right to commit, or None.
        parent: Snapshot that the next commit follows.
        refs: Stored blocks, in order.
        ref_ids: The ids those blocks hold.
    """

    sid: str | None
    state: TargetState
    known_ids: Ids
    lease: Lease | None = None
    parent: str | None = None
    refs: list[BlockRef] = field(default_factory=list)
    ref_ids: Ids = field(default_factory=lambda: np.empty(0, dtype=np.int32))

    def stored_prefix(self, ids: Ids) -> list[BlockRef]:
        """Return the stored blocks that hold a prefix of `ids`, whole blocks only."""
        agreeing = common_prefix(self.ref_ids, ids)
        kept, total = [], 0
        for ref in self.refs:
            total += ref.num_tokens
            if total > agreeing:
                break
            kept.append(ref)
        return kept


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


@dataclass(frozen=True, slots=True)
class _Commit:
    """A turn's gain, copied out of the live state."""

    lease: Lease
    snapshot: Snapshot
    snapshot_id: str
    blocks: list[Block]
    pivot: SideRow | None
    ids: Ids

    @property
    def num_bytes(self) -> int:
        return sum(memoryview(block.payload).nbytes for block in self.blocks)


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
            budget_bytes: RAM for the KV rows of all sessions; those in use stay, the rest are dropped as need be.
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
        self._queue = CommitQueue()
        self._block_tokens = block_tokens
        self._budget_bytes = budget_bytes
        self._idle: OrderedDict[str, LiveSession] = OrderedDict()
        self._in_use: dict[int, LiveSession] = {}
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
                head = self._take_lease(live, sid, name)
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
            held = [*self._idle.values(), *self._in_use.values()]
            total = sum(session.state.cache.nbytes for session in held)
            while total > self._budget_bytes and len(self._idle) > 1:
                _, dropped = self._idle.popitem(last=False)
                total -= dropped.state.cache.nbytes

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
        if usable <= from_ram:
            return Reuse(from_ram)
        state.rewind(0)
        restored = self._fetch(live, prompt, usable)
        return Reuse(0, restored, 0 if is_guess or restored == usable else 1)

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
        pivot = None if row is None else self._read_pivot(row)
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
        commit = self._prepare(live, live.lease)
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

    def _prepare(self, live: LiveSession, lease: Lease) -> _Commit:
        refs, blocks = self._new_blocks(live)
        snapshot = Snapshot(
            parent=live.parent,
            fingerprint=self.target.fingerprint,
            ids=ids_to_bytes(live.state.ids),
            num_kv=live.state.num_rows,
            blocks=tuple(refs),
            pivot=live.state.pivot is not None,
        )
        pivot = None if live.state.pivot is None else self._pivot_row(live.state.pivot, snapshot)
        ids = live.state.ids[: live.state.num_rows].copy()
        return _Commit(lease, snapshot, snapshot.snapshot_id, blocks, pivot, ids)

    def _write(self, live: LiveSession, commit: _Commit) -> CommitReport | None:
        """Store a commit and tell the session; in the background nobody else uses it until that is done."""
        assert self.store is not None
        try:
            report = self.store.commit(commit.lease, commit.snapshot, blocks=commit.blocks, pivot=commit.pivot)
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

    def _take_lease(self, live: LiveSession, sid: str, name: SessionName | None) -> str | None:
        """Take the session over, to commit to it; return the snapshot its head is at."""
        assert self.store is not None
        live.sid = sid
        if self._durability == "none":
            head = self.store.head(sid)
            return head.snapshot if head else None
        if live.lease is None:
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
        live.refs = [BlockRef(chain, size, bytes(DIGEST_BYTES)) for chain in chains]  # digests come with the blocks
        live.ref_ids = prompt[: sum(counts)].copy()

    def _fetch(self, live: LiveSession, ids: Ids, num_rows: int) -> int:
        """Append stored rows to an empty state, at most `num_rows`; returns how many.

        Refs from the first block that is gone on are forgotten, so the next commit writes those blocks again.
        """
        assert self.store is not None
        state = live.state
        wanted = self._covering(live.refs, num_rows)
        state.cache.reserve(len(ids))
        for index, block in enumerate(self.store.get_blocks(self.target.fingerprint, [r.chain for r in wanted])):
            start = state.num_rows
            count = min(wanted[index].num_tokens, num_rows - start)
            if block is None or not self._append(state, block, count):
                live.refs = live.refs[:index]
                live.ref_ids = live.ref_ids[: sum(ref.num_tokens for ref in live.refs)]
                break
            live.refs[index] = block.ref()
            state.append(ids[start : start + count])
        return state.num_rows

    @staticmethod
    def _covering(refs: Sequence[BlockRef], num_rows: int) -> list[BlockRef]:
        covering, total = [], 0
        for ref in refs:
            if total >= num_rows:
                break
            covering.append(ref)
            total += ref.num_tokens
        return covering

    def _append(self, state: TargetState, block: Block, count: int) -> bool:
        """Append a block's first rows; False if it does not have this target's shape."""
        config = self.target.config
        heads = config.num_key_value_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        expected = (self.target.num_layers, 2, heads, block.num_tokens, head_dim)
        if block.shape != expected or block.dtype != str(self.target.dtype).removeprefix("torch."):
            return False
        append_block(state.cache, TensorBytes(block.dtype, block.shape, memoryview(block.payload)), num_rows=count)
        return True

    def _new_blocks(self, live: LiveSession) -> tuple[list[BlockRef], list[Block]]:
        """Cut the rows behind the last stored block into new blocks."""
        assert self.store is not None
        state = live.state
        refs = live.stored_prefix(state.ids[: state.num_rows])
        start = sum(ref.num_tokens for ref in refs)
        chain = refs[-1].chain if refs else chain_root(self.target.fingerprint, self.store.codec.secret)
        blocks: list[Block] = []
        while start < state.num_rows:
            stop = min(start + self._block_tokens, state.num_rows)
            chain = chain_next(chain, state.ids[start:stop])
            rows = block_bytes(state.cache, start, stop)
            blocks.append(Block(chain, stop - start, rows.dtype, rows.shape, rows.payload))
            refs.append(blocks[-1].ref())
            start = stop
        return refs, blocks

    def _pivot_row(self, pivot: torch.Tensor, snapshot: Snapshot) -> SideRow:
        """Pack the pivot; its layer ids go in front, so that a drafter of other layers does not take it."""
        layers = torch.tensor(self.target.layer_ids, dtype=pivot.dtype, device=pivot.device)
        packed = to_bytes(torch.cat([layers.unsqueeze(1), pivot], dim=1))
        return SideRow(snapshot.blocks[-1].chain, snapshot.num_kv - 1, packed.dtype, packed.shape, packed.payload)

    def _read_pivot(self, row: SideRow) -> torch.Tensor | None:
        if row.shape != (len(self.target.layer_ids), self.target.hidden_size + 1):
            return None
        packed = from_bytes(row.dtype, row.shape, row.payload).to(self.target.device)
        if packed[:, 0].tolist() != list(self.target.layer_ids):
            return None
        return packed[:, 1:].contiguous()

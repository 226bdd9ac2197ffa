"""One session while a call uses it, and what its turn came to."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from dlite_agent.engine.state import Ids, TargetState, common_prefix
from dlite_agent.engine.target import Target
from dlite_agent.session_rows import block_shape, pack_pivot
from dlite_agent.sessions.heads import Lease
from dlite_agent.sessions.keys import chain_blocks, chain_root, ids_to_bytes
from dlite_agent.sessions.records import BlockRef, SideRow, Snapshot


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

    def covering(self, num_rows: int) -> list[BlockRef]:
        """Return the stored blocks that the first `num_rows` rows are in."""
        covering, total = [], 0
        for ref in self.refs:
            if total >= num_rows:
                break
            covering.append(ref)
            total += ref.num_tokens
        return covering


@dataclass(frozen=True, slots=True)
class TurnCommit:
    """What a turn came to. Its new rows are still in the live state, which does not change before they are stored.

    Attributes:
        lease: The right to commit it.
        snapshot: What the session is now.
        snapshot_id: Its id.
        num_old_blocks: How many of its blocks were stored before.
        pivot: Its pivot row, or None.
        ids: The ids whose rows it has.
        num_bytes: Bytes of its new rows.
    """

    lease: Lease
    snapshot: Snapshot
    snapshot_id: str
    num_old_blocks: int
    pivot: SideRow | None
    ids: Ids
    num_bytes: int

    @property
    def num_old_rows(self) -> int:
        """Rows of the blocks that were stored before."""
        return sum(ref.num_tokens for ref in self.snapshot.blocks[: self.num_old_blocks])

    @classmethod
    def prepare(cls, live: LiveSession, target: Target, *, secret: bytes, block_tokens: int) -> TurnCommit:
        """Name what is to be stored; nothing is copied or hashed but token ids and the pivot."""
        assert live.lease is not None
        state, num_rows = live.state, live.state.num_rows
        ids = state.ids[:num_rows].copy()
        old = live.stored_prefix(ids)
        start = sum(ref.num_tokens for ref in old)
        counts = [min(block_tokens, num_rows - at) for at in range(start, num_rows, block_tokens)]
        chain = old[-1].chain if old else chain_root(target.fingerprint, secret)
        new = map(BlockRef, chain_blocks(chain, ids[start:], counts), counts)
        snapshot = Snapshot(
            parent=live.parent,
            fingerprint=target.fingerprint,
            ids=ids_to_bytes(state.ids),
            num_kv=num_rows,
            blocks=(*old, *new),
            pivot=state.pivot is not None,
        )
        pivot = None
        if state.pivot is not None:
            pivot = pack_pivot(target, state.pivot, chain=snapshot.blocks[-1].chain, position=num_rows - 1)
        num_bytes = math.prod(block_shape(target, num_rows - start)) * target.dtype.itemsize
        return cls(live.lease, snapshot, snapshot.snapshot_id, len(old), pivot, ids, num_bytes)

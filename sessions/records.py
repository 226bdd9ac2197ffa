"""What sessions keep in Redis: KV blocks, hidden rows, snapshots; `record_codec` turns them into bytes and back.

A snapshot names blocks by their chains, and a chain follows from token ids alone. So a snapshot's id is known before
the bytes of its blocks are, and rows may be copied, hashed and sent behind a caller's back.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from dlite_agent.errors import RecordError
from dlite_agent.sessions.keys import DIGEST_BYTES, ids_from_bytes, is_snapshot_id

MAX_RECORD_BYTES = 512 * 2**20
"""Largest value a Redis server takes; a larger one shows only as a broken pipe, so it is refused before."""

HEADER_BYTES = 172
"""Bytes of a record in front of its payload."""

MAX_DIMS = 8
DTYPE_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float64": 8,
    "int8": 1,
    "uint8": 1,
    "int32": 4,
    "int64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
"""Bytes per element of every dtype a record can hold. The order is the wire code: append, never reorder."""

_REF = struct.Struct(f"<{DIGEST_BYTES}sI")


@dataclass(frozen=True, slots=True)
class BlockRef:
    """A snapshot's pointer to one KV block.

    Attributes:
        chain: The block's chain hash.
        num_tokens: Tokens in the block.
    """

    chain: bytes
    num_tokens: int

    def __post_init__(self) -> None:
        _check_chain(self.chain)
        if not 0 < self.num_tokens < 2**32:
            raise RecordError(f"a block holds {self.num_tokens} tokens; expected at least 1")


@dataclass(frozen=True, slots=True)
class Block:
    """KV rows of consecutive tokens, as bytes.

    Attributes:
        chain: The chain hash after this block's tokens.
        num_tokens: Tokens in the block.
        dtype: Element type, a key of `DTYPE_BYTES`.
        shape: At most eight dimensions; what they mean is the engine's business.
        payload: The elements, contiguous, exactly as many bytes as dtype and shape say.
        digest: `payload_digest` of the payload, computed here.
    """

    chain: bytes
    num_tokens: int
    dtype: str
    shape: tuple[int, ...]
    payload: bytes | memoryview = field(repr=False)
    digest: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        _check_chain(self.chain)
        if not 0 < self.num_tokens < 2**32:
            raise RecordError(f"a block holds {self.num_tokens} tokens; expected at least 1")
        _check_tensor(self.dtype, self.shape, self.payload)
        object.__setattr__(self, "digest", payload_digest(self.payload))

    def ref(self) -> BlockRef:
        """Make the pointer a snapshot keeps."""
        return BlockRef(self.chain, self.num_tokens)


@dataclass(frozen=True, slots=True)
class SideRow:
    """Hidden states of one position, as bytes: what a drafter is conditioned on after a restore.

    Attributes:
        chain: Chain hash of the block that ends at the position.
        position: Position of the row in the sequence, from 0.
        dtype: Element type, a key of `DTYPE_BYTES`.
        shape: At most eight dimensions.
        payload: The elements, contiguous.
        digest: `payload_digest` of the payload, computed here.
    """

    chain: bytes
    position: int
    dtype: str
    shape: tuple[int, ...]
    payload: bytes | memoryview = field(repr=False)
    digest: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        _check_chain(self.chain)
        if not 0 <= self.position < 2**63:
            raise RecordError(f"a row's position is {self.position}; expected 0 or more")
        _check_tensor(self.dtype, self.shape, self.payload)
        object.__setattr__(self, "digest", payload_digest(self.payload))


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a session was after a turn; immutable, named by its content.

    All token ids are kept (4 bytes each, next to kilobytes of KV), so a snapshot survives the eviction of any block
    and of its parents.

    Attributes:
        parent: Id of the snapshot it continues, or None.
        fingerprint: What identifies the target.
        ids: All token ids of the session as little-endian int32 (`ids_to_bytes`).
        num_kv: Leading tokens whose KV rows the blocks hold.
        blocks: The blocks, in order, together exactly `num_kv` tokens.
        pivot: Whether a hidden row was stored for position `num_kv - 1`.
        created_at: Seconds since 1970; no part of the identity.
    """

    parent: str | None
    fingerprint: str
    ids: bytes = field(repr=False)
    num_kv: int
    blocks: tuple[BlockRef, ...] = field(repr=False)
    pivot: bool = False
    created_at: float = field(default_factory=lambda: time.time(), compare=False)

    def __post_init__(self) -> None:
        if self.parent is not None and not is_snapshot_id(self.parent):
            raise RecordError(f"parent is {self.parent[:80]!r}; expected a snapshot id or None")
        if len(self.ids) % 4:
            raise RecordError(f"token ids take {len(self.ids)} bytes; expected a multiple of 4")
        if not 0 <= self.num_kv <= self.num_tokens:
            raise RecordError(f"num_kv is {self.num_kv}; expected 0 to {self.num_tokens}, the number of tokens")
        held = sum(ref.num_tokens for ref in self.blocks)
        if held != self.num_kv:
            raise RecordError(f"the blocks hold {held} tokens; expected num_kv, which is {self.num_kv}")
        if self.pivot and not self.blocks:
            raise RecordError("the snapshot has a pivot row but no blocks; expected at least one block before it")

    @property
    def num_tokens(self) -> int:
        """Number of tokens, with or without KV rows."""
        return len(self.ids) // 4

    @property
    def snapshot_id(self) -> str:
        """The content hash, 64 hex digits: the same content always has the same id."""
        return payload_digest(self.payload()).hex()

    def token_ids(self) -> npt.NDArray[np.int32]:
        """Read all token ids, as a read-only view."""
        return ids_from_bytes(self.ids)

    def payload(self) -> bytes:
        """Write what the snapshot's id names."""
        meta = {
            "fingerprint": self.fingerprint,
            "num_blocks": len(self.blocks),
            "num_kv": self.num_kv,
            "parent": self.parent,
            "pivot": self.pivot,
        }
        text = json.dumps(meta, sort_keys=True, separators=(",", ":")).encode()
        refs = [_REF.pack(ref.chain, ref.num_tokens) for ref in self.blocks]
        return b"".join((struct.pack("<I", len(text)), text, *refs, self.ids))

    @classmethod
    def from_payload(cls, payload: memoryview, *, created_at: float) -> Snapshot:
        """Parse a payload whose digest has been checked; only a writer's fault can make it odd.

        Raises:
            RecordError: If it is odd.
        """
        try:
            (size,) = struct.unpack_from("<I", payload)
            meta: dict[str, Any] = json.loads(bytes(payload[4 : 4 + size]))
            first, num_blocks = 4 + size, int(meta["num_blocks"])
            refs = tuple(BlockRef(*_REF.unpack_from(payload, first + i * _REF.size)) for i in range(num_blocks))
            return cls(
                parent=meta["parent"],
                fingerprint=meta["fingerprint"],
                ids=bytes(payload[first + num_blocks * _REF.size :]),
                num_kv=meta["num_kv"],
                blocks=refs,
                pivot=meta["pivot"],
                created_at=created_at,
            )
        except (struct.error, ValueError, KeyError, TypeError) as error:
            raise RecordError(f"the snapshot cannot be parsed: {error}") from error


def payload_digest(payload: bytes | memoryview) -> bytes:
    """Hash a payload: SHA-256, which most processors have instructions for.

    Returns:
        32 bytes.
    """
    return hashlib.sha256(payload).digest()


def _check_chain(chain: bytes) -> None:
    if len(chain) != DIGEST_BYTES:
        raise RecordError(f"a chain has {len(chain)} bytes; expected {DIGEST_BYTES}")


def check_size(num_bytes: int) -> None:
    """Refuse a payload whose record no server takes.

    Raises:
        RecordError: If it is larger.
    """
    if num_bytes + HEADER_BYTES > MAX_RECORD_BYTES:
        raise RecordError(
            f"the record takes {num_bytes + HEADER_BYTES} bytes; expected at most {MAX_RECORD_BYTES}; "
            "use smaller blocks"
        )


def _check_tensor(dtype: str, shape: tuple[int, ...], payload: bytes | memoryview) -> None:
    if dtype not in DTYPE_BYTES:
        raise RecordError(f"dtype is {dtype!r}; expected one of {', '.join(DTYPE_BYTES)}")
    if not 0 < len(shape) <= MAX_DIMS or any(not 0 < size < 2**32 for size in shape):
        raise RecordError(f"shape is {shape}; expected 1 to {MAX_DIMS} positive dimensions")
    view = memoryview(payload)
    if not view.c_contiguous:
        raise RecordError("the payload is not contiguous; expected one run of bytes")
    if view.nbytes != math.prod(shape) * DTYPE_BYTES[dtype]:
        raise RecordError(f"the payload has {view.nbytes} bytes; expected {shape} of {dtype}")
    check_size(view.nbytes)

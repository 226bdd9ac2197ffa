"""Records: the bytes that sessions keep in Redis, and their codec.

Every record starts with one fixed header that says what it is, for which target, for which tokens and of which
digest; a reader trusts nothing it has not checked. A record is raw bytes, never pickle.

The payload's digest sits in the header and the header ends with a seal over all of it, keyed when the tenant has a
secret: payload bytes are hashed once, and no one without the secret can forge a record.
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
from dlite_agent.sessions.codecs import CodecName, check_codec, decode, encode, is_readable
from dlite_agent.sessions.keys import (
    DIGEST_BYTES,
    chain_blocks,
    chain_root,
    check_secret,
    fingerprint_hash,
    ids_from_bytes,
    is_snapshot_id,
)

MAX_RECORD_BYTES = 512 * 2**20
"""Largest value a Redis server takes; a larger one shows only as a broken pipe, so it is refused before."""

SCHEMA_VERSION = 1
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

_DTYPES = tuple(DTYPE_BYTES)
_MAGIC = b"DLR1"
_BLOCK, _SIDE, _SNAPSHOT = 1, 2, 3
# magic, schema, kind, codec, dtype, dims | count | fingerprint | echoed chain | shape | payload length | payload digest
_HEADER = struct.Struct(f"<4sBBBBB3xQ16s{DIGEST_BYTES}s{MAX_DIMS}IQ{DIGEST_BYTES}s")
_SEAL_BYTES = 32
_HEADER_BYTES = _HEADER.size + _SEAL_BYTES
_REF = struct.Struct(f"<{DIGEST_BYTES}sI{DIGEST_BYTES}s")


class ForeignRecordError(RecordError):
    """The record is sound, but of another target, chain, position, kind or version than was asked for."""


@dataclass(frozen=True, slots=True)
class BlockRef:
    """A snapshot's pointer to one KV block.

    Attributes:
        chain: The block's chain hash.
        num_tokens: Tokens in the block.
        digest: Digest of the payload the committing worker held. Two workers that compute one block at once store it
            once, so the stored bytes may be the other's: equal up to rounding.
    """

    chain: bytes
    num_tokens: int
    digest: bytes

    def __post_init__(self) -> None:
        _check_chain(self.chain)
        if len(self.digest) != DIGEST_BYTES:
            raise RecordError(f"a block's digest has {len(self.digest)} bytes; expected {DIGEST_BYTES}")
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
        digest: BLAKE2b of the payload, computed here.
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
        object.__setattr__(self, "digest", _digest(self.payload))

    def ref(self) -> BlockRef:
        """Make the pointer a snapshot keeps."""
        return BlockRef(self.chain, self.num_tokens, self.digest)


@dataclass(frozen=True, slots=True)
class SideRow:
    """Hidden states of one position, as bytes: what a drafter is conditioned on after a restore.

    Attributes:
        chain: Chain hash of the block that ends at the position.
        position: Position of the row in the sequence, from 0.
        dtype: Element type, a key of `DTYPE_BYTES`.
        shape: At most eight dimensions.
        payload: The elements, contiguous.
        digest: BLAKE2b of the payload, computed here.
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
        object.__setattr__(self, "digest", _digest(self.payload))


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
    created_at: float = field(default_factory=time.time, compare=False)

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
        return _digest(_snapshot_payload(self)).hex()

    def token_ids(self) -> npt.NDArray[np.int32]:
        """Read all token ids, as a read-only view."""
        return ids_from_bytes(self.ids)


@dataclass(frozen=True, slots=True)
class _Name:
    """What a record must echo; a fingerprint of None stands for any."""

    kind: int
    fingerprint: bytes | None
    echo: bytes


@dataclass(frozen=True, slots=True)
class _Body:
    count: int
    dtype: str
    shape: tuple[int, ...]
    payload: bytes | memoryview
    digest: bytes


@dataclass(frozen=True, slots=True)
class RecordCodec:
    """Packs and unpacks records for one tenant secret.

    Attributes:
        secret: Key of the seal, at most 64 bytes; b"" seals without a key.
        codec: How the elements of blocks and side rows are written; any codec is read.
    """

    secret: bytes = field(default=b"", repr=False)
    codec: CodecName = "raw"

    def __post_init__(self) -> None:
        check_secret(self.secret)
        check_codec(self.codec)

    def pack_block(self, fingerprint: str, block: Block) -> bytes:
        """Write a block as one record."""
        name = _Name(_BLOCK, fingerprint_hash(fingerprint), block.chain)
        return self._pack(name, _Body(block.num_tokens, block.dtype, block.shape, block.payload, block.digest))

    def pack_side(self, fingerprint: str, row: SideRow) -> bytes:
        """Write a hidden row as one record."""
        name = _Name(_SIDE, fingerprint_hash(fingerprint), row.chain)
        return self._pack(name, _Body(row.position, row.dtype, row.shape, row.payload, row.digest))

    def pack_snapshot(self, snapshot: Snapshot) -> bytes:
        """Write a snapshot as one record.

        Raises:
            RecordError: If it is larger than a server takes.
        """
        payload = _snapshot_payload(snapshot)
        _check_size(len(payload))
        digest = _digest(payload)
        name = _Name(_SNAPSHOT, fingerprint_hash(snapshot.fingerprint), digest)
        return self._pack(name, _Body(round(snapshot.created_at * 1e6), "uint8", (len(payload),), payload, digest))

    def unpack_block(self, data: bytes, *, fingerprint: str | bytes, chain: bytes) -> Block:
        """Read a block and check everything about it.

        Args:
            data: A record; the block's payload is a view of it.
            fingerprint: The target the block must be of, or its `fingerprint_hash`.
            chain: The chain the block must end at.

        Raises:
            ForeignRecordError: If the record is another one than was asked for.
            RecordError: If the record is damaged.
        """
        body = self._unpack(data, _Name(_BLOCK, _target(fingerprint), chain))
        block = Block(chain, body.count, body.dtype, body.shape, body.payload)
        _check_digest(block.digest, body.digest)
        return block

    def unpack_side(self, data: bytes, *, fingerprint: str | bytes, chain: bytes, position: int) -> SideRow:
        """Read a hidden row and check everything about it.

        Args:
            data: A record; the row's payload is a view of it.
            fingerprint: The target the row must be of, or its `fingerprint_hash`.
            chain: The chain of the block the row ends.
            position: The position the row must be of.

        Raises:
            ForeignRecordError: If the record is another one than was asked for.
            RecordError: If the record is damaged.
        """
        body = self._unpack(data, _Name(_SIDE, _target(fingerprint), chain))
        if body.count != position:
            raise ForeignRecordError(f"the row is of position {body.count}; expected {position}")
        row = SideRow(chain, position, body.dtype, body.shape, body.payload)
        _check_digest(row.digest, body.digest)
        return row

    def unpack_snapshot(self, data: bytes, *, snapshot_id: str) -> Snapshot:
        """Read a snapshot and check that its content has the id and its blocks follow from its token ids.

        Raises:
            ForeignRecordError: If the record is another one than was asked for.
            RecordError: If the record is damaged.
        """
        body = self._unpack(data, _Name(_SNAPSHOT, None, bytes.fromhex(snapshot_id)))
        _check_digest(_digest(body.payload), bytes.fromhex(snapshot_id))
        snapshot = _parse_snapshot(memoryview(body.payload), created_at=body.count / 1e6)
        self.check_chain(snapshot)
        return snapshot

    def check_chain(self, snapshot: Snapshot) -> None:
        """Check that a snapshot's blocks are those of its token ids.

        Raises:
            RecordError: If a block's chain does not follow from the ids before it.
        """
        root = chain_root(snapshot.fingerprint, self.secret)
        counts = [ref.num_tokens for ref in snapshot.blocks]
        if chain_blocks(root, snapshot.token_ids(), counts) != [ref.chain for ref in snapshot.blocks]:
            raise RecordError("the snapshot's blocks do not follow from its token ids, fingerprint and secret")

    def _pack(self, name: _Name, body: _Body) -> bytes:
        wanted: CodecName = "raw" if name.kind == _SNAPSHOT else self.codec
        codec, stored = encode(wanted, body.payload, item_bytes=DTYPE_BYTES[body.dtype])
        header = _HEADER.pack(
            *(_MAGIC, SCHEMA_VERSION, name.kind, codec, _DTYPES.index(body.dtype), len(body.shape)),
            *(body.count, name.fingerprint, name.echo),
            *(*body.shape, *[0] * (MAX_DIMS - len(body.shape))),
            *(memoryview(stored).nbytes, body.digest),
        )
        return b"".join((header, self._seal(header), stored))

    def _unpack(self, data: bytes, expected: _Name) -> _Body:
        if len(data) < _HEADER_BYTES:
            raise RecordError(f"the record has {len(data)} bytes; expected at least {_HEADER_BYTES}")
        header = data[: _HEADER.size]
        fields = _HEADER.unpack(header)
        magic, schema, kind, codec, dtype, num_dims, count, fingerprint, echo = fields[:9]
        shape, (length, digest) = fields[9 : 9 + MAX_DIMS], fields[9 + MAX_DIMS :]
        if magic != _MAGIC:
            raise RecordError(f"the record starts with {magic!r}; expected {_MAGIC!r}")
        if data[_HEADER.size : _HEADER_BYTES] != self._seal(header):
            raise RecordError("the record's header does not match its seal")
        if schema != SCHEMA_VERSION or dtype >= len(_DTYPES) or num_dims > MAX_DIMS:
            raise ForeignRecordError(f"the record has schema {schema}, dtype {dtype}: another version's")
        if not is_readable(codec):
            raise ForeignRecordError(f"the record has codec {codec}, which this installation does not read")
        if (kind, echo) != (expected.kind, expected.echo) or expected.fingerprint not in (None, fingerprint):
            raise ForeignRecordError("the record is of another kind, target or chain than was asked for")
        stored = memoryview(data)[_HEADER_BYTES:]
        if len(stored) != length:
            raise RecordError(f"the record's payload has {len(stored)} bytes; expected {length}")
        name, shape = _DTYPES[dtype], shape[:num_dims]
        payload = decode(codec, stored, item_bytes=DTYPE_BYTES[name], shape=shape, max_bytes=MAX_RECORD_BYTES)
        return _Body(count, name, shape, payload, digest)

    def _seal(self, header: bytes) -> bytes:
        return hashlib.blake2b(header, digest_size=_SEAL_BYTES, key=self.secret, person=b"seal").digest()


def _target(fingerprint: str | bytes) -> bytes:
    return fingerprint if isinstance(fingerprint, bytes) else fingerprint_hash(fingerprint)


def _digest(payload: bytes | memoryview) -> bytes:
    return hashlib.blake2b(payload, digest_size=DIGEST_BYTES).digest()


def _check_digest(actual: bytes, expected: bytes) -> None:
    if actual != expected:
        raise RecordError("the record's payload does not match its digest")


def _check_chain(chain: bytes) -> None:
    if len(chain) != DIGEST_BYTES:
        raise RecordError(f"a chain has {len(chain)} bytes; expected {DIGEST_BYTES}")


def _check_size(num_bytes: int) -> None:
    if num_bytes + _HEADER_BYTES > MAX_RECORD_BYTES:
        raise RecordError(
            f"the record takes {num_bytes + _HEADER_BYTES} bytes; expected at most {MAX_RECORD_BYTES}; "
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
    _check_size(view.nbytes)


def _snapshot_payload(snapshot: Snapshot) -> bytes:
    meta = {
        "fingerprint": snapshot.fingerprint,
        "num_blocks": len(snapshot.blocks),
        "num_kv": snapshot.num_kv,
        "parent": snapshot.parent,
        "pivot": snapshot.pivot,
    }
    text = json.dumps(meta, sort_keys=True, separators=(",", ":")).encode()
    refs = [_REF.pack(ref.chain, ref.num_tokens, ref.digest) for ref in snapshot.blocks]
    return b"".join((struct.pack("<I", len(text)), text, *refs, snapshot.ids))


def _parse_snapshot(payload: memoryview, *, created_at: float) -> Snapshot:
    """Parse a payload whose digest has been checked; only a writer's fault can make it odd."""
    try:
        (size,) = struct.unpack_from("<I", payload)
        meta: dict[str, Any] = json.loads(bytes(payload[4 : 4 + size]))
        first, num_blocks = 4 + size, int(meta["num_blocks"])
        refs = tuple(BlockRef(*_REF.unpack_from(payload, first + i * _REF.size)) for i in range(num_blocks))
        return Snapshot(
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

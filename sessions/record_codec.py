"""The codec of records: the bytes that sessions keep in Redis.

Every record starts with one fixed header that says what it is, for which target, for which tokens and of which
digest; a reader trusts nothing it has not checked. A record is raw bytes, never pickle.

The payload's digest sits in the header and the header ends with a seal over all of it, keyed when the tenant has a
secret: payload bytes are hashed once, and no one without the secret can forge a record.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field

from dlite_agent.errors import RecordError
from dlite_agent.sessions.codecs import CodecName, check_codec, decode, encode, is_readable
from dlite_agent.sessions.keys import DIGEST_BYTES, chain_blocks, chain_root, check_secret, fingerprint_hash
from dlite_agent.sessions.records import (
    DTYPE_BYTES,
    HEADER_BYTES,
    MAX_DIMS,
    MAX_RECORD_BYTES,
    Block,
    SideRow,
    Snapshot,
    check_size,
    payload_digest,
)

SCHEMA_VERSION = 2
"""1 hashed payloads with BLAKE2b, and snapshots held the digests of their blocks; its records are another version's."""

_DTYPES = tuple(DTYPE_BYTES)
_MAGIC = b"DLR1"
_BLOCK, _SIDE, _SNAPSHOT = 1, 2, 3
# magic, schema, kind, codec, dtype, dims | count | fingerprint | echoed chain | shape | payload length | payload digest
_HEADER = struct.Struct(f"<4sBBBBB3xQ16s{DIGEST_BYTES}s{MAX_DIMS}IQ{DIGEST_BYTES}s")
_SEAL_BYTES = 32
assert _HEADER.size + _SEAL_BYTES == HEADER_BYTES


class ForeignRecordError(RecordError):
    """The record is sound, but of another target, chain, position, kind or version than was asked for."""


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
        payload = snapshot.payload()
        check_size(len(payload))
        digest = payload_digest(payload)
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
        _check_digest(payload_digest(body.payload), bytes.fromhex(snapshot_id))
        snapshot = Snapshot.from_payload(memoryview(body.payload), created_at=body.count / 1e6)
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
        if len(data) < HEADER_BYTES:
            raise RecordError(f"the record has {len(data)} bytes; expected at least {HEADER_BYTES}")
        header = data[: _HEADER.size]
        fields = _HEADER.unpack(header)
        magic, schema, kind, codec, dtype, num_dims, count, fingerprint, echo = fields[:9]
        shape, (length, digest) = fields[9 : 9 + MAX_DIMS], fields[9 + MAX_DIMS :]
        if magic != _MAGIC:
            raise RecordError(f"the record starts with {magic!r}; expected {_MAGIC!r}")
        if data[_HEADER.size : HEADER_BYTES] != self._seal(header):
            raise RecordError("the record's header does not match its seal")
        if schema != SCHEMA_VERSION or dtype >= len(_DTYPES) or num_dims > MAX_DIMS:
            raise ForeignRecordError(f"the record has schema {schema}, dtype {dtype}: another version's")
        if not is_readable(codec):
            raise ForeignRecordError(f"the record has codec {codec}, which this installation does not read")
        if (kind, echo) != (expected.kind, expected.echo) or expected.fingerprint not in (None, fingerprint):
            raise ForeignRecordError("the record is of another kind, target or chain than was asked for")
        stored = memoryview(data)[HEADER_BYTES:]
        if len(stored) != length:
            raise RecordError(f"the record's payload has {len(stored)} bytes; expected {length}")
        name, shape = _DTYPES[dtype], shape[:num_dims]
        payload = decode(codec, stored, item_bytes=DTYPE_BYTES[name], shape=shape, max_bytes=MAX_RECORD_BYTES)
        return _Body(count, name, shape, payload, digest)

    def _seal(self, header: bytes) -> bytes:
        return hashlib.blake2b(header, digest_size=_SEAL_BYTES, key=self.secret, person=b"seal").digest()


def _target(fingerprint: str | bytes) -> bytes:
    return fingerprint if isinstance(fingerprint, bytes) else fingerprint_hash(fingerprint)


def _check_digest(actual: bytes, expected: bytes) -> None:
    if actual != expected:
        raise RecordError("the record's payload does not match its digest")

"""Checks everything that is stored: each digest, each chain, each reference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from dlite_agent.errors import RecordError
from dlite_agent.sessions.client import translated
from dlite_agent.sessions.keys import KeyParts
from dlite_agent.sessions.record_codec import ForeignRecordError, RecordCodec
from dlite_agent.sessions.records import Block, SideRow, Snapshot
from dlite_agent.sessions.store import SessionStore
from dlite_agent.sessions.survey import Survey, batches, peek, survey

_READ_BLOCKS = 16
_LOOK_KEYS = 1000

Fault = Literal["damaged", "foreign", "missing", "unknown"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it should be.

    Attributes:
        key: Where.
        fault: "damaged"; "foreign" (sound, but of another version, target or chain than its key says); "missing"
            (something refers to it); "unknown" (this package writes no such key).
        what: What was found.
    """

    key: str
    fault: Fault
    what: str


@dataclass(frozen=True, slots=True)
class Verification:
    """What a check found.

    Attributes:
        num_records: Records that were checked.
        num_bytes: Bytes that were read of blocks and pivot rows.
        findings: What is wrong, by key.
    """

    num_records: int
    num_bytes: int
    findings: tuple[Finding, ...]


def check_record(codec: RecordCodec, parts: KeyParts, record: bytes) -> Block | SideRow | Snapshot:
    """Unpack the record of a key and check everything about it.

    Args:
        codec: The tenant's.
        parts: What the key says it is: a block, a side record or a snapshot.
        record: The bytes.

    Raises:
        ForeignRecordError: If it is another one than the key says.
        RecordError: If it is damaged.
    """
    if parts.kind == "block":
        return codec.unpack_block(record, fingerprint=parts.target, chain=parts.chain)
    if parts.kind == "side":
        return codec.unpack_side(record, fingerprint=parts.target, chain=parts.chain, position=parts.position)
    assert parts.kind == "snapshot"
    return codec.unpack_snapshot(record, snapshot_id=parts.snapshot_id)


def verify(store: SessionStore) -> Verification:
    """Check all records of the store's tenant; nothing is changed, no life extended.

    A record that expires meanwhile is no finding.

    Raises:
        StoreUnavailableError: If the server does not answer.
    """
    seen = survey(store)
    findings = [Finding(_printable(key), "unknown", "this package writes no such key") for key in seen.unknown]
    findings += [Finding(key, "damaged", what) for key, what in seen.problems.items()]
    block_tokens: dict[str, int] = {}
    num_bytes = 0
    for keys in batches(seen.keys_of("block", "side"), _READ_BLOCKS):
        for key, record in zip(keys, peek(store, keys), strict=True):
            num_bytes += len(record) if isinstance(record, bytes) else 0
            found = _check(store, seen.parts[key], record)
            if isinstance(found, Block):
                block_tokens[key] = found.num_tokens
            elif isinstance(found, RecordError):
                is_foreign = isinstance(found, ForeignRecordError)
                findings.append(Finding(key, "foreign" if is_foreign else "damaged", str(found)))
    findings += _check_references(store, seen, block_tokens)
    findings += _check_threads(store, seen)
    return Verification(len(seen.parts), num_bytes, tuple(sorted(findings, key=lambda finding: finding.key)))


def _check(
    store: SessionStore, parts: KeyParts, record: bytes | RecordError | None
) -> Block | SideRow | Snapshot | RecordError | None:
    if record is None or isinstance(record, RecordError):
        return record
    try:
        return check_record(store.codec, parts, record)
    except RecordError as error:
        return error


def _check_references(store: SessionStore, seen: Survey, block_tokens: dict[str, int]) -> Iterator[Finding]:
    """Check what heads and snapshots refer to; what was not listed may have been written meanwhile."""
    missing: dict[str, str] = {}
    for sid, head in seen.heads.items():
        if head and head.snapshot_id:
            try:
                key = store.keys.snapshot(sid, head.snapshot_id)
            except ValueError:
                yield Finding(store.keys.head(sid), "damaged", "the head names something that is no snapshot id")
                continue
            if head.snapshot_id not in seen.snapshots.get(sid, {}):
                missing[key] = f"the head of session {sid} refers to it"
    for sid, snapshots in seen.snapshots.items():
        for snapshot_id, facts in snapshots.items():
            if facts is None:
                continue
            for key in facts.records:
                if key not in seen.sizes:
                    missing.setdefault(key, f"snapshot {snapshot_id} of session {sid} refers to it")
            for key, num_tokens in zip(facts.blocks, facts.block_tokens, strict=True):
                if block_tokens.get(key, num_tokens) != num_tokens:
                    what = f"it holds {block_tokens[key]} tokens; snapshot {snapshot_id} expects {num_tokens}"
                    yield Finding(key, "damaged", what)
    for keys in batches(list(missing), _LOOK_KEYS):
        for key, is_there in zip(keys, _exist(store, keys), strict=True):
            if not is_there:
                yield Finding(key, "missing", missing[key])


def _check_threads(store: SessionStore, seen: Survey) -> Iterator[Finding]:
    """Check that the two keys of a LangGraph thread are both there."""
    for thread in sorted({seen.parts[key].sid for key in seen.keys_of("checkpoint")}):
        keys = (store.keys.checkpoint_data(thread), store.keys.checkpoint_index(thread))
        data, index = _exist(store, keys)
        if data != index:
            yield Finding(
                keys[0] if index else keys[1], "missing", "the other half of the thread's checkpoints is there"
            )


def _exist(store: SessionStore, keys: Sequence[str]) -> list[bool]:
    with translated("looking for records"):
        pipe = store.client.pipeline(transaction=False)
        for key in keys:
            pipe.exists(key)
        return [bool(reply) for reply in pipe.execute()]


def _printable(key: bytes) -> str:
    return key.decode("ascii", "backslashreplace")

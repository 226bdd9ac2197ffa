"""One session as one portable file, and back.

    magic | frame: header | frame: snapshot ... | frame: block or pivot row ... | frame: end

A frame is a name, the bytes it stands for, and their digest, keyed when the tenant has a secret. Records stand in it as
they are stored, sealed for their tenant; never pickle. The end says how many frames there are, so a truncated file is
known as such, and nothing may follow it.

Import reads a file twice: once to check all of it, then to write. The head comes last, so a session is there as a whole
or not at all.
"""

from __future__ import annotations

import hashlib
import os
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dlite_agent.errors import ConfigError, ForeignFileError, RecordError, SessionFileError, UnknownSessionError
from dlite_agent.sessions.checking import check_record
from dlite_agent.sessions.creating import create_session
from dlite_agent.sessions.keys import DIGEST_BYTES, KeyParts, SessionName
from dlite_agent.sessions.record_codec import ForeignRecordError
from dlite_agent.sessions.records import MAX_RECORD_BYTES, Snapshot
from dlite_agent.sessions.store import SessionStore
from dlite_agent.sessions.survey import SnapshotFacts, batches, facts_of, peek, survey
from dlite_agent.sessions.writing import Write

FORMAT = 1
_MAGIC = b"dlite session\n"
_FRAME = struct.Struct("<HI")  # bytes of the name, of the content; then name, content, digest
_HEADER, _END = "header", "end"
_READ_BLOCKS = 16


class FileHeader(BaseModel):
    """What a session file says of itself.

    Attributes:
        format: Version of the file's form.
        prefix: What the keys of its tenant start with.
        target: `fingerprint_hash` of the target of all its records, in hex.
        sid: The session it was.
        thread: Its thread as hex of UTF-8, if that was known; a thread id may be text that JSON cannot hold.
        namespace: Its namespace, likewise.
        snapshot_id: The snapshot it was at.
        num_turns: Commits its head had seen.
        exported_at: Seconds since 1970.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    format: Literal[1] = 1
    prefix: str
    target: str = Field(pattern="^[0-9a-f]{32}$")
    sid: str = Field(pattern="^[0-9a-f]{32}$")
    thread: str | None = Field(pattern="^([0-9a-f]{2})*$")
    namespace: str = Field(pattern="^([0-9a-f]{2})*$")
    snapshot_id: str = Field(pattern="^[0-9a-f]{64}$")
    num_turns: int = Field(ge=1, lt=2**48)
    exported_at: float


@dataclass(frozen=True, slots=True)
class Transfer:
    """What an export or import moved.

    Attributes:
        sid: The session, under the id it has in the store.
        target: `fingerprint_hash` of its target, in hex.
        num_snapshots: Snapshots.
        num_records: Blocks and pivot rows in the file.
        num_missing: Those that its snapshots refer to but that were gone, or damaged, at the export.
        num_bytes: Bytes of the file.
        bytes_written: Of an import: bytes that the server did not have.
    """

    sid: str
    target: str
    num_snapshots: int
    num_records: int
    num_missing: int
    num_bytes: int
    bytes_written: int = 0


def export_session(store: SessionStore, sid: str, path: Path) -> Transfer:
    """Write a session, with all its snapshots and their records, to a file.

    The file appears once it is complete, readable by its owner only. LangGraph checkpoints are not in it.

    Args:
        store: Says server, tenant and secret.
        sid: A `session_id`.
        path: A file that does not exist.

    Returns:
        What was written.

    Raises:
        UnknownSessionError: If there is no such session with a sound snapshot.
        SessionFileError: If the file exists or cannot be written.
        StoreUnavailableError: If the server does not answer.
    """
    seen = survey(store)
    head = seen.heads.get(sid)
    known = {name: facts for name, facts in seen.snapshots.get(sid, {}).items() if facts is not None}
    at = known.get(head.snapshot_id) if head and head.snapshot_id else None
    if head is None or at is None or head.snapshot_id is None:
        raise UnknownSessionError(f"session {sid} has no sound snapshot at its head; see `dlite-agent sessions ls`")
    by_age = sorted(known.items(), key=lambda item: item[1].created_at)
    known = {name: facts for name, facts in by_age if facts.target == at.target}
    name = head.name if head.name and head.name.sid == sid else None  # the end of a long name is cut off
    header = FileHeader(
        prefix=store.keys.prefix,
        target=at.target.hex(),
        sid=sid,
        thread=_to_hex(name.thread_id) if name else None,
        namespace=_to_hex(name.namespace) if name else "",
        snapshot_id=head.snapshot_id,
        num_turns=max(head.version, 1),
        exported_at=time.time(),
    )
    if path.exists():
        raise SessionFileError(f"{path} exists; choose another name, or remove it")
    draft = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            num_records = _write(store, _FileWriter(file, store.codec.secret), header, known)
            file.flush()
            os.fsync(file.fileno())
        num_bytes = draft.stat().st_size
        draft.rename(path)
    except OSError as error:
        raise SessionFileError(f"{path} cannot be written ({error}); choose another place") from error
    finally:
        draft.unlink(missing_ok=True)
    num_referred = len({key for facts in known.values() for key in facts.records})
    return Transfer(sid, header.target, len(known), num_records, num_referred - num_records, num_bytes)


def import_session(
    store: SessionStore,
    path: Path,
    *,
    thread_id: str | None = None,
    namespace: str | None = None,
    target: str | None = None,
) -> Transfer:
    """Check a file as a whole, then make the session that is in it.

    Args:
        store: Says server, tenant and secret.
        path: From `export_session`.
        thread_id: The thread it is to be; None for the one it was.
        namespace: With `thread_id`: its namespace; None for the one it was in.
        target: `fingerprint_hash` in hex of the only target to accept; None for any.

    Returns:
        What was written.

    Raises:
        ConfigError: If the new name is not whole: a file of a session that had no name does not say its namespace.
        ForeignFileError: If it is of another tenant, secret, target or version. Nothing is written.
        SessionFileError: If it is damaged, truncated or cannot be read. Nothing is written.
        SessionExistsError: If there is such a session; nothing refers to what was written.
        StoreUnavailableError: If the server does not answer.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            checked = _FileReader(file, size, store)
            for _ in checked.records(target):
                pass
            assert checked.header is not None
            file.seek(0)
            name = _new_name(checked.header, thread_id, namespace)
            sid = checked.header.sid if name is None else name.sid
            written = _store(store, _FileReader(file, size, store), sid, name)
    except OSError as error:
        raise SessionFileError(f"{path} cannot be read ({error}); choose a file that `export` wrote") from error
    num_records = len(checked.names) - len(checked.snapshots)
    num_missing = len(checked.referred) - num_records
    return Transfer(sid, checked.header.target, len(checked.snapshots), num_records, num_missing, size, written)


def _write(store: SessionStore, out: _FileWriter, header: FileHeader, known: dict[str, SnapshotFacts]) -> int:
    """Write all frames; return the number of blocks and pivot rows."""
    out.begin(header)
    snapshot_keys = [store.keys.snapshot(header.sid, snapshot_id) for snapshot_id in known]
    if _copy(store, out, snapshot_keys) != len(known):
        raise UnknownSessionError(f"session {header.sid} has changed during the export; try again")
    records = dict.fromkeys(key for facts in known.values() for key in facts.records)
    num_records = _copy(store, out, list(records))
    out.end()
    return num_records


def _copy(store: SessionStore, out: _FileWriter, keys: Sequence[str]) -> int:
    """Copy the records that are there and sound; return how many."""
    num_copied = 0
    for some in batches(keys, _READ_BLOCKS):
        for key, record in zip(some, peek(store, some), strict=True):
            if not isinstance(record, bytes):
                continue
            try:
                check_record(store.codec, store.keys.parse(key.encode()), record)
            except RecordError:
                continue
            out.frame(key.removeprefix(f"{store.keys.prefix}:"), record)
            num_copied += 1
    return num_copied


def _store(store: SessionStore, reader: _FileReader, sid: str, name: SessionName | None) -> int:
    """Write what a reader gives, the head last; return the bytes that were new."""
    snapshots: list[Snapshot] = []

    def records() -> Iterator[Write]:
        for parts, record, found in reader.records(None):
            if isinstance(found, Snapshot):
                snapshots.append(found)
                continue
            kept = store.keys
            if parts.kind == "block":
                yield Write(kept.block(parts.target, parts.chain), record)
            else:
                yield Write(kept.side(parts.target, parts.chain, parts.position), record)

    num_bytes = sum(store.writer.write(records(), store.block_ttl_s))
    header = reader.header
    assert header is not None
    at = next(snapshot for snapshot in snapshots if snapshot.snapshot_id == header.snapshot_id)
    writes = [Write(store.keys.snapshot(sid, one.snapshot_id), store.codec.pack_snapshot(one)) for one in snapshots]
    num_bytes += sum(store.writer.write(writes, store.ttl_s))
    create_session(store, sid, at, version=header.num_turns, name=name)
    return num_bytes


class _FileWriter:
    """Writes frames, and counts and hashes them for the end."""

    def __init__(self, file: BinaryIO, secret: bytes) -> None:
        self._file = file
        self._secret = secret
        self._num_frames = 0
        self._whole = _hasher(secret)

    def begin(self, header: FileHeader) -> None:
        self._file.write(_MAGIC)
        self.frame(_HEADER, header.model_dump_json().encode())

    def frame(self, name: str, content: bytes) -> None:
        head = _FRAME.pack(len(name), len(content)) + name.encode()
        digest = _digest(self._secret, head, content)
        self._whole.update(digest)
        self._num_frames += 1
        self._file.writelines((head, content, digest))

    def end(self) -> None:
        self.frame(_END, struct.pack("<Q", self._num_frames) + self._whole.digest())


class _FileReader:
    """Reads a file from its start and believes nothing of it.

    Attributes:
        header: Once `records` has begun.
        names: Records that were read.
        snapshots: Ids of snapshots that were read.
        referred: Names of the records they refer to.
    """

    def __init__(self, file: BinaryIO, size: int, store: SessionStore) -> None:
        self._file = file
        self._left = size
        self._store = store
        self._whole = _hasher(store.codec.secret)
        self.header: FileHeader | None = None
        self.names: set[str] = set()
        self.snapshots: set[str] = set()
        self.referred: set[str] = set()

    def records(self, target: str | None) -> Iterator[tuple[KeyParts, bytes, object]]:
        """Yield what each record's name says, its bytes and what they hold; raise at the first that is not sound."""
        if self._take(len(_MAGIC)) != _MAGIC:
            raise SessionFileError("the file does not start as a session file does; choose one that `export` wrote")
        self.header = header = self._read_header()
        if target is not None and header.target != target:
            raise ForeignFileError(f"the session is of target {header.target}; expected {target}")
        while True:
            whole, num_frames = self._whole.digest(), len(self.names) + 1
            name, content = self._frame()
            if name == _END:
                break
            yield self._check(name, content, header)
        if content != struct.pack("<Q", num_frames) + whole or self._left:
            raise SessionFileError("the file's end does not fit what is before it; export the session again")
        if header.snapshot_id not in self.snapshots:
            raise SessionFileError("the file lacks the snapshot its header names; export the session again")

    def _check(self, name: str, content: bytes, header: FileHeader) -> tuple[KeyParts, bytes, object]:
        keys = self._store.keys
        parts = keys.parse(f"{keys.prefix}:{name}".encode())
        if parts.kind not in ("block", "side", "snapshot") or name in self.names:
            raise SessionFileError(f"the file holds {name[:80]!r}, which it should not; export the session again")
        try:
            found = check_record(self._store.codec, parts, content)
        except ForeignRecordError as error:
            raise ForeignFileError(f"record {name}: {error}") from error
        except RecordError as error:
            raise SessionFileError(f"record {name}: {error}; export the session again") from error
        if isinstance(found, Snapshot):
            facts = facts_of(self._store, found)
            is_foreign = parts.sid != header.sid or facts.target.hex() != header.target
            self.snapshots.add(parts.snapshot_id)
            self.referred.update(key.removeprefix(f"{keys.prefix}:") for key in facts.records)
        else:
            is_foreign = parts.target.hex() != header.target
            if name not in self.referred:
                raise SessionFileError(f"no snapshot in the file refers to its record {name}; export the session again")
        if is_foreign:
            raise ForeignFileError(f"record {name} is of another session or target than the file's header says")
        self.names.add(name)
        return parts, content, found

    def _read_header(self) -> FileHeader:
        name, content = self._frame()
        if name != _HEADER:
            raise SessionFileError("the file has no header; export the session again")
        try:
            header = FileHeader.model_validate_json(content)
        except ValidationError as error:
            problem = error.errors()[0]
            where = ".".join(map(str, problem["loc"])) or "header"
            raise ForeignFileError(
                f"the file's {where} is not of format {FORMAT} ({problem['msg']}); use the version that wrote it"
            ) from error
        if header.thread is not None and _name_of(header).sid != header.sid:
            raise SessionFileError("the file's header names a thread that is not its session's; export it again")
        if header.prefix != self._store.keys.prefix:
            raise ForeignFileError("the session is of another tenant; import it under the tenant it was exported from")
        return header

    def _frame(self) -> tuple[str, bytes]:
        head = self._take(_FRAME.size)
        name_size, size = _FRAME.unpack(head)
        if size > MAX_RECORD_BYTES:
            raise SessionFileError(f"a frame of the file takes {size} bytes; expected at most {MAX_RECORD_BYTES}")
        name = self._take(name_size)
        content = self._take(size)
        digest = self._take(DIGEST_BYTES)
        if digest != _digest(self._store.codec.secret, head + name, content):
            raise SessionFileError(
                "a part of the file does not match its digest: it is damaged, or of a tenant with another secret"
            )
        self._whole.update(digest)
        return name.decode("ascii", "backslashreplace"), content

    def _take(self, size: int) -> bytes:
        if size > self._left:
            raise SessionFileError(f"the file ends {size - self._left} bytes too early; export or copy it again")
        data = self._file.read(size)
        if len(data) != size:
            raise SessionFileError("the file has shrunk while it was read; copy it again")
        self._left -= size
        return data


def _new_name(header: FileHeader, thread_id: str | None, namespace: str | None) -> SessionName | None:
    if thread_id is None:
        return None if header.thread is None else _name_of(header)
    if namespace is None and header.thread is None:
        raise ConfigError("the file does not say the session's namespace; name it beside the thread")
    return SessionName(thread_id, _name_of(header).namespace if namespace is None else namespace)


def _name_of(header: FileHeader) -> SessionName:
    try:
        return SessionName(_from_hex(header.thread or ""), _from_hex(header.namespace))
    except ValueError as error:
        raise SessionFileError(f"the file's header names no thread ({error}); export the session again") from error


def _to_hex(text: str) -> str:
    return text.encode("utf-8", "surrogatepass").hex()


def _from_hex(text: str) -> str:
    return bytes.fromhex(text).decode("utf-8", "surrogatepass")


def _hasher(secret: bytes) -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=DIGEST_BYTES, key=secret, person=b"file")


def _digest(secret: bytes, head: bytes, content: bytes) -> bytes:
    state = _hasher(secret)
    state.update(head)
    state.update(content)
    return state.digest()

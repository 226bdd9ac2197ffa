"""One session as one portable file, and back; `session_file` has the file's form.

Import reads a file twice: once to check all of it, then to write. The head comes last, so a session is there as a whole
or not at all.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dlite_agent.errors import (
    ConfigError,
    RecordError,
    SessionError,
    SessionFileError,
    UnknownSessionError,
)
from dlite_agent.sessions.checking import check_record
from dlite_agent.sessions.creating import create_session
from dlite_agent.sessions.keys import SessionName
from dlite_agent.sessions.records import Snapshot
from dlite_agent.sessions.session_file import FileHeader, FileReader, FileWriter, name_of, to_hex
from dlite_agent.sessions.store import SessionStore
from dlite_agent.sessions.survey import SnapshotFacts, batches, peek, survey
from dlite_agent.sessions.writing import Write

_READ_BLOCKS = 16


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
        thread=to_hex(name.thread_id) if name else None,
        namespace=to_hex(name.namespace) if name else "",
        snapshot_id=head.snapshot_id,
        num_turns=max(head.version, 1),
        exported_at=time.time(),
    )
    with _file_errors(f"{path} cannot be written", "choose another place"):
        if path.exists():
            raise SessionFileError(f"{path} exists; choose another name, or remove it")
        draft = path.with_name(f"{path.name}.{os.getpid()}.part")
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with open(descriptor, "wb") as file:
                num_records = _write(store, FileWriter(file, store.codec.secret), header, known)
                file.flush()
                os.fsync(file.fileno())
            num_bytes = draft.stat().st_size
            draft.rename(path)
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
        ConfigError: If the new name is not whole: a namespace without a thread, or a thread without a namespace for a
            file of a session that had no name.
        ForeignFileError: If it is of another tenant, secret, target or version. Nothing is written.
        SessionFileError: If it is damaged, truncated or cannot be read. Nothing is written.
        SessionExistsError: If there is such a session; nothing refers to what was written.
        StoreUnavailableError: If the server does not answer.
    """
    with _file_errors(f"{path} cannot be read", "choose a file that `export` wrote"), path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        checked = FileReader(file, size, store)
        for _ in checked.records(target):
            pass
        assert checked.header is not None
        file.seek(0)
        name = _new_name(checked.header, thread_id, namespace)
        sid = checked.header.sid if name is None else name.sid
        written = _store(store, FileReader(file, size, store), sid, name)
    num_records = len(checked.names) - len(checked.snapshots)
    num_missing = len(checked.referred) - num_records
    return Transfer(sid, checked.header.target, len(checked.snapshots), num_records, num_missing, size, written)


@contextmanager
def _file_errors(what: str, advice: str) -> Iterator[None]:
    """Turn errors of a file into SessionFileErrors; a server that does not answer is none, though an OSError too."""
    try:
        yield
    except SessionError:
        raise
    except OSError as error:
        raise SessionFileError(f"{what} ({error}); {advice}") from error


def _write(store: SessionStore, out: FileWriter, header: FileHeader, known: dict[str, SnapshotFacts]) -> int:
    """Write all frames; return the number of blocks and pivot rows."""
    out.begin(header)
    snapshot_keys = [store.keys.snapshot(header.sid, snapshot_id) for snapshot_id in known]
    if _copy(store, out, snapshot_keys) != len(known):
        raise UnknownSessionError(f"session {header.sid} has changed during the export; try again")
    records = dict.fromkeys(key for facts in known.values() for key in facts.records)
    num_records = _copy(store, out, list(records))
    out.end()
    return num_records


def _copy(store: SessionStore, out: FileWriter, keys: Sequence[str]) -> int:
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


def _store(store: SessionStore, reader: FileReader, sid: str, name: SessionName | None) -> int:
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


def _new_name(header: FileHeader, thread_id: str | None, namespace: str | None) -> SessionName | None:
    if thread_id is None:
        if namespace is not None:
            raise ConfigError("a namespace is given without a thread; name both, or neither for those of the file")
        return None if header.thread is None else name_of(header)
    if namespace is None and header.thread is None:
        raise ConfigError("the file does not say the session's namespace; name it beside the thread")
    return SessionName(thread_id, name_of(header).namespace if namespace is None else namespace)

"""The form of a session file.

    magic | frame: header | frame: snapshot ... | frame: block or pivot row ... | frame: end

A frame is a name, the bytes it stands for, and their digest, keyed when the tenant has a secret. Records stand in it as
they are stored, sealed for their tenant; never pickle. The end says how many frames there are, so a truncated file is
known as such, and nothing may follow it.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from typing import BinaryIO, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dlite_agent.errors import ForeignFileError, RecordError, SessionFileError
from dlite_agent.sessions.checking import check_record
from dlite_agent.sessions.keys import DIGEST_BYTES, KeyParts, SessionName
from dlite_agent.sessions.record_codec import ForeignRecordError
from dlite_agent.sessions.records import MAX_RECORD_BYTES, Snapshot
from dlite_agent.sessions.store import SessionStore
from dlite_agent.sessions.survey import facts_of

FORMAT = 1
_MAGIC = b"dlite session\n"
_FRAME = struct.Struct("<HI")  # bytes of the name, of the content; then name, content, digest
_HEADER, _END = "header", "end"


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


class FileWriter:
    """Writes frames, and counts and hashes them for the end."""

    def __init__(self, file: BinaryIO, secret: bytes) -> None:
        """Write to a file, for the tenant with this secret."""
        self._file = file
        self._secret = secret
        self._num_frames = 0
        self._whole = _hasher(secret)

    def begin(self, header: FileHeader) -> None:
        """Write what stands before all records."""
        self._file.write(_MAGIC)
        self.frame(_HEADER, header.model_dump_json().encode())

    def frame(self, name: str, content: bytes) -> None:
        """Write one frame."""
        head = _FRAME.pack(len(name), len(content)) + name.encode()
        digest = _digest(self._secret, head, content)
        self._whole.update(digest)
        self._num_frames += 1
        self._file.writelines((head, content, digest))

    def end(self) -> None:
        """Write what stands behind all records."""
        self.frame(_END, struct.pack("<Q", self._num_frames) + self._whole.digest())


class FileReader:
    """Reads a file from its start and believes nothing of it.

    Attributes:
        header: Once `records` has begun.
        names: Records that were read.
        snapshots: Ids of snapshots that were read.
        referred: Names of the records they refer to.
    """

    def __init__(self, file: BinaryIO, size: int, store: SessionStore) -> None:
        """Read a file of so many bytes, of the store's tenant."""
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
        if header.thread is not None and name_of(header).sid != header.sid:
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


def name_of(header: FileHeader) -> SessionName:
    """Return the name a session had.

    Raises:
        SessionFileError: If the header holds none.
    """
    try:
        return SessionName(_from_hex(header.thread or ""), _from_hex(header.namespace))
    except ValueError as error:
        raise SessionFileError(f"the file's header names no thread ({error}); export the session again") from error


def to_hex(text: str) -> str:
    """Write any text, lone surrogates too, for a header."""
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

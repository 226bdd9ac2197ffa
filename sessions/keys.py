"""The one place where Redis keys and chain hashes are made.

Nothing a caller supplies (tenant, thread id, fingerprint, token ids) enters a key as text: every part is a hash of
length-prefixed bytes, so no thread id, however long or odd, can name another session's keys or a key pattern.

    P = dlite:1:<tenant hash>
    P:b:<fingerprint hash>:<chain>          block       KV rows of some tokens
    P:s:<fingerprint hash>:<chain>:<pos>    side        hidden row at the pivot
    P:{<sid>}:c:<snapshot id>               snapshot    what a session was after a turn
    P:{<sid>}:h                             head        which snapshot a session is at
    P:{<thread hash>}:k:d                   checkpoint  LangGraph checkpoints, channel blobs, pending writes
    P:{<thread hash>}:k:i                   checkpoint  their order

Braces are cluster hash tags: all keys of one session (or one thread) live in one slot; blocks spread over all of them.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dlite_agent.errors import ConfigError, RecordError

LAYOUT_VERSION = 1
DIGEST_BYTES = 32
KINDS = ("block", "side", "snapshot", "head", "checkpoint")
"""Every kind of key this package ever writes. The drafter has none."""

_TOKEN_ID_LIMIT = 2**31
_HEX_32 = re.compile(r"[0-9a-f]{32}")
_HEX_64 = re.compile(r"[0-9a-f]{64}")
_KIND_OF_KEY = re.compile(
    rb"(?P<block>b:[0-9a-f]{32}:[0-9a-f]{64})"
    rb"|(?P<side>s:[0-9a-f]{32}:[0-9a-f]{64}:[0-9]+)"
    rb"|(?P<snapshot>\{[0-9a-f]{32}\}:c:[0-9a-f]{64})"
    rb"|(?P<head>\{[0-9a-f]{32}\}:h)"
    rb"|(?P<checkpoint>\{[0-9a-f]{32}\}:k:[di])"
)

TokenIds = Sequence[int] | npt.NDArray[np.integer]


def session_id(thread_id: str, checkpoint_ns: str = "") -> str:
    """Name a session after a LangGraph thread and checkpoint namespace.

    Args:
        thread_id: Any text of any length.
        checkpoint_ns: The namespace of a subgraph, without per-step task ids.

    Returns:
        32 hex digits. Different pairs give different ids.
    """
    return _hash_text("session", thread_id, checkpoint_ns)


def without_task_ids(checkpoint_ns: str) -> str:
    """Return a LangGraph checkpoint namespace without the task ids, which differ from step to step."""
    return "|".join(part.split(":")[0] for part in checkpoint_ns.split("|"))


def thread_hash(thread_id: str) -> str:
    """Name a thread's LangGraph checkpoints; never equal to a session id.

    Args:
        thread_id: Any text of any length.

    Returns:
        32 hex digits.
    """
    return _hash_text("thread", thread_id)


def fingerprint_hash(fingerprint: str) -> bytes:
    """Shorten a fingerprint to the 16 bytes that keys and records carry.

    Args:
        fingerprint: What the engine says identifies weights, configuration, dtype and layout.
    """
    return bytes.fromhex(_hash_text("fingerprint", fingerprint))


def ids_to_bytes(ids: TokenIds) -> bytes:
    """Write token ids as little-endian int32.

    Args:
        ids: Whole numbers in [0, 2**31).

    Raises:
        RecordError: If an id is no such number.
    """
    array = np.asarray(ids)
    if array.size == 0:
        return b""
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise RecordError(f"token ids have shape {array.shape} and dtype {array.dtype}; expected one row of integers")
    if int(array.min()) < 0 or int(array.max()) >= _TOKEN_ID_LIMIT:
        raise RecordError(f"token ids span [{array.min()}, {array.max()}]; expected them in [0, 2**31)")
    return array.astype("<i4").tobytes()


def ids_from_bytes(data: bytes | memoryview) -> npt.NDArray[np.int32]:
    """Read token ids that `ids_to_bytes` wrote.

    Args:
        data: Four bytes per id.

    Raises:
        RecordError: If the length is no multiple of four.
    """
    if len(data) % 4:
        raise RecordError(f"token ids take {len(data)} bytes; expected a multiple of 4")
    return np.frombuffer(data, dtype="<i4")


def chain_root(fingerprint: str, secret: bytes) -> bytes:
    """Start a chain: the hash before any token.

    Args:
        fingerprint: What identifies the target; another target's chains never meet this one's.
        secret: The tenant's secret, at most 64 bytes, or b"".

    Returns:
        32 bytes.

    Raises:
        ConfigError: If the secret is too long.
    """
    check_secret(secret)
    data = fingerprint.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES, key=secret, person=b"chain").digest()


def chain_next(prev: bytes, ids: TokenIds) -> bytes:
    """Extend a chain by one block: BLAKE2b(prev | count | int32 ids).

    The count is hashed too, so a block boundary is part of the identity: [a, b] is not [a] then [b].

    Args:
        prev: The chain before the block, 32 bytes.
        ids: The block's token ids, at least one.

    Returns:
        32 bytes.

    Raises:
        RecordError: If an argument has a form that no chain has.
    """
    return _chain_step(prev, ids_to_bytes(ids))


def chain_blocks(prev: bytes, ids: TokenIds, counts: Sequence[int]) -> list[bytes]:
    """Extend a chain by blocks of the given numbers of tokens.

    Args:
        prev: The chain before the first block.
        ids: At least as many token ids as the blocks hold.
        counts: Tokens per block.

    Returns:
        One chain per block, in order.

    Raises:
        RecordError: If the blocks hold more tokens than there are ids.
    """
    data = ids_to_bytes(ids)
    if sum(counts) * 4 > len(data):
        raise RecordError(f"blocks hold {sum(counts)} tokens; expected at most the {len(data) // 4} that are given")
    chains: list[bytes] = []
    start = 0
    for count in counts:
        prev = _chain_step(prev, data[start : start + 4 * count])
        chains.append(prev)
        start += 4 * count
    return chains


def check_secret(secret: bytes) -> None:
    """Refuse a secret that BLAKE2b cannot take.

    Args:
        secret: The tenant's secret.

    Raises:
        ConfigError: If it is longer than 64 bytes.
    """
    if len(secret) > hashlib.blake2b.MAX_KEY_SIZE:
        raise ConfigError(f"the secret has {len(secret)} bytes; expected at most {hashlib.blake2b.MAX_KEY_SIZE}")


def is_snapshot_id(text: str) -> bool:
    """Say whether a text has the form of a snapshot id (it may come from a message's metadata)."""
    return _HEX_64.fullmatch(text) is not None


@dataclass(frozen=True, slots=True)
class SessionName:
    """What people call a session; its keys only hold a hash of it.

    Attributes:
        thread_id: The LangGraph thread, any text.
        namespace: The checkpoint namespace inside it, without per-step task ids: an agent's calls are made in the
            namespace of the node that makes them, for example "model".
    """

    thread_id: str
    namespace: str = ""

    @property
    def sid(self) -> str:
        """The `session_id`."""
        return session_id(self.thread_id, self.namespace)


@dataclass(frozen=True, slots=True)
class KeyParts:
    """What a key says.

    Attributes:
        kind: One of `KINDS`, or "unknown".
        target: Of a block or side record: the `fingerprint_hash`.
        chain: Of a block or side record.
        position: Of a side record.
        sid: Of a head or snapshot; of a checkpoint key its `thread_hash`.
        snapshot_id: Of a snapshot.
    """

    kind: str
    target: bytes = b""
    chain: bytes = b""
    position: int = 0
    sid: str = ""
    snapshot_id: str = ""


@dataclass(frozen=True, slots=True)
class Keys:
    """Builds every key of one tenant.

    Attributes:
        tenant: Any text; tenants never see each other's keys.
        prefix: What all of the tenant's keys start with.
    """

    tenant: str
    prefix: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "prefix", f"dlite:{LAYOUT_VERSION}:{_hash_text('tenant', self.tenant)}")

    def block(self, fingerprint: bytes, chain: bytes) -> str:
        """Key of a KV block; `fingerprint` is a `fingerprint_hash`."""
        return f"{self.prefix}:b:{fingerprint.hex()}:{chain.hex()}"

    def side(self, fingerprint: bytes, chain: bytes, position: int) -> str:
        """Key of the hidden row at a position; `fingerprint` is a `fingerprint_hash`."""
        return f"{self.prefix}:s:{fingerprint.hex()}:{chain.hex()}:{position}"

    def snapshot(self, sid: str, snapshot_id: str) -> str:
        """Key of a snapshot of a session."""
        if not is_snapshot_id(snapshot_id):
            raise ConfigError(f"snapshot id is {snapshot_id[:80]!r}; expected 64 hex digits")
        return f"{self._session(sid)}:c:{snapshot_id}"

    def snapshots(self, sid: str) -> str:
        """Pattern of all snapshot keys of a session."""
        return f"{self._session(sid)}:c:*"

    def head(self, sid: str) -> str:
        """Key of a session's head."""
        return f"{self._session(sid)}:h"

    def checkpoint_data(self, thread: str) -> str:
        """Key of a thread's checkpoints; `thread` is a `thread_hash`."""
        return f"{self.prefix}:{{{thread}}}:k:d"

    def checkpoint_index(self, thread: str) -> str:
        """Key of the order of a thread's checkpoints; `thread` is a `thread_hash`."""
        return f"{self.prefix}:{{{thread}}}:k:i"

    def everything(self) -> str:
        """Pattern of all of the tenant's keys."""
        return f"{self.prefix}:*"

    def checkpoints(self) -> str:
        """Pattern of the data keys of all threads."""
        return f"{self.prefix}:{{*}}:k:d"

    def kind(self, key: bytes) -> str:
        """Name the kind of one of the tenant's keys: one of `KINDS`, or "unknown"."""
        match = _KIND_OF_KEY.fullmatch(key.removeprefix(f"{self.prefix}:".encode()))
        return (match.lastgroup if match else None) or "unknown"

    def parse(self, key: bytes) -> KeyParts:
        """Read one of the tenant's keys."""
        kind = self.kind(key)
        if kind == "unknown":
            return KeyParts(kind)
        parts = key.removeprefix(f"{self.prefix}:".encode()).decode().split(":")
        if kind in ("block", "side"):
            position = int(parts[3]) if kind == "side" else 0
            return KeyParts(kind, target=bytes.fromhex(parts[1]), chain=bytes.fromhex(parts[2]), position=position)
        return KeyParts(kind, sid=parts[0].strip("{}"), snapshot_id=parts[2] if kind == "snapshot" else "")

    def _session(self, sid: str) -> str:
        if not _HEX_32.fullmatch(sid):
            raise ConfigError(f"session id is {sid[:80]!r}; expected 32 hex digits, as session_id() gives")
        return f"{self.prefix}:{{{sid}}}"


def _hash_text(person: str, *parts: str) -> str:
    state = hashlib.blake2b(digest_size=16, person=person.encode())
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        state.update(struct.pack("<Q", len(data)))
        state.update(data)
    return state.hexdigest()


def _chain_step(prev: bytes, ids: bytes) -> bytes:
    if len(prev) != DIGEST_BYTES:
        raise RecordError(f"a chain has {len(prev)} bytes; expected {DIGEST_BYTES}")
    if not ids:
        raise RecordError("a block holds no token; expected at least one")
    return hashlib.blake2b(prev + struct.pack("<I", len(ids) // 4) + ids, digest_size=DIGEST_BYTES).digest()

"""What may happen to stored data: bytes that change, records that are another's, blocks that go away."""

from __future__ import annotations

import math
import pickle
import struct
import time
from collections.abc import Callable, Mapping

from dlite_agent.bench.sessions.trial import Trial
from dlite_agent.sessions.keys import Keys
from dlite_agent.sessions.record_codec import RecordCodec
from dlite_agent.sessions.records import Block, SideRow
from dlite_agent.sessions.store import SessionStore

POLICIES = (
    "noeviction",
    "volatile-lru",
    "volatile-lfu",
    "volatile-ttl",
    "volatile-random",
    "allkeys-lru",
    "allkeys-lfu",
    "allkeys-random",
)
_PLANTED = 4 << 20


class Planted:
    """What a pickle would run if anything unpickled it."""

    was_loaded = False

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return (_loaded, ())


def _loaded() -> None:
    Planted.was_loaded = True


def _flip(record: bytes, trial: Trial) -> bytes:
    position = trial.random.randrange(len(record))
    return record[:position] + bytes([record[position] ^ (1 << trial.random.randrange(8))]) + record[position + 1 :]


def _truncate(record: bytes, trial: Trial) -> bytes:
    return record[: trial.random.randrange(len(record))]


def _pickle(record: bytes, trial: Trial) -> bytes:
    return pickle.dumps(Planted())


def _oversized(record: bytes, trial: Trial) -> bytes:
    return record + bytes(_PLANTED)


def _claims_gigabytes(record: bytes, trial: Trial) -> bytes:
    """Say in a header, soundly sealed where there is no secret, that the record unpacks to gigabytes."""
    header = bytearray(record)
    struct.pack_into("<I", header, 4 + 5 + 3 + 8 + 16 + 32, 2**31)
    return bytes(header)


DAMAGES: Mapping[str, Callable[[bytes, Trial], bytes]] = {
    "flipped bit": _flip,
    "truncated": _truncate,
    "planted pickle": _pickle,
    "oversized": _oversized,
    "claims gigabytes": _claims_gigabytes,
}


def record_damaged(trial: Trial) -> None:
    """Damage some of the session's records, of every kind, between two calls."""
    store = _two_turns(trial)
    names = list(DAMAGES)
    damage = names[trial.seed % len(names)]
    keys = [key for key in _keys(store) if store.keys.kind(key) in ("block", "side", "snapshot")]
    chosen = trial.random.sample(keys, trial.random.randint(1, len(keys)))
    for key in chosen:
        record = store.client.get(key)
        assert isinstance(record, bytes)
        store.client.set(key, DAMAGES[damage](record, trial), keepttl=True)
    trial.note = f"{damage}: {len(chosen)} of {len(keys)} records"
    trial.converse(trial.keeper())
    if Planted.was_loaded:
        trial.unusable.append("a planted pickle was loaded")
    trial.check_usable()


def record_swapped(trial: Trial) -> None:
    """Put a sound record where another belongs: another chain's, other dimensions', another target's."""
    store = _two_turns(trial)
    blocks = [key for key in _keys(store) if store.keys.kind(key) == "block"]
    victim = trial.random.choice(blocks)
    fault = ("another block", "other dimensions", "another type", "another target")[trial.seed % 4]
    if fault == "another block":
        record = store.client.get(trial.random.choice([key for key in blocks if key != victim]))
    else:
        record = _foreign_record(store, victim, fault, trial.lab.target(0).fingerprint)
    assert isinstance(record, bytes)
    store.client.set(victim, record, keepttl=True)
    trial.note = fault
    trial.converse(trial.keeper())
    trial.check_usable()


def head_damaged(trial: Trial) -> None:
    """Leave nonsense in the session's head, or another type of value at its key."""
    store = _two_turns(trial)
    key = store.keys.head(trial.name.sid)
    fields = ("version", "fence", "snapshot", "nonce")
    fault = (*fields, "type", "gone")[trial.seed % 6]
    if fault in fields:
        junk = trial.random.choice([b"", b"\xff\x00", b"-1", b"nan", b"1e400", b"*", b"0" * 64, b"9" * 30])
        store.client.hset(key, fault, junk)
        fault = f"{fault} is {junk!r}"
    else:
        store.client.delete(key)
        if fault == "type":
            store.client.set(key, b"planted")
    trial.note = fault
    trial.converse(trial.keeper())
    trial.check_usable()


def blocks_expired(trial: Trial) -> None:
    """Let some records expire between the turns of a process that has the session in memory, and of a new one."""
    keeper = trial.keeper()
    trial.converse(keeper, num_turns=2)
    store = trial.store()
    num_expired = 0
    for _ in range(2):
        for key in _keys(store):
            if store.keys.kind(key) != "head" and trial.random.random() < trial.random.choice([0.1, 0.5, 1.0]):
                store.client.pexpire(key, 1)
                num_expired += 1
        time.sleep(0.005)
        turn = trial.converse(trial.random.choice([keeper, trial.keeper()]))
        if turn is None or turn.snapshot_id is None:
            trial.unusable.append("a turn behind expired records was not stored")
    trial.note = f"{num_expired} records expired"
    trial.check_usable()


def memory_short(trial: Trial) -> None:
    """Give the server room for half the session, under each eviction policy."""
    policy = POLICIES[trial.seed // len(trial.lab.servers.binaries) % len(POLICIES)]
    client = trial.client()
    before = client.info("memory")["used_memory"]
    keeper = trial.keeper(trial.store(client))
    trial.converse(keeper, num_turns=4)
    used = client.info("memory")["used_memory"]
    client.config_set("maxmemory-policy", policy)
    client.config_set("maxmemory", int(before + (used - before) / 2))
    trial.converse(keeper, num_turns=2)
    trial.converse(trial.keeper())
    trial.note = f"{policy}, {used - before} bytes were used"
    client.config_set("maxmemory", 0)
    trial.check_usable()


def _two_turns(trial: Trial) -> SessionStore:
    trial.converse(trial.keeper(), num_turns=2)
    return trial.store()


def _keys(store: SessionStore) -> list[bytes]:
    return sorted(set(store.client.scan_iter(match=store.keys.everything(), count=1000)))


def _foreign_record(store: SessionStore, key: bytes, fault: str, fingerprint: str) -> bytes:
    """Make a sound record for a block's key whose content is not what the key promises."""
    codec, parts = RecordCodec(), Keys("default").parse(key)
    record = store.client.get(key)
    assert isinstance(record, bytes)
    block = codec.unpack_block(record, fingerprint=parts.target, chain=parts.chain)
    if fault == "another target":
        return codec.pack_block(f"{fingerprint} with other weights", block)
    if fault == "another type":
        num_items = math.prod(block.shape)
        side = SideRow(parts.chain, 3, "float32", (num_items,), block.payload)
        return codec.pack_side(fingerprint, side)
    shape = (block.shape[0] * 2, *block.shape[1:])
    return codec.pack_block(
        fingerprint, Block(parts.chain, block.num_tokens, block.dtype, shape, bytes(block.payload) * 2)
    )

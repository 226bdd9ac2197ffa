"""Keys and records: no collisions, no injection, and nothing damaged is ever believed."""

from __future__ import annotations

import pickle
import re
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlite_agent.errors import ConfigError, MissingDependencyError, RecordError
from dlite_agent.sessions import keys as keys_module
from dlite_agent.sessions.codecs import CodecName
from dlite_agent.sessions.keys import (
    KINDS,
    Keys,
    chain_blocks,
    chain_next,
    chain_root,
    fingerprint_hash,
    ids_from_bytes,
    ids_to_bytes,
    session_id,
    thread_hash,
)
from dlite_agent.sessions.record_codec import _HEADER, SCHEMA_VERSION, ForeignRecordError, RecordCodec
from dlite_agent.sessions.records import (
    DTYPE_BYTES,
    HEADER_BYTES,
    MAX_RECORD_BYTES,
    Block,
    BlockRef,
    SideRow,
    Snapshot,
)

HOSTILE = [
    "",
    "*",
    "{}",
    "a:b",
    "{a}:h",
    "x\ny",
    "\x00",
    "é☃",
    "\ud800",
    "a" * 10_000,
    "dlite:1:*",
    "../..",
    "?[a-z]\\",
]
CHAIN = chain_next(chain_root("target", b""), [1, 2, 3])

texts = st.text() | st.sampled_from(HOSTILE)
token_ids = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=40)


@given(texts, texts, texts, texts)
def test_sessions_are_equal_only_if_thread_and_namespace_are(a: str, b: str, c: str, d: str) -> None:
    assert (session_id(a, b) == session_id(c, d)) == ((a, b) == (c, d))


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_gets_into_a_key(text: str) -> None:
    keys = Keys(text)
    sid, target = session_id(text, text), fingerprint_hash(text)
    made = {
        "block": keys.block(target, CHAIN),
        "side": keys.side(target, CHAIN, 7),
        "snapshot": keys.snapshot(sid, "0" * 64),
        "head": keys.head(sid),
        "checkpoint": keys.checkpoint_data(thread_hash(text)),
    }
    assert set(made) == set(KINDS)
    for kind, key in made.items():
        assert re.fullmatch(r"dlite:1:[0-9a-f]{32}:[0-9a-z:{}]+", key)
        assert len(key) < 200
        assert keys.kind(key.encode()) == kind
        assert Keys("other").kind(key.encode()) == "unknown"
    assert keys.kind(f"{keys.prefix}:draft:{sid}".encode()) == "unknown"


def test_a_thread_and_its_session_share_no_key() -> None:
    assert session_id("t") != thread_hash("t")


def test_a_raw_thread_id_is_refused_where_a_session_id_is_due() -> None:
    with pytest.raises(ConfigError, match="session_id"):
        Keys("default").head("my thread")


@given(token_ids, st.data())
def test_chains_name_tokens_and_boundaries(ids: list[int], data: st.DataObject) -> None:
    root = chain_root("target", b"")
    cut = data.draw(st.integers(1, len(ids)))
    whole = chain_next(root, ids)
    assert chain_next(root, np.array(ids, dtype=np.int32)) == whole
    assert chain_blocks(root, ids, [len(ids)]) == [whole]
    if cut < len(ids):
        parts = chain_blocks(root, ids, [cut, len(ids) - cut])
        assert parts[1] == chain_next(chain_next(root, ids[:cut]), ids[cut:])
        assert parts[1] != whole
    assert chain_next(root, [*ids[:-1], ids[-1] ^ 1]) != whole
    assert ids_from_bytes(ids_to_bytes(ids)).tolist() == ids


def test_chains_differ_by_fingerprint_and_by_secret() -> None:
    roots = {chain_root(target, secret) for target in ("a", "b") for secret in (b"", b"x", b"y")}
    assert len(roots) == 6


@pytest.mark.parametrize("ids", [[-1], [2**31], [1.5], [[1, 2]]])
def test_ids_that_are_no_token_ids_are_refused(ids: Any) -> None:
    with pytest.raises(RecordError, match="token ids"):
        ids_to_bytes(ids)


def test_an_empty_block_is_refused() -> None:
    with pytest.raises(RecordError, match="no token"):
        chain_next(chain_root("target", b""), [])


def test_a_secret_longer_than_the_hash_takes_is_refused() -> None:
    with pytest.raises(ConfigError, match="64"):
        RecordCodec(b"x" * 65)


@given(st.data())
def test_blocks_and_rows_come_back_as_they_were(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(sorted(DTYPE_BYTES)))
    shape = tuple(data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=8)))
    size = int(np.prod(shape)) * DTYPE_BYTES[dtype]
    payload = data.draw(st.binary(min_size=size, max_size=size))
    codec = RecordCodec(data.draw(st.binary(max_size=64)), data.draw(st.sampled_from(get_args(CodecName))))
    block = Block(CHAIN, data.draw(st.integers(1, 2**32 - 1)), dtype, shape, memoryview(payload))
    assert codec.unpack_block(codec.pack_block("target", block), fingerprint="target", chain=CHAIN) == block
    row = SideRow(CHAIN, data.draw(st.integers(0, 2**63 - 1)), dtype, shape, payload)
    record = codec.pack_side("target", row)
    assert codec.unpack_side(record, fingerprint="target", chain=CHAIN, position=row.position) == row


def smooth_block(num_items: int = 4096) -> Block:
    rows = (1 + np.arange(num_items, dtype=np.float32) / num_items).tobytes()
    return Block(CHAIN, 3, "float32", (num_items,), rows)


def test_compressed_rows_are_smaller_and_the_same_for_every_reader() -> None:
    block = smooth_block()
    raw, packed = (RecordCodec(b"s", codec).pack_block("target", block) for codec in get_args(CodecName))
    assert len(packed) < 0.8 * len(raw)
    for codec in get_args(CodecName):
        found = RecordCodec(b"s", codec).unpack_block(packed, fingerprint="target", chain=CHAIN)
        assert found == block
        assert found.ref() == block.ref()


def test_rows_that_do_not_shrink_are_stored_as_they_are() -> None:
    block = Block(CHAIN, 3, "float32", (64,), np.random.default_rng(0).bytes(256))
    assert RecordCodec(codec="zstd").pack_block("target", block) == RecordCodec().pack_block("target", block)


def test_snapshots_are_never_compressed() -> None:
    snapshot = make_snapshot([1] * 1000, [500])
    assert RecordCodec(codec="zstd").pack_snapshot(snapshot) == RecordCodec().pack_snapshot(snapshot)


def resealed(record: bytes, position: int, value: bytes) -> bytes:
    """Change a header as a forger without a secret to find could."""
    header = bytearray(record[: _HEADER.size])
    header[position : position + len(value)] = value
    return bytes(header) + RecordCodec()._seal(bytes(header)) + record[HEADER_BYTES:]


@pytest.mark.parametrize("schema", [0, 1, SCHEMA_VERSION + 1])
def test_records_of_another_schema_are_another_version_s(schema: int) -> None:
    record = resealed(RecordCodec().pack_block("target", smooth_block()), 4, bytes([schema]))
    with pytest.raises(ForeignRecordError, match=f"schema {schema}"):
        RecordCodec().unpack_block(record, fingerprint="target", chain=CHAIN)


@pytest.mark.parametrize("codec", [2, 7, 255])
def test_a_codec_that_is_not_known_is_another_version_s(codec: int) -> None:
    record = resealed(RecordCodec().pack_block("target", smooth_block()), 6, bytes([codec]))
    with pytest.raises(ForeignRecordError, match=f"codec {codec}"):
        RecordCodec().unpack_block(record, fingerprint="target", chain=CHAIN)


def test_a_codec_whose_library_is_missing_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    record = RecordCodec(codec="zstd").pack_block("target", smooth_block())
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ForeignRecordError, match="codec 1"):
        RecordCodec().unpack_block(record, fingerprint="target", chain=CHAIN)
    with pytest.raises(MissingDependencyError, match=r"dlite-agent\[zstd\]"):
        RecordCodec(codec="zstd")


def test_a_codec_that_there_is_not_is_refused() -> None:
    with pytest.raises(ConfigError, match="zstd"):
        RecordCodec(codec="lz4")  # type: ignore[arg-type]


def test_no_flipped_bit_of_compressed_rows_gives_other_rows() -> None:
    codec = RecordCodec(codec="zstd")
    block = smooth_block(256)
    record = codec.pack_block("target", block)
    num_refused = 0
    for position in range(len(record)):
        damaged = bytearray(record)
        damaged[position] ^= 1 << (position % 8)
        try:
            found = codec.unpack_block(bytes(damaged), fingerprint="target", chain=CHAIN)
        except RecordError:
            num_refused += 1
        else:
            assert found == block  # a bit that zstd does not use
    assert num_refused > len(record) - 16


@pytest.mark.parametrize("num_items", [1, 4095, 4097, 2**31])
def test_compressed_rows_of_another_size_than_the_header_says_are_refused(num_items: int) -> None:
    record = RecordCodec(codec="zstd").pack_block("target", smooth_block())
    at = 4 + 5 + 3 + 8 + 16 + 32  # the first dimension
    forged = resealed(record, at, num_items.to_bytes(4, "little"))
    with pytest.raises(RecordError):
        RecordCodec().unpack_block(forged, fingerprint="target", chain=CHAIN)


def test_every_flipped_bit_and_every_truncation_is_found() -> None:
    codec = RecordCodec()
    record = codec.pack_block("target", Block(CHAIN, 3, "float16", (3, 4), bytes(range(24))))
    for position in range(len(record)):
        damaged = bytearray(record)
        damaged[position] ^= 1 << (position % 8)
        with pytest.raises(RecordError):
            codec.unpack_block(bytes(damaged), fingerprint="target", chain=CHAIN)
        with pytest.raises(RecordError):
            codec.unpack_block(record[:position], fingerprint="target", chain=CHAIN)
    with pytest.raises(RecordError):
        codec.unpack_block(record + b"\x00", fingerprint="target", chain=CHAIN)
    with pytest.raises(RecordError):
        codec.unpack_block(pickle.dumps({"a": 1}), fingerprint="target", chain=CHAIN)


def test_a_sound_record_of_another_name_is_foreign() -> None:
    codec = RecordCodec()
    other = chain_next(CHAIN, [4])
    record = codec.pack_block("target", Block(CHAIN, 3, "int8", (3,), b"abc"))
    row = codec.pack_side("target", SideRow(CHAIN, 2, "int8", (3,), b"abc"))
    with pytest.raises(ForeignRecordError):
        codec.unpack_block(record, fingerprint="other", chain=CHAIN)
    with pytest.raises(ForeignRecordError):
        codec.unpack_block(record, fingerprint="target", chain=other)
    with pytest.raises(ForeignRecordError):
        codec.unpack_block(row, fingerprint="target", chain=CHAIN)
    with pytest.raises(ForeignRecordError):
        codec.unpack_side(row, fingerprint="target", chain=CHAIN, position=3)


def test_a_record_sealed_with_another_secret_is_refused() -> None:
    record = RecordCodec(b"theirs").pack_block("target", Block(CHAIN, 3, "int8", (3,), b"abc"))
    for secret in (b"", b"ours"):
        with pytest.raises(RecordError, match="seal"):
            RecordCodec(secret).unpack_block(record, fingerprint="target", chain=CHAIN)


def test_a_record_the_server_cannot_take_is_refused_before_it_is_hashed() -> None:
    with pytest.raises(RecordError, match="smaller blocks"):
        Block(CHAIN, 1, "int8", (MAX_RECORD_BYTES,), bytes(MAX_RECORD_BYTES))


@pytest.mark.parametrize(
    ("dtype", "shape", "payload"),
    [
        ("float32", (2,), b"1234"),
        ("complex64", (1,), b"12345678"),
        ("int8", (), b"1"),
        ("int8", (0,), b""),
        ("int8", (1,) * 9, b"1"),
        ("int8", (2,), memoryview(b"1234")[::2]),
    ],
)
def test_tensors_that_do_not_fit_their_description_are_refused(
    dtype: str, shape: tuple[int, ...], payload: bytes
) -> None:
    with pytest.raises(RecordError):
        Block(CHAIN, 1, dtype, shape, payload)


def make_snapshot(tokens: list[int], counts: list[int], *, secret: bytes = b"", **changes: Any) -> Snapshot:
    chains = chain_blocks(chain_root("target", secret), tokens, counts)
    refs = tuple(BlockRef(chain, count) for chain, count in zip(chains, counts, strict=True))
    fields: dict[str, Any] = {
        "parent": None,
        "fingerprint": "target",
        "ids": ids_to_bytes(tokens),
        "num_kv": sum(counts),
        "blocks": refs,
    }
    return Snapshot(**{**fields, **changes})


@given(token_ids, st.data())
def test_snapshots_come_back_as_they_were(ids: list[int], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(ids)))
    secret = data.draw(st.binary(max_size=64))
    counts = [cut] if cut else []
    parent = data.draw(st.none() | st.just("ab" * 32))
    snapshot = make_snapshot(ids, counts, secret=secret, parent=parent, pivot=bool(cut))
    codec = RecordCodec(secret)
    found = codec.unpack_snapshot(codec.pack_snapshot(snapshot), snapshot_id=snapshot.snapshot_id)
    assert found == snapshot
    assert abs(found.created_at - snapshot.created_at) < 1e-5
    assert found.token_ids().tolist() == ids


def test_a_snapshot_is_named_by_its_content_not_by_its_time() -> None:
    one = make_snapshot([1, 2, 3], [2], created_at=1.0)
    assert one.snapshot_id == make_snapshot([1, 2, 3], [2], created_at=2.0).snapshot_id
    others = [
        make_snapshot([1, 2, 4], [2]),
        make_snapshot([1, 2, 3], [3]),
        make_snapshot([1, 2, 3], [1, 1]),
        make_snapshot([1, 2, 3], [2], parent="ab" * 32),
        make_snapshot([1, 2, 3], [2], pivot=True),
    ]
    assert len({snapshot.snapshot_id for snapshot in [one, *others]}) == 6


def test_a_snapshot_whose_blocks_are_not_of_its_tokens_is_refused() -> None:
    codec = RecordCodec()
    for wrong in (
        make_snapshot([1, 2, 3], [2], ids=ids_to_bytes([1, 9, 3])),
        make_snapshot([1, 2, 3], [2], fingerprint="other"),
        make_snapshot([1, 2, 3], [2], secret=b"theirs"),
    ):
        with pytest.raises(RecordError, match="follow"):
            codec.unpack_snapshot(codec.pack_snapshot(wrong), snapshot_id=wrong.snapshot_id)


@pytest.mark.parametrize(
    "changes",
    [{"num_kv": 3}, {"num_kv": 4}, {"num_kv": -1}, {"ids": b"123"}, {"parent": "*"}, {"blocks": ()}],
)
def test_a_snapshot_that_contradicts_itself_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(RecordError):
        make_snapshot([1, 2, 3], [2], **changes)


def test_a_damaged_snapshot_is_refused() -> None:
    codec = RecordCodec()
    snapshot = make_snapshot([1, 2, 3], [2])
    record = codec.pack_snapshot(snapshot)
    for position in range(len(record)):
        damaged = bytearray(record)
        damaged[position] ^= 0x10
        with pytest.raises(RecordError):
            codec.unpack_snapshot(bytes(damaged), snapshot_id=snapshot.snapshot_id)


def test_every_kind_is_recognised_by_one_pattern() -> None:
    assert set(keys_module._KIND_OF_KEY.groupindex) == set(KINDS)

"""How a record's payload is stored: as it is, or with its bytes sorted by significance and compressed.

Of a float's bytes only the one with sign and exponent has a pattern that a compressor finds, so each plane of bytes is
compressed by itself, or left as it is where that gains nothing.

    zstd payload: for each of the element's bytes, from the least significant: length, plane
"""

from __future__ import annotations

import importlib.util
import math
import struct
from typing import Literal, get_args

import numpy as np

from dlite_agent.errors import ConfigError, MissingDependencyError, RecordError

CodecName = Literal["raw", "zstd"]
RAW, ZSTD = 0, 1
"""Wire codes: append, never reuse."""

_LEVEL = 1  # higher levels cost two to five times the time for a hundredth of the size
_LENGTH = struct.Struct("<I")
_MIN_GAIN = 0.95


def is_readable(codec: int) -> bool:
    """Say whether payloads of a codec can be read here."""
    return codec == RAW or (codec == ZSTD and importlib.util.find_spec("zstandard") is not None)


def check_codec(name: str) -> None:
    """Refuse a codec that cannot be written here.

    Raises:
        ConfigError: If there is no such codec.
        MissingDependencyError: If its library is not installed.
    """
    if name not in get_args(CodecName):
        raise ConfigError(f"codec is {name!r}; expected one of {', '.join(get_args(CodecName))}")
    if name == "zstd" and not is_readable(ZSTD):
        raise MissingDependencyError("codec 'zstd' needs the extra: pip install 'dlite-agent[zstd]'")


def encode(name: CodecName, payload: bytes | memoryview, *, item_bytes: int) -> tuple[int, bytes | memoryview]:
    """Encode a payload.

    Args:
        name: The codec to try.
        payload: Whole elements.
        item_bytes: Bytes per element.

    Returns:
        The wire code and the bytes to store: raw ones where the codec gains nothing.
    """
    if name == "raw":
        return RAW, payload
    import zstandard

    payload = memoryview(payload).cast("B")
    compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=False, write_content_size=True)
    planes = np.frombuffer(payload, dtype=np.uint8).reshape(-1, item_bytes)
    parts: list[bytes] = []
    for index in range(item_bytes):
        plane = np.ascontiguousarray(planes[:, index]).data
        packed = compressor.compress(plane)
        stored = packed if len(packed) < _MIN_GAIN * len(plane) else bytes(plane)
        parts += (_LENGTH.pack(len(stored)), stored)
    encoded = b"".join(parts)
    return (ZSTD, encoded) if len(encoded) < len(payload) else (RAW, payload)


def decode(
    codec: int, stored: memoryview, *, item_bytes: int, shape: tuple[int, ...], max_bytes: int
) -> bytes | memoryview:
    """Decode what `encode` made; never more bytes than the shape says.

    Args:
        codec: A wire code that `is_readable`.
        stored: The bytes, not trusted.
        item_bytes: Bytes per element.
        shape: Of the elements.
        max_bytes: Refuse a larger payload.

    Returns:
        The payload.

    Raises:
        RecordError: If the bytes are no such payload.
    """
    if codec == RAW:
        return stored
    import zstandard

    num_items = math.prod(shape)
    if not 0 < num_items * item_bytes <= max_bytes:
        raise RecordError(f"the record claims a payload of {num_items * item_bytes} bytes; expected 1 to {max_bytes}")
    planes = np.empty((num_items, item_bytes), dtype=np.uint8)
    decompressor = zstandard.ZstdDecompressor()
    start = 0
    for index in range(item_bytes):
        if start + _LENGTH.size > len(stored):
            raise RecordError("the record's compressed payload ends too early")
        (length,) = _LENGTH.unpack_from(stored, start)
        start += _LENGTH.size
        plane: bytes | memoryview = stored[start : start + length]
        start += length
        if length < num_items:
            try:
                plane = decompressor.decompress(plane, max_output_size=num_items)
            except (zstandard.ZstdError, MemoryError) as error:
                raise RecordError(f"the record's payload cannot be decompressed: {error}") from error
        if len(plane) != num_items:
            raise RecordError(f"a plane of the record's payload has {len(plane)} bytes; expected {num_items}")
        planes[:, index] = np.frombuffer(plane, dtype=np.uint8)
    if start != len(stored):
        raise RecordError("the record's compressed payload is followed by something else")
    return planes.reshape(-1).data

"""Tensors to bytes and back: what a KV block and a pivot row look like outside the process."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from dlite_agent.engine.cache import SlabCache

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorBytes:
    """A tensor as raw little-endian bytes in C order."""

    dtype: str
    shape: tuple[int, ...]
    payload: memoryview


def to_bytes(tensor: torch.Tensor) -> TensorBytes:
    """Copy a tensor into bytes.

    Raises:
        ValueError: If its dtype is not a float type that is stored.
    """
    if tensor.dtype not in _NAMES:
        raise ValueError(f"dtype {tensor.dtype} is not stored; expected one of {', '.join(_DTYPES)}")
    flat = tensor.detach().cpu().contiguous()
    return TensorBytes(_NAMES[flat.dtype], tuple(flat.shape), flat.view(torch.uint8).flatten().numpy().data)


def from_bytes(dtype: str, shape: tuple[int, ...], payload: bytes | memoryview) -> torch.Tensor:
    """Read a tensor that `to_bytes` wrote.

    Raises:
        ValueError: If the dtype is unknown or the length does not match the shape.
    """
    if dtype not in _DTYPES:
        raise ValueError(f"dtype {dtype!r}; expected one of {', '.join(_DTYPES)}")
    data = bytearray(payload)
    expected = math.prod(shape) * _DTYPES[dtype].itemsize
    if len(data) != expected:
        raise ValueError(f"{len(data)} bytes for {dtype} {list(shape)}; expected {expected}")
    return torch.frombuffer(data, dtype=_DTYPES[dtype]).view(shape)


def block_bytes(cache: SlabCache, start: int, stop: int) -> TensorBytes:
    """Copy KV rows `[start, stop)` of all layers: `[layers, 2, heads, stop - start, head_dim]`."""
    return to_bytes(cache.rows(start, stop))


def append_block(cache: SlabCache, block: TensorBytes, *, num_rows: int) -> None:
    """Append the first `num_rows` rows of a block.

    Raises:
        ValueError: If the block does not have the cache's shape or type.
    """
    rows = from_bytes(block.dtype, block.shape, block.payload)
    cache.append(rows[:, :, :, :num_rows])

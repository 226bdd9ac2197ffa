"""The rows of a live session as the blocks and the pivot row that a store keeps, and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from dlite_agent.engine.kv_codec import TensorBytes, append_block, block_bytes, from_bytes, to_bytes
from dlite_agent.engine.state import TargetState
from dlite_agent.engine.target import Target
from dlite_agent.sessions.records import Block, BlockRef, SideRow


def block_shape(target: Target, num_tokens: int) -> tuple[int, ...]:
    """Return the shape of a target's blocks: layers, keys and values, heads, tokens, head dimension."""
    config = target.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return (target.num_layers, 2, config.num_key_value_heads, num_tokens, head_dim)


def copy_blocks(state: TargetState, refs: Sequence[BlockRef], start: int) -> Iterator[Block]:
    """Copy rows out of a state, from row `start` on, as the blocks that `refs` name; one at a time."""
    for ref in refs:
        rows = block_bytes(state.cache, start, start + ref.num_tokens)
        yield Block(ref.chain, ref.num_tokens, rows.dtype, rows.shape, rows.payload)
        start += ref.num_tokens


def append_rows(target: Target, state: TargetState, block: Block, count: int) -> bool:
    """Append a block's first rows; False if it does not have this target's shape."""
    if block.shape != block_shape(target, block.num_tokens):
        return False
    if block.dtype != str(target.dtype).removeprefix("torch."):
        return False
    append_block(state.cache, TensorBytes(block.dtype, block.shape, memoryview(block.payload)), num_rows=count)
    return True


def pack_pivot(target: Target, pivot: torch.Tensor, *, chain: bytes, position: int) -> SideRow:
    """Pack the pivot; its layer ids go in front, so that a drafter of other layers does not take it."""
    layers = torch.tensor(target.layer_ids, dtype=pivot.dtype, device=pivot.device)
    packed = to_bytes(torch.cat([layers.unsqueeze(1), pivot], dim=1))
    return SideRow(chain, position, packed.dtype, packed.shape, packed.payload)


def read_pivot(target: Target, row: SideRow) -> torch.Tensor | None:
    """Read a pivot `[layers, hidden]`; None if it is of other layers."""
    if row.shape != (len(target.layer_ids), target.hidden_size + 1):
        return None
    packed = from_bytes(row.dtype, row.shape, row.payload).to(target.device)
    if packed[:, 0].tolist() != list(target.layer_ids):
        return None
    return packed[:, 1:].contiguous()

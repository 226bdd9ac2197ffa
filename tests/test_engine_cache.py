"""The KV cache holds what was written, wherever it was cropped, grown, copied out and put back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dlite_agent.engine.cache import SlabCache, SlabLayer
from dlite_agent.engine.kv_codec import TensorBytes, append_block, block_bytes, from_bytes, to_bytes
from dlite_agent.engine.state import TargetState, common_prefix
from dlite_agent.engine.target import Target

LAYERS, HEADS, HEAD_DIM = 3, 2, 4


def some_rows(num_rows: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(LAYERS, 2, HEADS, num_rows, HEAD_DIM, generator=generator).to(dtype)


def write(cache: SlabCache, rows: torch.Tensor) -> None:
    """Write as the layers of a model do."""
    for layer, (keys, values) in enumerate(rows):
        seen = cache.update(keys.unsqueeze(0), values.unsqueeze(0), layer)
        assert torch.equal(seen[0][0, :, -rows.shape[3] :], keys)
        assert torch.equal(seen[1][0, :, -rows.shape[3] :], values)


def pointers_of(cache: SlabCache) -> list[int]:
    layers: list[Any] = list(cache.layers)
    return [slab.data_ptr() for layer in layers for slab in (layer.keys, layer.values)]


def random_ids(length: int, vocab_size: int, seed: int = 0) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(0, vocab_size, size=length).tolist()
    return ids


def test_rows_come_back_bit_for_bit_through_growth() -> None:
    cache, written = SlabCache(LAYERS), some_rows(700)
    start = 0
    for size in (1, 1, 254, 1, 3, 200, 240):  # past 256 and 512
        write(cache, written[:, :, :, start : start + size])
        start += size
        assert cache.num_rows == start
    assert torch.equal(cache.rows(0, 700), written)
    assert torch.equal(cache.rows(255, 258), written[:, :, :, 255:258])


def test_a_slab_grows_geometrically() -> None:
    layer, capacities = SlabLayer(), set[int]()
    rows = some_rows(1)[0]
    for _ in range(2000):
        keys, _ = layer.update(rows[:1], rows[1:])
        capacities.add(keys.stride(1) // HEAD_DIM)
    assert capacities == {256, 512, 1024, 2048}


def test_a_crop_moves_no_byte_and_the_next_rows_replace_what_was_cropped() -> None:
    cache, first, second = SlabCache(LAYERS), some_rows(50), some_rows(20, seed=1)
    write(cache, first)
    pointers = pointers_of(cache)
    size = cache.nbytes
    cache.crop_to(31)
    assert cache.num_rows == 31
    write(cache, second)
    assert pointers_of(cache) == pointers
    assert cache.nbytes == size
    assert torch.equal(cache.rows(0, 51), torch.cat([first[:, :, :, :31], second], dim=3))
    cache.crop_to(100)
    assert cache.num_rows == 51


def test_transformers_relative_crop_and_reset_are_understood() -> None:
    cache = SlabCache(LAYERS)
    write(cache, some_rows(10))
    cache.crop(-3)
    assert (cache.num_rows, cache.get_seq_length()) == (7, 7)
    cache.reset()
    assert cache.num_rows == 0
    write(cache, some_rows(2, seed=4))
    assert torch.equal(cache.rows(0, 2), some_rows(2, seed=4))


def test_reserving_before_the_first_row_saves_every_move() -> None:
    layer = SlabLayer()
    layer.reserve(1000)
    layer.reserve(10)  # less than was reserved already
    rows = some_rows(1)[0]
    layer.update(rows[:1], rows[1:])
    assert layer.keys is not None
    pointer = layer.keys.data_ptr()
    for _ in range(999):
        layer.update(rows[:1], rows[1:])
    assert layer.keys.data_ptr() == pointer
    assert layer.keys.shape[2] == 1000


def test_reserving_later_moves_the_rows_and_never_shrinks() -> None:
    cache, written = SlabCache(LAYERS), some_rows(300)
    write(cache, written)
    size = cache.nbytes
    cache.reserve(5)
    assert cache.nbytes == size
    cache.reserve(2000)
    assert cache.nbytes == LAYERS * 2 * HEADS * 2000 * HEAD_DIM * 4
    assert torch.equal(cache.rows(0, 300), written)


def test_an_uninitialized_cache_takes_more_rows_than_its_least_capacity_at_once() -> None:
    cache = SlabCache(LAYERS)
    write(cache, some_rows(400))
    assert torch.equal(cache.rows(0, 400), some_rows(400))
    assert SlabCache(LAYERS).nbytes == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_blocks_go_to_bytes_and_back_bit_for_bit(dtype: torch.dtype) -> None:
    cache, restored, written = SlabCache(LAYERS), SlabCache(LAYERS), some_rows(100, dtype=dtype)
    cache.append(written)
    for start in range(0, 100, 32):
        block = block_bytes(cache, start, min(start + 32, 100))
        kept = TensorBytes(block.dtype, block.shape, memoryview(bytes(block.payload)))
        append_block(restored, kept, num_rows=min(32, 97 - start))
    assert torch.equal(restored.rows(0, 97), written[:, :, :, :97])
    assert restored.rows(0, 97).dtype == dtype


def test_an_exported_block_is_a_copy() -> None:
    cache = SlabCache(LAYERS)
    cache.append(some_rows(8))
    block, payload = cache.rows(0, 8), block_bytes(cache, 0, 8).payload
    before = bytes(payload)
    cache.crop_to(0)
    cache.append(some_rows(8, seed=9))
    assert torch.equal(block, some_rows(8))
    assert bytes(payload) == before


@pytest.mark.parametrize(("start", "stop"), [(0, 11), (-1, 3), (5, 5), (6, 4)])
def test_rows_that_are_not_held_are_an_error(start: int, stop: int) -> None:
    cache = SlabCache(LAYERS)
    cache.append(some_rows(10))
    with pytest.raises(IndexError, match="holds 10"):
        cache.rows(start, stop)


@pytest.mark.parametrize(
    "rows",
    [
        some_rows(4)[:2],
        some_rows(4)[0],
        some_rows(4)[:, :, :1],  # would be broadcast over the heads
        some_rows(4)[..., :2],
        some_rows(4, dtype=torch.float16),  # would be converted
    ],
    ids=["layers", "dims", "heads", "head_dim", "dtype"],
)
def test_rows_of_another_shape_or_type_are_refused_and_change_nothing(rows: torch.Tensor) -> None:
    cache = SlabCache(LAYERS)
    cache.append(some_rows(10))
    with pytest.raises(ValueError, match="rows"):
        cache.append(rows)
    assert torch.equal(cache.rows(0, 10), some_rows(10))


def test_appended_rows_go_to_the_targets_device() -> None:
    cache = SlabCache(LAYERS, device=torch.device("meta"))
    cache.append(some_rows(4))
    assert cache.rows(0, 4).device.type == "meta"


@pytest.mark.parametrize("num_bytes", [0, 12, 15, 20])
def test_bytes_of_the_wrong_length_are_refused(num_bytes: int) -> None:
    with pytest.raises(ValueError, match="expected 16"):
        from_bytes("float32", (2, 2), bytes(num_bytes))


def test_types_that_are_not_stored_are_refused() -> None:
    with pytest.raises(ValueError, match="int64"):
        to_bytes(torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="expected one of"):
        from_bytes("float64", (1,), bytes(8))


@pytest.mark.parametrize("kept", [1, 7, 8, 9, 30, 39])
def test_after_a_crop_the_next_logits_are_those_of_a_fresh_prefill(target: Target, kept: int) -> None:
    """Also past the sliding window, where a cache that had dropped its oldest rows could not go back."""
    ids, others = random_ids(40, target.vocab_size), random_ids(6, target.vocab_size, seed=1)
    cache = target.new_cache()
    target.forward(ids, cache)
    cache.crop_to(kept)
    cropped = target.forward(others, cache, num_logits=6, num_features=6)
    fresh = target.forward(ids[:kept] + others, target.new_cache(), num_logits=6, num_features=6)
    assert (cropped.logits - fresh.logits).abs().max() <= 1e-4
    assert (cropped.features - fresh.features).abs().max() <= 1e-4


def test_rows_put_into_another_cache_give_the_same_logits(target: Target) -> None:
    ids = random_ids(40, target.vocab_size)
    cache, restored = target.new_cache(), target.new_cache()
    target.forward(ids, cache)
    restored.append(cache.rows(0, 20))
    restored.append(cache.rows(20, 39))
    cache.crop_to(39)
    assert torch.equal(target.forward(ids[39:], restored).logits, target.forward(ids[39:], cache).logits)


def test_a_states_ids_survive_growth_and_rewinding() -> None:
    state = TargetState(SlabCache(1))
    ids = random_ids(1000, 2**31 - 1)
    for start in range(0, 1000, 37):
        state.append(ids[start : start + 37])
    assert state.ids.tolist() == ids
    state.rewind(300)
    state.append(np.array([5, 6], dtype=np.int32))
    assert state.ids.tolist() == [*ids[:300], 5, 6]
    state.rewind(10**6)
    assert len(state.ids) == 302


def test_rewinding_forgets_the_pivot_just_when_its_row_goes(llama: Target) -> None:
    state = TargetState(llama.new_cache())
    state.append([1, 2, 3, 4])
    state.pivot = llama.forward([1, 2, 3], state.cache).features[-1]
    state.rewind(3)
    assert state.pivot is not None
    state.rewind(2)
    assert state.pivot is None
    assert state.num_rows == 2


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [([], [1], 0), ([1, 2], [1, 2, 3], 2), ([1, 2, 3], [1, 9, 3], 1), ([4], [4], 1), ([5], [6], 0)],
)
def test_common_prefix_counts_leading_equal_ids(left: list[int], right: list[int], expected: int) -> None:
    arrays = [np.array(ids, dtype=np.int32) for ids in (left, right)]
    assert common_prefix(*arrays) == expected
    assert common_prefix(*reversed(arrays)) == expected

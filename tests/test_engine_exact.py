"""With exact=True, and int8, a row's logits are the same bits alone, in a verify pass and beside other sessions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dlite_agent.drafters.lookup import LookupDrafter
from dlite_agent.drafters.null import NullDrafter
from dlite_agent.drafters.protocol import Drafter
from dlite_agent.engine.attention import ROWWISE_MAX_ROWS
from dlite_agent.engine.cache import SlabCache
from dlite_agent.engine.decode import decode
from dlite_agent.engine.families import RECURRENT_FAMILIES, SLAB_FAMILIES
from dlite_agent.engine.linear import SmallRowLinear
from dlite_agent.engine.packed import Segment
from dlite_agent.engine.products import MAX_ROWS, METHODS, RowTable, Way
from dlite_agent.engine.request import Request
from dlite_agent.engine.rowwise import RowMode, RowwiseActivation
from dlite_agent.engine.sampling import SamplingParams
from dlite_agent.engine.state import TargetState
from dlite_agent.engine.target import Target, TargetOutput, fingerprint_of
from dlite_agent.errors import UnsupportedModelError
from dlite_agent.testing import ScriptedDrafter, tiny_target, write_tiny_chat_model

NUM_PROMPT = 40  # more rows than a decode pass has
NUM_ROWS = ROWWISE_MAX_ROWS


@pytest.fixture(scope="module", params=SLAB_FAMILIES)
def exact(request: pytest.FixtureRequest) -> Target:
    return tiny_target(request.param, exact=True)


@pytest.fixture(scope="module", params=[(f, q) for f in SLAB_FAMILIES for q in (None, "int8")], ids=str)
def target(request: pytest.FixtureRequest) -> Target:
    family, quantize = request.param
    return tiny_target(family, quantize=quantize, exact=quantize is None)


def text_of(target: Target, seed: int, num_rows: int = NUM_PROMPT + NUM_ROWS) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(0, target.vocab_size, size=num_rows).tolist()
    return ids


def prefilled(target: Target, ids: Sequence[int], num_prompt: int = NUM_PROMPT) -> SlabCache:
    cache = target.new_cache()
    target.forward(ids[:num_prompt], cache)
    return cache


def plainly(target: Target, ids: Sequence[int], cache: SlabCache) -> TargetOutput:
    """One row after the other."""
    outputs = [target.forward([token], cache) for token in ids]
    return TargetOutput(torch.cat([o.logits for o in outputs]), torch.cat([o.features for o in outputs]))


def assert_same_bits(got: TargetOutput, expected: TargetOutput) -> None:
    assert torch.equal(got.logits, expected.logits)
    assert torch.equal(got.features, expected.features)


def test_verify_passes_of_every_length_at_every_place_give_the_bits_of_plain_passes(target: Target) -> None:
    ids = text_of(target, 0)
    cache = prefilled(target, ids)
    plain = plainly(target, ids[NUM_PROMPT:], cache)
    rows = cache.rows(0, len(ids))
    for num_rows in (*range(1, 17), NUM_ROWS):
        for start in range(0, NUM_ROWS - num_rows + 1, 11):
            cache.crop_to(NUM_PROMPT + start)
            draft = ids[NUM_PROMPT + start :][:num_rows]
            got = target.forward(draft, cache, num_logits=num_rows, num_features=num_rows)
            chosen = slice(start, start + num_rows)
            assert_same_bits(got, TargetOutput(plain.logits[chosen], plain.features[chosen]))
            if start + num_rows == NUM_ROWS:
                assert torch.equal(cache.rows(0, len(ids)), rows)
            else:
                target.forward(ids[NUM_PROMPT + start + num_rows :], cache)


@pytest.mark.parametrize("sizes", [(1, 1), (1, 5, 2), (8,) * 8, (9,) * 9, (32, 32, 32), (3, 32, 1, 16)], ids=str)
def test_packed_passes_give_each_session_the_bits_it_gets_alone(target: Target, sizes: tuple[int, ...]) -> None:
    starts = [NUM_PROMPT + 3 * session for session in range(len(sizes))]
    texts = [text_of(target, start, start + n) for start, n in zip(starts, sizes, strict=True)]
    alone, segments = [], []
    for ids, start, n in zip(texts, starts, sizes, strict=True):
        alone.append(plainly(target, ids[start:], prefilled(target, ids, start)))
        segments.append(Segment(ids[start:], prefilled(target, ids, start), n, n))
    for got, expected in zip(target.forward_many(segments), alone, strict=True):
        assert_same_bits(got, expected)


def test_a_pass_behind_a_prefill_is_as_exact_as_one_before(target: Target) -> None:
    """What kind of pass is under way must not outlast it."""
    ids, other = text_of(target, 1), text_of(target, 2)
    cache = prefilled(target, ids)
    plain = plainly(target, ids[NUM_PROMPT:][:7], cache)
    cache.crop_to(NUM_PROMPT)
    prefilled(target, other)
    assert_same_bits(target.forward(ids[NUM_PROMPT:][:7], cache, num_logits=7, num_features=7), plain)


@pytest.mark.parametrize(
    "sampling", [SamplingParams(), SamplingParams(0.8, top_p=0.9, seed=3)], ids=["greedy", "drawn"]
)
def test_speculative_text_and_state_are_the_plain_ones_to_the_last_bit(exact: Target, sampling: SamplingParams) -> None:
    prompt = [5, 6, 7, 8] * 12

    def run(drafter: Drafter) -> tuple[list[int], torch.Tensor]:
        state = TargetState(exact.new_cache())
        steps = decode(exact, state, drafter, Request(prompt, sampling=sampling, max_new_tokens=24))
        tokens = [token for step in steps for token in step.tokens]
        return tokens, state.cache.rows(0, len(prompt) + 20)

    plain, plain_rows = run(NullDrafter())
    some_wrong = [(token + 1) % 160 if i % 5 == 4 else token for i, token in enumerate(plain)]
    for drafter in (LookupDrafter(min_match=1), ScriptedDrafter(some_wrong, start=len(prompt))):
        tokens, rows = run(drafter)
        assert tokens == plain
        assert torch.equal(rows, plain_rows)


def test_products_that_depend_on_the_number_of_rows_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks above fail for a target whose products are exact at each row count but not between them."""

    def by_count(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, weight) * (1 + 2**-20 * x.shape[0])

    target = tiny_target(exact=True)
    monkeypatch.setitem(METHODS, "rows", by_count)
    ways = tuple(Way("rows", 1 if n == 1 else MAX_ROWS, 1.0) for n in range(1, MAX_ROWS + 1))
    for parent in list(target.model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, SmallRowLinear):
                table = RowTable(child.table.shape, ways)
                setattr(parent, name, SmallRowLinear(child.stock(), table, child.mode))
    with pytest.raises(AssertionError):
        test_verify_passes_of_every_length_at_every_place_give_the_bits_of_plain_passes(target)
    with pytest.raises(AssertionError):
        test_packed_passes_give_each_session_the_bits_it_gets_alone(target, (1, 5, 2))


@pytest.mark.parametrize("num_rows", [1, 2, 3, 7, 33, 80])
def test_activations_go_row_by_row_only_where_it_matters(num_rows: int) -> None:
    mode = RowMode()
    activation = RowwiseActivation(nn.SiLU(), mode)
    x = torch.randn(1, num_rows, 13, generator=torch.Generator().manual_seed(num_rows))
    together = activation(x)
    for row in range(num_rows):
        assert torch.equal(together[:, [row]], activation(x[:, [row]]))
    mode.is_rowwise = False
    assert torch.equal(activation(x), nn.functional.silu(x))


def test_the_kind_of_a_pass_is_known_while_it_runs(exact: Target) -> None:
    seen: list[bool] = []
    activation = next(m for m in exact.model.modules() if isinstance(m, RowwiseActivation))
    handle = activation.register_forward_hook(lambda *_: seen.append(activation.mode.is_rowwise))
    try:
        for num_rows in (1, NUM_ROWS, NUM_ROWS + 1):
            exact.forward(text_of(exact, 0, num_rows), exact.new_cache())
        caches = [exact.new_cache() for _ in range(3)]
        exact.forward_many([Segment(text_of(exact, 0, NUM_ROWS), cache) for cache in caches])
        exact.forward_many([Segment(text_of(exact, 0, 1 + NUM_ROWS * i), cache) for i, cache in enumerate(caches[:2])])
    finally:
        handle.remove()
    assert seen == [True, True, False, True, False]


@pytest.mark.parametrize("options", [{"exact": True}, {"quantize": "int8"}], ids=str)
def test_sixteen_bits_are_refused_where_rows_must_keep_their_bits(options: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match="float32"):
        tiny_target("llama", dtype=torch.bfloat16, **options)


@pytest.mark.parametrize("family", RECURRENT_FAMILIES)
def test_a_family_whose_state_sums_up_its_rows_is_refused(family: str) -> None:
    with pytest.raises(UnsupportedModelError, match=family):
        tiny_target(family, exact=True)


def test_an_exact_target_is_another_target(tmp_path: Path) -> None:
    write_tiny_chat_model(tmp_path)
    plain, exact = Target.load(tmp_path), Target.load(tmp_path, exact=True)
    assert plain.fingerprint != exact.fingerprint
    assert (plain.is_exact, exact.is_exact) == (False, True)
    assert exact.fingerprint == fingerprint_of(tmp_path, exact.config, dtype=torch.float32, exact=True)
    int8 = [Target.load(tmp_path, quantize="int8", exact=chosen) for chosen in (False, True)]
    assert int8[0].fingerprint == int8[1].fingerprint not in {plain.fingerprint, exact.fingerprint}
    assert all(target.is_exact for target in int8)

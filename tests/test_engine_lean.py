"""Lean layers compute what transformers' do, bear its names, and stand only where that was shown."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from dlite_agent.engine.families import SLAB_FAMILIES
from dlite_agent.engine.lean import FAMILIES, LeanLayer
from dlite_agent.testing import tiny_target


def stock_of(family: str, **overrides: Any) -> Any:
    """The model that `tiny_target` makes, before a target takes it over."""
    taken: list[Any] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("dlite_agent.testing.Target", lambda model, **options: taken.append(copy.deepcopy(model)))
        tiny_target(family, **overrides)
    return taken[0]


def layers_of(model: Any) -> list[Any]:
    return list(model.get_decoder().layers)


@pytest.mark.parametrize("quantize", [None, "int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_known_families_have_lean_layers_with_the_names_that_were_there(family: str, quantize: Any) -> None:
    target = tiny_target(family, quantize=quantize)
    assert all(type(layer) is LeanLayer for layer in layers_of(target.model))
    if quantize is None:
        assert list(target.model.state_dict()) == list(stock_of(family).state_dict())


@pytest.mark.parametrize("family", sorted(set(SLAB_FAMILIES).difference(FAMILIES)))
def test_other_families_keep_their_layers(family: str) -> None:
    assert not any(isinstance(layer, LeanLayer) for layer in layers_of(tiny_target(family).model))


@pytest.mark.parametrize("family", FAMILIES)
def test_sixteen_bits_keep_their_layers(family: str) -> None:
    target = tiny_target(family, dtype=torch.bfloat16)
    assert not any(isinstance(layer, LeanLayer) for layer in layers_of(target.model))


@pytest.mark.parametrize("options", [{}, {"exact": True}], ids=str)
@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"attention_bias": True},
        {"head_dim": 8},
        {"num_key_value_heads": 1},
        {"sliding_window": 8},  # a stray key where the family does not read it
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0}},
    ],
    ids=str,
)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_row_s_logits_are_those_of_the_unmodified_model(
    family: str, overrides: dict[str, Any], options: dict[str, Any]
) -> None:
    target = tiny_target(family, **overrides, **options)
    ids = torch.randint(target.vocab_size, (1, 60), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = stock_of(family, **overrides)(input_ids=ids).logits[0]
    cache = target.new_cache()
    for part in torch.split(ids[0], [40, 1, 1, 5, 13]):
        stop = cache.num_rows + len(part)
        got = target.forward(part.tolist(), cache, num_logits=len(part)).logits
        assert (got - expected[stop - len(part) : stop]).abs().max() <= 1e-4

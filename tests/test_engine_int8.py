"""Int8 products are exact, a row's bits do not depend on its neighbours, and so speculation is exact there too."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from dlite_agent.drafters.dlite import DLiteDrafter
from dlite_agent.drafters.lookup import LookupDrafter
from dlite_agent.drafters.null import NullDrafter
from dlite_agent.drafters.protocol import Drafter
from dlite_agent.engine.attention import ROWWISE_MAX_ROWS
from dlite_agent.engine.decode import MAX_DRAFT, Request, decode
from dlite_agent.engine.int8 import Int8Linear, RowwiseActivation, quantize_rows
from dlite_agent.engine.sampling import SamplingParams
from dlite_agent.engine.state import TargetState
from dlite_agent.engine.target import FAMILIES, Target
from dlite_agent.errors import UnsupportedModelError
from dlite_agent.testing import ScriptedDrafter, TargetDrafter, random_dlite, tiny_target


@pytest.fixture(scope="module", params=FAMILIES)
def quantized(request: pytest.FixtureRequest) -> Target:
    """Widths that are no multiples of a vector register, where row counts would show first."""
    return tiny_target(request.param, quantize="int8")


def random_linear(in_features: int, out_features: int, *, bias: bool) -> nn.Linear:
    generator = torch.Generator().manual_seed(in_features)
    linear = nn.Linear(in_features, out_features, bias=bias).requires_grad_(False)
    for parameter in linear.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return linear


def quantized_by_hand(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    largest = np.abs(x).max(axis=1, keepdims=True)
    largest[largest == 0] = 1
    return np.rint(x * (np.float32(127) / largest)).astype(np.int64), largest / np.float32(127)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("in_features", "out_features"), [(32, 48), (33, 7), (256, 64), (1000, 3)])
def test_a_quantized_linear_is_the_integer_reference(in_features: int, out_features: int, bias: bool) -> None:
    linear = random_linear(in_features, out_features, bias=bias)
    x = torch.randn(5, in_features, generator=torch.Generator().manual_seed(1)) * 3
    coarse, coarse_scale = quantized_by_hand(x.numpy())
    fine, fine_scale = quantized_by_hand(x.numpy() - coarse.astype(np.float32) * coarse_scale)
    weight, scale = quantized_by_hand(linear.weight.numpy())
    sums = [(rows @ weight.T).astype(np.float32) for rows in (coarse, fine)]
    expected = (sums[0] * coarse_scale + sums[1] * fine_scale) * scale.T
    if bias:
        expected = expected + linear.bias.numpy()
    got = Int8Linear(linear)(x)
    assert torch.equal(got, torch.from_numpy(expected))
    assert (got - linear(x)).norm() < 0.02 * linear(x).norm()


def test_an_outlier_in_a_row_does_not_drown_its_other_elements() -> None:
    linear = random_linear(64, 32, bias=False)
    weight = (Int8Linear(linear).weight.float() * Int8Linear(linear).scale[:, None]).T
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(4))
    x[:, 7] = 500.0
    exact = x @ weight
    assert (Int8Linear(linear)(x) - exact).norm() < 1e-3 * (x[:, :7] @ weight[:7]).norm() + 1e-4 * exact.norm()


def test_quantized_rows_are_within_half_a_step_and_zeros_stay_zeros() -> None:
    x = torch.randn(6, 50, generator=torch.Generator().manual_seed(2))
    x[3] = 0
    rows, scale = quantize_rows(x)
    assert rows.dtype == torch.int8
    assert (rows.float() * scale - x).abs().max() <= 0.5001 * float(scale.max())
    assert rows.abs().amax(dim=1).tolist() == [127, 127, 127, 0, 127, 127]


@pytest.mark.parametrize("num_rows", [2, 3, 5, 8, 17, ROWWISE_MAX_ROWS])
def test_linears_and_activations_give_each_row_the_bits_it_gets_alone(num_rows: int) -> None:
    x = torch.randn(1, num_rows, 33, generator=torch.Generator().manual_seed(3))
    for module in (Int8Linear(random_linear(33, 21, bias=True)), RowwiseActivation(nn.SiLU())):
        together = module(x)
        for row in range(num_rows):
            assert torch.equal(together[:, row], module(x[:, [row]])[:, 0])


@pytest.mark.parametrize("num_rows", [2, 3, 8, MAX_DRAFT + 1])
def test_a_verify_pass_gives_the_very_bits_of_plain_passes(quantized: Target, num_rows: int) -> None:
    ids = np.random.default_rng(0).integers(0, quantized.vocab_size, size=20 + num_rows).tolist()
    plain_cache, cache = quantized.new_cache(), quantized.new_cache()
    for chosen in (plain_cache, cache):
        quantized.forward(ids[:20], chosen)
    plain = [quantized.forward([token], plain_cache) for token in ids[20:]]
    together = quantized.forward(ids[20:], cache, num_logits=num_rows, num_features=num_rows)
    assert torch.equal(together.logits, torch.cat([output.logits for output in plain]))
    assert torch.equal(together.features, torch.cat([output.features for output in plain]))
    assert torch.equal(cache.rows(0, len(ids)), plain_cache.rows(0, len(ids)))


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(0.8, top_p=0.9, seed=3)], ids=str)
def test_speculative_text_is_the_plain_text(quantized: Target, sampling: SamplingParams) -> None:
    prompt = [5, 6, 7, 8] * 5

    def text(drafter: Drafter) -> list[int]:
        request = Request(prompt, sampling=sampling, max_new_tokens=20)
        steps = decode(quantized, TargetState(quantized.new_cache()), drafter, request)
        return [token for step in steps for token in step.tokens]

    plain = text(NullDrafter())
    some_wrong = [(token + 1) % 160 if i % 5 == 4 else token for i, token in enumerate(plain)]
    for drafter in (
        LookupDrafter(min_match=1),
        DLiteDrafter(random_dlite(quantized), quantized.embedding),
        ScriptedDrafter(some_wrong, start=len(prompt)),
        TargetDrafter(quantized, sampling),
    ):
        assert text(drafter) == plain


def test_a_quantized_target_is_another_target() -> None:
    assert tiny_target(quantize="int8").fingerprint != tiny_target().fingerprint
    assert not any(isinstance(module, nn.Linear) for module in tiny_target(quantize="int8").model.modules())


def test_a_machine_whose_products_saturate_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def saturating(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """Make the left operand unsigned and sum neighbouring products in int16, as vpmaddubsw does."""
        products = (left.long() + 128).unsqueeze(2) * right.long().unsqueeze(0)  # [rows, in, out]
        pairs = products.view(left.shape[0], -1, 2, right.shape[1]).sum(dim=2).clamp(-(2**15), 2**15 - 1)
        return (pairs.sum(dim=1) - 128 * right.long().sum(dim=0)).int()

    monkeypatch.setattr(torch.ops.aten, "_int_mm", saturating)
    with pytest.raises(UnsupportedModelError, match="saturate"):
        tiny_target(quantize="int8")

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
from dlite_agent.engine import int8
from dlite_agent.engine.attention import ROWWISE_MAX_ROWS
from dlite_agent.engine.decode import decode
from dlite_agent.engine.families import SLAB_FAMILIES
from dlite_agent.engine.int8 import (
    Int8Linear,
    Int8Share,
    PackedProduct,
    PlainProduct,
    Product,
    SharedProduct,
    exact_product,
    quantize,
    quantize_channels,
    quantize_rows,
)
from dlite_agent.engine.request import MAX_DRAFT, Request
from dlite_agent.engine.rowwise import RowMode, RowwiseActivation
from dlite_agent.engine.sampling import SamplingParams
from dlite_agent.engine.state import TargetState
from dlite_agent.engine.target import Target
from dlite_agent.errors import UnsupportedModelError
from dlite_agent.testing import ScriptedDrafter, TargetDrafter, random_dlite, tiny_target


@pytest.fixture(scope="module", params=SLAB_FAMILIES)
def quantized(request: pytest.FixtureRequest) -> Target:
    """Widths that are no multiples of a vector register, where row counts would show first."""
    return tiny_target(request.param, quantize="int8")


def random_linear(in_features: int, out_features: int, *, bias: bool) -> nn.Linear:
    generator = torch.Generator().manual_seed(in_features)
    linear = nn.Linear(in_features, out_features, bias=bias).requires_grad_(False)
    for parameter in linear.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return linear


def channels_by_hand(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    largest = np.abs(weight).max(axis=1, keepdims=True)
    return np.rint(weight * (np.float32(127) / largest)).astype(np.int64), largest / np.float32(127)


def rows_by_hand(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return coarse and fine parts and largest elements: a row is `largest / 32639 * (256 * coarse + fine)`."""
    largest = np.abs(x).max(axis=1, keepdims=True)
    whole = np.floor(np.float32(32639) * x / largest + np.float32(256 * 128 + 128.5)).astype(np.int64)
    return whole // 256 - 128, whole % 256 - 128, largest


def exact_products() -> list[type[Product]]:
    return [exact_product()] if exact_product() is PlainProduct else [PackedProduct, PlainProduct]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("in_features", "out_features"), [(32, 48), (33, 7), (256, 64), (1000, 3)])
@pytest.mark.parametrize("num_rows", [1, 5])
@pytest.mark.parametrize("product", exact_products())
def test_a_quantized_linear_is_the_integer_reference(
    product: type[Product], num_rows: int, in_features: int, out_features: int, bias: bool
) -> None:
    linear = random_linear(in_features, out_features, bias=bias)
    x = torch.randn(num_rows, in_features, generator=torch.Generator().manual_seed(1)) * 3
    coarse, fine, largest = rows_by_hand(x.numpy())
    weight, scale = channels_by_hand(linear.weight.numpy())
    sums = [(rows @ weight.T).astype(np.float32) * (scale.T / np.float32(32639)) for rows in (coarse, fine)]
    expected = (sums[0] * np.float32(256) + sums[1]) * largest
    if bias:
        expected = expected + linear.bias.numpy()
    got = Int8Linear(linear, product=product)(x)
    assert torch.equal(got, torch.from_numpy(expected))
    assert (got - linear(x)).norm() < 0.05 * linear(x).norm()


def test_an_outlier_in_a_row_does_not_drown_its_other_elements() -> None:
    linear = random_linear(64, 32, bias=False)
    rows, scale = quantize_channels(linear.weight)
    weight = (rows * scale[:, None]).T
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(4))
    x[:, 7] = 500.0
    exact = x @ weight
    assert (Int8Linear(linear)(x) - exact).norm() < 1e-3 * (x[:, :7] @ weight[:7]).norm() + 1e-4 * exact.norm()


def test_quantized_rows_are_within_half_a_step_and_zeros_stay_zeros() -> None:
    x = torch.randn(6, 50, generator=torch.Generator().manual_seed(2))
    x[3] = 0
    x[4] *= 1e6
    parts, scale = quantize_rows(x)
    assert parts.dtype == torch.uint8
    fine, coarse = (parts.double() - 128).chunk(2)
    step = scale.double() / 32639
    assert ((256 * coarse + fine) * step - x).abs().div(step).max() <= 0.51
    assert torch.equal(scale[:3], x[:3].abs().amax(dim=1, keepdim=True))
    largest = (256 * coarse + fine).abs().amax(dim=1)
    assert largest.tolist() == [127 * 256 + 127] * 3 + [0] + [127 * 256 + 127] * 2
    assert not coarse[3].any()
    assert not fine[3].any()


def test_quantized_channels_are_within_half_a_step_and_zeros_stay_zeros() -> None:
    weight = torch.randn(6, 50, generator=torch.Generator().manual_seed(2))
    weight[3] = 0
    rows, scale = quantize_channels(weight)
    assert rows.dtype == torch.int8
    assert (rows * scale[:, None] - weight).abs().max() <= 0.5001 * float(scale.max())
    assert rows.abs().amax(dim=1).tolist() == [127, 127, 127, 0, 127, 127]


def test_linears_multiplied_together_give_the_very_bits_of_each() -> None:
    linears = [random_linear(33, n, bias=n != 21) for n in (21, 8, 5)]
    shared = SharedProduct(Int8Linear(*linears), [linear.out_features for linear in linears])
    shares = [Int8Share(shared, index) for index in range(3)]
    x, other = torch.randn(2, 1, 4, 33, generator=torch.Generator().manual_seed(3))

    def check(index: int, given: torch.Tensor) -> None:
        assert torch.equal(shares[index](given), Int8Linear(linears[index])(given))

    for order in ([0, 1, 2], [2, 0, 1], [1, 1, 1, 0, 0]):
        for index in order:
            check(index, x)
    for index, given in ((0, x), (1, other), (1, x), (2, x), (0, other), (2, other)):
        check(index, given)


def test_a_shared_product_multiplies_once_and_keeps_nothing() -> None:
    product = Int8Linear(random_linear(33, 21, bias=True), random_linear(33, 8, bias=False))
    calls: list[torch.Tensor] = []
    product.register_forward_hook(lambda module, inputs, output: calls.append(inputs[0]))
    shared = SharedProduct(product, [21, 8])
    for _ in range(2):
        x = torch.randn(1, 3, 33)
        shares = [shared.take(index, x) for index in (0, 1)]
        assert [share.shape for share in shares] == [(1, 3, 21), (1, 3, 8)]
        assert shared._x is None
    assert len(calls) == 2


def test_a_target_multiplies_queries_keys_and_values_at_once() -> None:
    target = tiny_target(quantize="int8")
    products = [module for module in target.model.modules() if isinstance(module, Int8Linear)]
    assert len(products) == 4 * target.num_layers + 1
    calls: list[nn.Module] = []
    for product in products:
        product.register_forward_hook(lambda module, *_: calls.append(module))
    target.forward([1, 2, 3], target.new_cache())
    assert sorted(map(id, calls)) == sorted(map(id, products))


def test_a_model_on_another_device_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="meta"):
        quantize(nn.Sequential(nn.Linear(3, 4, device="meta")))


@pytest.mark.parametrize("num_rows", [2, 3, 5, 8, 17, ROWWISE_MAX_ROWS])
def test_linears_and_activations_give_each_row_the_bits_it_gets_alone(num_rows: int) -> None:
    x = torch.randn(1, num_rows, 33, generator=torch.Generator().manual_seed(3))
    for module in (Int8Linear(random_linear(33, 21, bias=True)), RowwiseActivation(nn.SiLU(), RowMode())):
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


class SaturatingProduct(PlainProduct):
    """Sums neighbouring products in int16, as vpmaddubsw does."""

    def __call__(self, parts: torch.Tensor) -> torch.Tensor:
        products = parts.long().unsqueeze(1) * self._weight.long()  # [rows, out, in]
        pairs = products.view(*products.shape[:2], -1, 2).sum(dim=-1).clamp(-(2**15), 2**15 - 1)
        return (pairs.sum(dim=-1) - 128 * self._weight.long().sum(dim=1)).float()


class MissingProduct(PlainProduct):
    """Of a build of torch without it."""

    def __call__(self, parts: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such kernel")


def test_a_product_that_saturates_or_is_missing_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8, "PRODUCTS", (MissingProduct, SaturatingProduct, PlainProduct))
    target = tiny_target(quantize="int8")
    assert {type(m.product) for m in target.model.modules() if isinstance(m, Int8Linear)} == {PlainProduct}


def test_a_machine_whose_products_saturate_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8, "PRODUCTS", (SaturatingProduct,))
    with pytest.raises(UnsupportedModelError, match="saturate"):
        tiny_target(quantize="int8")

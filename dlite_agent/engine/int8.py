"""Int8 weights, activations in two int8 parts, and exact integer accumulation.

Weights are quantized per output channel, symmetrically. Activations have outliers that one int8 scale per row would
pay for with all other elements, so each element becomes a whole number of 16 bits, and a row two rows of 8 bits,
`256 * coarse + fine`. For the few rows of a verify pass the second costs next to nothing. Products are summed as
int32, so a row's result does not depend on how many rows are multiplied with it. What lies between the products is
kept row by row too (`attention.rowwise_attention`, `rowwise.RowwiseActivation`): the last bit of a float can move a
whole integer step, and so a verify pass has to give the very bits of a plain one. The quantized model is a target of
its own (its own fingerprint); speculation is lossless with respect to it.

Linears of one input (queries, keys and values; gate and up) are multiplied at once: the work around a product of one
row takes as long as the smaller products themselves.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from dlite_agent.errors import UnsupportedModelError

VERSION = "int8-2"  # names the arithmetic in fingerprints: another one gives other bits

_LIMIT = 127
_ZERO = 128  # what stands for zero in a part
_PART = 256  # a power of two: multiplying by it is exact, fused with an addition or not
_LEVELS = _LIMIT * _PART + _LIMIT
_MIDDLE = torch.tensor(_PART * _ZERO + _ZERO + 0.5)  # zero, and what makes cutting off a rounding
_LEAST = 1e-30  # stands in for the largest element of a row of zeros
_FUSED_NAMES = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class Product(Protocol):
    """int8 weights multiplied by uint8 rows that are 128 too large; exact up to the last step, `scale * float(sum)`.

    Attributes:
        planes_of_one: Planes that make the product of one row fastest, 2 or more.
    """

    planes_of_one: int

    def __init__(self, weight: torch.Tensor, scale: torch.Tensor) -> None:
        """Take int8 weights `[out, in]` and the scale `[out]` of each channel."""
        ...

    def __call__(self, parts: torch.Tensor) -> torch.Tensor:
        """Multiply `parts [rows, in]`; returns float32 `[rows, out]`."""
        ...


class PackedProduct:
    """oneDNN's product on weights in its own layout."""

    planes_of_one = 4  # two rows take longer than four

    def __init__(self, weight: torch.Tensor, scale: torch.Tensor) -> None:
        self._weight = torch.ops.onednn.qlinear_prepack(weight.contiguous(), None)
        self._scale = scale
        self._zeros = torch.zeros(len(scale), dtype=torch.int64)

    def __call__(self, parts: torch.Tensor) -> torch.Tensor:
        """Multiply."""
        weights = (self._weight, self._scale, self._zeros)
        no_change: tuple[Any, ...] = (None, 1.0, 0, torch.float32, "none", [], "")
        y: torch.Tensor = torch.ops.onednn.qlinear_pointwise(parts, 1.0, _ZERO, *weights, *no_change)
        return y


class PlainProduct:
    """torch's product, for machines on which oneDNN's is missing or saturates."""

    planes_of_one = 2

    def __init__(self, weight: torch.Tensor, scale: torch.Tensor) -> None:
        self._weight = weight
        self._scale = scale

    def __call__(self, parts: torch.Tensor) -> torch.Tensor:
        """Multiply."""
        signed = parts.bitwise_xor(_ZERO).view(torch.int8)
        sums: torch.Tensor = torch.ops.aten._int_mm(signed, self._weight.t())
        return sums.float().mul_(self._scale)


PRODUCTS: tuple[type[Product], ...] = (PackedProduct, PlainProduct)  # the first that is exact here is used


class Int8Linear(nn.Module):
    """Linears of one input as one product: int8 weights, a float32 scale per output channel."""

    bias: torch.Tensor | None

    def __init__(self, *linears: nn.Linear, product: type[Product] = PlainProduct) -> None:
        super().__init__()
        self.in_features = linears[0].in_features
        self.out_features = sum(linear.out_features for linear in linears)
        self.out_dtype = linears[0].weight.dtype
        quantized = [quantize_channels(linear.weight.detach().float()) for linear in linears]
        scales = torch.cat([scale for _, scale in quantized])
        self.product = product(torch.cat([rows for rows, _ in quantized]), scales / _LEVELS)
        has_bias = any(linear.bias is not None for linear in linears)
        self.register_buffer("bias", torch.cat([_bias_of(linear) for linear in linears]) if has_bias else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply to `x [..., in]`."""
        rows = x.reshape(-1, self.in_features).float()
        n = rows.shape[0]
        parts, largest = quantize_rows(rows, num_planes=self.product.planes_of_one if n == 1 else 2)
        sums = self.product(parts)
        y = torch.add(sums[:n], sums[n : 2 * n], alpha=_PART).mul_(largest)
        if self.bias is not None:
            y.add_(self.bias)
        return y.to(self.out_dtype).view(*x.shape[:-1], self.out_features)


class SharedProduct:
    """One product whose columns belong to several modules that are given the same tensor, one after the other.

    The first of them multiplies for all; each takes its share of what is there. Nothing depends on their order: a
    module that is given another tensor multiplies anew.
    """

    def __init__(self, product: Int8Linear, sizes: Sequence[int]) -> None:
        self.product = product
        self._sizes = list(sizes)
        self._x: torch.Tensor | None = None
        self._shares: list[torch.Tensor | None] = []

    def take(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """Return the share `[..., sizes[index]]` of the product with `x [..., in]`."""
        if x is not self._x or self._shares[index] is None:
            self._x, self._shares = x, list(torch.split_with_sizes(self.product(x), self._sizes, dim=-1))
        share = self._shares[index]
        assert share is not None
        self._shares[index] = None
        if not any(kept is not None for kept in self._shares):
            self._x = None  # so that no pass outlives itself here
        return share


class Int8Share(nn.Module):
    """Stands where a linear was whose product is multiplied with others."""

    def __init__(self, shared: SharedProduct, index: int) -> None:
        super().__init__()
        self.product = shared.product
        self._shared = shared
        self._index = index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply to `x [..., in]`."""
        return self._shared.take(self._index, x)


def _bias_of(linear: nn.Linear) -> torch.Tensor:
    bias: torch.Tensor | None = linear.bias
    return torch.zeros(linear.out_features) if bias is None else bias.float()


def quantize_channels(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8 rows and their float32 scales `[out]` of weights `[out, in]`; a row of zeros has scale 1/127."""
    largest = weight.abs().amax(dim=1, keepdim=True)
    largest = torch.where(largest == 0, torch.ones_like(largest), largest)
    rows = (weight * (_LIMIT / largest)).round_().to(torch.int8)
    return rows, (largest / _LIMIT).squeeze(1)


def quantize_rows(x: torch.Tensor, *, num_planes: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """Return uint8 parts `[planes * n, width]` of float32 `x [n, width]` and each row's largest element `[n, 1]`.

    The first plane is fine, the second coarse, up to two more are zeros. Less 128 each, a row's parts say
    `largest / 32639 * (256 * parts[n + row] + parts[row])`, within half a step of 1/32,639 of the largest.
    """
    largest = x.abs().amax(dim=1, keepdim=True).clamp_min_(_LEAST)
    whole = torch.addcdiv(_MIDDLE, x, largest, value=_LEVELS).to(torch.int32)
    planes = whole.view(torch.uint8).view(*x.shape, 4).permute(2, 0, 1)  # bytes, the lowest first
    return planes[:num_planes].reshape(-1, x.shape[1]), largest


def quantize(model: nn.Module) -> None:
    """Replace every `nn.Linear` of a model on the CPU by int8 products, block by block.

    Raises:
        UnsupportedModelError: If the model is on another device, or this machine's integer products saturate.
    """
    for parameter in model.parameters():
        if parameter.device.type != "cpu":
            raise UnsupportedModelError(
                f"int8 products run on a CPU, the model is on {parameter.device.type!r}; load it without quantize"
            )
    product = exact_product()
    for parent in list(model.modules()):
        for names in _groups(parent):
            linears = [getattr(parent, name) for name in names]
            whole = Int8Linear(*linears, product=product)
            shared = SharedProduct(whole, [linear.out_features for linear in linears])
            for index, name in enumerate(names):
                setattr(parent, name, whole if len(names) == 1 else Int8Share(shared, index))


def _groups(parent: nn.Module) -> Iterator[tuple[str, ...]]:
    """Name the linears of a block, those of one input together."""
    left = [name for name, child in parent.named_children() if isinstance(child, nn.Linear)]
    for names in _FUSED_NAMES:
        if set(names) <= set(left):
            left = [name for name in left if name not in names]
            yield names
    yield from ((name,) for name in left)


def exact_product() -> type[Product]:
    """Return the kind of product to use on this machine.

    Raises:
        UnsupportedModelError: If none sums exactly.
    """
    if sys.byteorder != "little":
        raise UnsupportedModelError("int8 weights need a little-endian machine; load the model without quantize='int8'")
    for product in PRODUCTS:
        if _is_exact(product):
            return product
    raise UnsupportedModelError("this machine's int8 products saturate; load the model without quantize='int8'")


def _is_exact(product: type[Product]) -> bool:
    """Multiply the largest values there are; some kernels sum pairs in int16 and would be silently wrong."""
    parts = torch.full((16, 256), 2 * _LIMIT + 1, dtype=torch.uint8)
    parts[1::2] = 0
    weight = torch.full((64, 256), _LIMIT, dtype=torch.int8)
    weight[::2] = -_LIMIT
    expected = ((parts.long() - _ZERO) @ weight.long().t()).float()  # below 2**24: floats hold it
    try:
        multiply = product(weight, torch.ones(64))
        return all(torch.equal(multiply(parts[:rows]), expected[:rows]) for rows in (1, 2, 4, 16))
    except (RuntimeError, AttributeError):  # not every build of torch has each
        return False

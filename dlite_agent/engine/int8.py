"""Int8 weights, activations in two int8 parts, and exact integer accumulation.

Weights are quantized per output channel, symmetrically. Activations have outliers that one int8 scale per row would
pay for with all other elements, so a row becomes two int8 rows: its rounding, and the rounding of what that left over
(about 14 bits together). For the few rows of a verify pass the second costs next to nothing. Products are summed as
int32, so a row's result does not depend on how many rows are multiplied with it. What lies between the products is
kept row by row too (`attention.rowwise_attention`, `RowwiseActivation`): the last bit of a float can move a whole
integer step, and so a verify pass has to give the very bits of a plain one. The quantized model is a target of its own
(its own fingerprint); speculation is lossless with respect to it.
"""

from __future__ import annotations

import torch
from torch import nn

from dlite_agent.engine.attention import ROWWISE_MAX_ROWS
from dlite_agent.errors import UnsupportedModelError

_LIMIT = 127


class Int8Linear(nn.Module):
    """An `nn.Linear` with int8 weights `[out, in]` and a float32 scale per output channel."""

    weight: torch.Tensor
    scale: torch.Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.out_dtype = linear.weight.dtype
        weight, scale = quantize_rows(linear.weight.detach().float())
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale.squeeze(1))
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply to `x [..., in]`."""
        wide = x.reshape(-1, self.in_features).float()
        rows, row_scale = quantize_rows(wide)
        left, left_scale = quantize_rows(wide - rows * row_scale)
        sums: torch.Tensor = torch.ops.aten._int_mm(torch.cat([rows, left]), self.weight.t())
        coarse, fine = sums.float().chunk(2)
        y = (coarse * row_scale + fine * left_scale) * self.scale
        if self.bias is not None:
            y = y + self.bias
        return y.to(self.out_dtype).view(*x.shape[:-1], self.out_features)


class RowwiseActivation(nn.Module):
    """An activation applied to a few rows one by one: kernels compute the last elements of a tensor in another way."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply to `x [batch, n, width]`."""
        if x.shape[1] > ROWWISE_MAX_ROWS:
            whole: torch.Tensor = self.activation(x)
            return whole
        return torch.cat([self.activation(x[:, row : row + 1]) for row in range(x.shape[1])], dim=1)


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8 rows and their float32 scales `[n, 1]` of `x [n, width]`; a row of zeros has scale 1/127."""
    largest = x.abs().amax(dim=1, keepdim=True)
    largest = torch.where(largest == 0, torch.ones_like(largest), largest)
    rows = (x * (_LIMIT / largest)).round_().to(torch.int8)
    return rows, largest / _LIMIT


def quantize(model: nn.Module) -> None:
    """Replace every `nn.Linear` of a model on the CPU by an `Int8Linear`, one at a time; activations go row by row.

    Raises:
        UnsupportedModelError: If this machine's integer products saturate.
    """
    _refuse_saturation()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, Int8Linear(child))
            elif name == "act_fn":
                setattr(parent, name, RowwiseActivation(child))


def _refuse_saturation() -> None:
    """Multiply the largest values there are; some kernels sum pairs in int16 and would be silently wrong."""
    rows = torch.full((4, 256), _LIMIT, dtype=torch.int8)
    columns = torch.full((64, 256), _LIMIT, dtype=torch.int8)
    columns[::2] = -_LIMIT
    expected = rows.long() @ columns.long().t()
    for count in (1, 2, 4):
        if not torch.equal(torch.ops.aten._int_mm(rows[:count], columns.t()).long(), expected[:count]):
            raise UnsupportedModelError("this machine's int8 products saturate; load the model without quantize='int8'")

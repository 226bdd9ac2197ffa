"""Linear layers for a handful of rows, each multiplied in the way that was fastest for its shape.

Verifying a draft multiplies every weight by 2..16 rows, a packed pass of several sessions by up to 64. Memory traffic
is that of one row, yet stock kernels may take several times as long. So a few methods are tried on the model's own
weights (`row_tables`), at fixed numbers of rows (others are padded, or multiplied in groups) and of threads; the
fastest wins. The table is kept per machine, so only the first load measures.

An exact table chooses among ways that give a row the same bits (`row_tables.row_bits`), so that plain decoding,
verifying and packed passes agree to the last of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from dlite_agent.engine.products import MAX_ROWS, METHODS, PACKED, RowTable, pack
from dlite_agent.engine.row_tables import tables_for
from dlite_agent.engine.rowwise import RowMode
from dlite_agent.errors import UnsupportedModelError


class SmallRowLinear(nn.Module):
    """An `nn.Linear` that multiplies up to MAX_ROWS rows in the way its table says, and more as before.

    Attributes:
        weight: The plain weight, or None if all is multiplied by the packed one.
        table: How to multiply.
        mode: In passes whose rows must have the bits that they have alone, any number of rows goes by the table; None
            if no pass needs that.
    """

    weight: torch.Tensor | None

    def __init__(
        self, linear: nn.Linear, table: RowTable, mode: RowMode | None = None, *, keeps_plain: bool = False
    ) -> None:
        """Do what a linear does.

        Args:
            linear: Left as it is.
            table: For its shape.
            mode: See above.
            keeps_plain: Keep the plain weight in any case, for others that read it.
        """
        super().__init__()
        self._packed = pack(linear.weight) if table.wants_packed else None
        self.weight = linear.weight if table.wants_plain or keeps_plain else None
        self.bias = linear.bias
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.table = table
        self.mode = mode

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply to `x [..., in]`."""
        num_rows = x.numel() // self.in_features
        rows = x.reshape(num_rows, self.in_features)
        if num_rows <= MAX_ROWS:
            y = self._few(rows)
        elif self.mode is not None and self.mode.is_rowwise:
            y = torch.cat([self._few(part) for part in torch.split(rows, MAX_ROWS)])
        else:
            y = self._many(rows)
        if self.bias is not None:
            y = y + self.bias
        return y.view(*x.shape[:-1], self.out_features)

    def stock(self) -> nn.Linear:
        """Return a linear as it was; a packed weight is unpacked, which copies it."""
        linear = nn.Linear(self.in_features, self.out_features, device="meta")
        linear.weight = nn.Parameter(self._plain(), requires_grad=False)
        linear.bias = self.bias
        return linear

    def _plain(self) -> torch.Tensor:
        if self.weight is not None:
            return self.weight
        assert self._packed is not None
        return self._packed.to_dense()

    def _few(self, rows: torch.Tensor) -> torch.Tensor:
        way = self.table.ways[len(rows) - 1]
        weight = self._packed if way.is_packed else self.weight
        assert weight is not None
        return way(rows, weight)

    def _many(self, rows: torch.Tensor) -> torch.Tensor:
        if self._packed is not None:
            return METHODS[PACKED](rows, self._packed)
        assert self.weight is not None
        return functional.linear(rows, self.weight)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Save a packed weight as the plain one it was."""
        if self.weight is None:
            destination[f"{prefix}weight"] = self._plain()
        super()._save_to_state_dict(destination, prefix, keep_vars)


def _linears(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    for parent in model.modules():
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear):
                yield parent, name, child


def calibrate(
    model: nn.Module, *, folder: Path | None = None, mode: RowMode | None = None, shared: nn.Module | None = None
) -> dict[tuple[int, int], RowTable]:
    """Replace every `nn.Linear` on the CPU by a `SmallRowLinear` with a measured table.

    Args:
        model: The target, on the CPU; other devices are left as they are (their kernels like few rows).
        folder: Where tables are kept between loads; None measures every time.
        mode: Tells passes that must be exact; their tables are, and are checked on every load. None for the fastest.
        shared: A linear whose weight others read, or None: it stays as it is beside its packed form.

    Returns:
        The table of each weight shape.

    Raises:
        UnsupportedModelError: If exact products are wanted, and this machine or device has none.
    """
    found = [entry for entry in _linears(model) if entry[2].weight.device.type == "cpu"]
    if mode is not None and len(found) < sum(1 for _ in _linears(model)):
        raise UnsupportedModelError("exact products run on a CPU; load the model there, or without exact=True")
    if not found:
        return {}
    with torch.inference_mode():
        tables = tables_for([linear.weight for _, _, linear in found], folder=folder, exact=mode is not None)
        while found:  # so that no plain weight outlives its packed form
            parent, name, linear = found.pop()
            table = tables[linear.out_features, linear.in_features]
            setattr(parent, name, SmallRowLinear(linear, table, mode, keeps_plain=linear is shared))
    return tables

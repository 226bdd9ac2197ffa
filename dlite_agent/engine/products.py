"""Ways to multiply a handful of rows by a weight, and which of them is taken for how many rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

MAX_ROWS = 64
PACKED = "packed"
_MAX_THREADS = 1024
ALIGNMENT = 64  # bytes; kernels may sum in another order where memory begins elsewhere
_PACKED_FOR = 8  # rows; oneDNN's layout is the same for any number above 1


def pack(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight `[out, in]` in oneDNN's own layout, for the method "packed".

    A product of a few rows with a plain weight spends half its time on bringing the weight into that layout.

    Raises:
        RuntimeError: If oneDNN has none for this type on this machine.
    """
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _PACKED_FOR)
    return packed


def _rows_first(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return functional.linear(x, weight)


def _columns_first(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.mm(weight, x.t()).t().contiguous()


def _onednn(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], None)
    return y


METHODS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    PACKED: _onednn,
    "onednn": _onednn,
    "columns": _columns_first,
    "rows": _rows_first,
}


@dataclass(frozen=True, slots=True)
class Way:
    """How to multiply: which method, at how many rows and threads, and what one such product cost when measured.

    Attributes:
        method: One of `METHODS`.
        num_rows: Rows of each product: missing ones are zero, more are multiplied in groups.
        milliseconds: Of one product.
        num_threads: Threads to use; 0 leaves torch's number alone, switching costs 10 us.
    """

    method: str
    num_rows: int
    milliseconds: float
    num_threads: int = 0

    def __post_init__(self) -> None:
        if self.method not in METHODS or type(self.num_rows) is not int or type(self.num_threads) is not int:
            raise ValueError(f"{self}; expected a method of {list(METHODS)}, whole rows and threads")
        if not 1 <= self.num_rows <= MAX_ROWS or not 0 <= self.num_threads <= _MAX_THREADS:
            raise ValueError(f"{self}; expected 1..{MAX_ROWS} rows and 0..{_MAX_THREADS} threads")

    @property
    def is_packed(self) -> bool:
        """Whether the weight has to be packed."""
        return self.method == PACKED

    def __call__(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Multiply `x [n, in]` by `weight [out, in]`, packed or not as `is_packed` says, transposed."""
        if self.num_threads == 0:
            return self._in_groups(x, weight)
        before = torch.get_num_threads()
        torch.set_num_threads(self.num_threads)
        try:
            return self._in_groups(x, weight)
        finally:
            torch.set_num_threads(before)

    def cost(self, num_rows: int) -> float:
        """Return the milliseconds expected for `num_rows` rows."""
        return -(-num_rows // self.num_rows) * self.milliseconds

    def _in_groups(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if x.shape[0] <= self.num_rows:
            return self._group(x, weight)
        return torch.cat([self._group(group, weight) for group in torch.split(x, self.num_rows)])

    def _group(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        n = x.shape[0]
        if n < self.num_rows:
            x = functional.pad(x, (0, 0, 0, self.num_rows - n))
        elif x.data_ptr() % ALIGNMENT:
            x = x.clone()
        y = METHODS[self.method](x, weight)
        return y if n == self.num_rows else y[:n]


@dataclass(frozen=True, slots=True)
class RowTable:
    """The best `Way` for each row count 1..MAX_ROWS of one weight shape."""

    shape: tuple[int, int]
    ways: tuple[Way, ...]  # ways[n - 1] multiplies n rows

    def __post_init__(self) -> None:
        if len(self.ways) != MAX_ROWS:
            raise ValueError(f"a table of {len(self.ways)} ways; expected one for each of 1..{MAX_ROWS} rows")

    @property
    def wants_packed(self) -> bool:
        """Whether some number of rows is multiplied by the packed weight."""
        return any(way.is_packed for way in self.ways)

    @property
    def wants_plain(self) -> bool:
        """Whether some number of rows is multiplied by the plain weight."""
        return not all(way.is_packed for way in self.ways)

    def cost(self, num_rows: int) -> float:
        """Return the milliseconds expected for 1..MAX_ROWS rows."""
        return self.ways[num_rows - 1].cost(num_rows)

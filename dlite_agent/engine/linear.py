"""Matrix products for a handful of rows, chosen per weight shape by measuring.

Verifying a draft multiplies every weight by 2..16 rows. Memory traffic is that of one row, yet stock kernels may take
several times as long. Three ways are tried on the model's own weights, at the row counts themselves and padded to the
next power of two; the fastest wins. The table is kept per machine, so only the first load measures.
"""

from __future__ import annotations

import hashlib
import json
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

MAX_ROWS = 16
ROW_COUNTS = (1, 2, 4, 8, 16)
_REPEATS = 7


def _rows_first(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return functional.linear(x, weight)


def _columns_first(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.mm(weight, x.t()).t().contiguous()


METHODS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "rows": _rows_first,
    "columns": _columns_first,
}


@dataclass(frozen=True, slots=True)
class Way:
    """How to multiply: which method, at how many rows (the missing ones are zero), and what it cost when measured."""

    method: str
    num_rows: int
    milliseconds: float

    def __post_init__(self) -> None:
        if self.method not in METHODS or not isinstance(self.num_rows, int):
            raise ValueError(f"way {self.method!r} at {self.num_rows!r} rows; expected a method of {list(METHODS)}")

    def __call__(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Multiply `x [n, in]` by `weight [out, in]` transposed; n is at most `num_rows`."""
        n = x.shape[0]
        if n < self.num_rows:
            x = functional.pad(x, (0, 0, 0, self.num_rows - n))
        return METHODS[self.method](x, weight)[:n]


@dataclass(frozen=True, slots=True)
class RowTable:
    """The best `Way` for each row count 1..MAX_ROWS of one weight shape."""

    shape: tuple[int, int]
    ways: tuple[Way, ...]  # ways[n - 1] multiplies n rows

    def __post_init__(self) -> None:
        if len(self.ways) != MAX_ROWS or any(way.num_rows < n for n, way in enumerate(self.ways, start=1)):
            raise ValueError(f"a table of {len(self.ways)} ways; expected one for each of 1..{MAX_ROWS} rows")


class SmallRowLinear(nn.Module):
    """An `nn.Linear` that multiplies up to MAX_ROWS rows in the way its table says, and more as before.

    Attributes:
        is_stock: Multiply every number of rows as before, for comparison.
    """

    def __init__(self, linear: nn.Linear, table: RowTable) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.table = table
        self.is_stock = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply to `x [..., in]`."""
        num_rows = x.numel() // self.in_features
        if num_rows > MAX_ROWS or self.is_stock:
            return functional.linear(x, self.weight, self.bias)
        y = self.table.ways[num_rows - 1](x.reshape(num_rows, self.in_features), self.weight)
        if self.bias is not None:
            y = y + self.bias
        return y.view(*x.shape[:-1], self.out_features)


def _least_ms(action: Callable[[torch.Tensor], object], weights: Sequence[torch.Tensor]) -> float:
    """Time an action, each time on the next weight, as a forward pass would find it (not in the cache).

    The least of a few times is taken: whatever else the machine does only ever adds.
    """
    times = []
    for repeat in range(_REPEATS):
        weight = weights[repeat % len(weights)]
        start = time.perf_counter()
        action(weight)
        times.append((time.perf_counter() - start) * 1e3)
    return min(times)


def measure(weights: Sequence[torch.Tensor]) -> RowTable:
    """Measure every method at every row count on weights `[out, in]` of one shape."""
    out_features, in_features = weights[0].shape
    candidates = []
    for num_rows in ROW_COUNTS:
        x = torch.randn(num_rows, in_features, dtype=weights[0].dtype)
        for method in METHODS:
            unmeasured = Way(method, num_rows, 0.0)
            elapsed = _least_ms(lambda weight, x=x, way=unmeasured: way(x, weight), weights)  # type: ignore[misc]
            candidates.append(Way(method, num_rows, elapsed))
    ways = []
    for n in range(1, MAX_ROWS + 1):
        ways.append(min((way for way in candidates if way.num_rows >= n), key=lambda way: way.milliseconds))
    return RowTable((out_features, in_features), tuple(ways))


def _linears(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    for parent in model.modules():
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear):
                yield parent, name, child


def _machine_key(dtype: torch.dtype) -> str:
    facts = [platform.processor() or platform.machine(), torch.backends.cpu.get_cpu_capability()]
    facts += [str(torch.get_num_threads()), str(torch.__version__), str(dtype)]
    return hashlib.blake2b("|".join(facts).encode(), digest_size=8).hexdigest()


def _load(path: Path) -> dict[tuple[int, int], RowTable]:
    """Read a stored table; anything unreadable counts as not measured."""
    try:
        stored = json.loads(path.read_text())
        return {
            (entry["shape"][0], entry["shape"][1]): RowTable(
                (entry["shape"][0], entry["shape"][1]),
                tuple(Way(way["method"], way["num_rows"], way["milliseconds"]) for way in entry["ways"]),
            )
            for entry in stored
        }
    except (OSError, ValueError, LookupError, TypeError):
        return {}


def _store(path: Path, tables: dict[tuple[int, int], RowTable]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    entries = [
        {
            "shape": list(table.shape),
            "ways": [
                {"method": way.method, "num_rows": way.num_rows, "milliseconds": way.milliseconds} for way in table.ways
            ],
        }
        for table in tables.values()
    ]
    partial = path.with_suffix(f".{time.monotonic_ns()}.partial")
    partial.write_text(json.dumps(entries, indent=1))
    partial.replace(path)


def table_path(folder: Path, dtype: torch.dtype) -> Path:
    """Return where this machine's table for weights of `dtype` is kept."""
    return folder / f"small-rows-{_machine_key(dtype)}.json"


def calibrate(model: nn.Module, *, folder: Path | None = None) -> dict[tuple[int, int], RowTable]:
    """Replace every `nn.Linear` on the CPU by a `SmallRowLinear` with a measured table.

    Args:
        model: The target, on the CPU; other devices are left as they are (their kernels like few rows).
        folder: Where tables are kept between loads; None measures every time.

    Returns:
        The table of each weight shape.
    """
    found = [entry for entry in _linears(model) if entry[2].weight.device.type == "cpu"]
    if not found:
        return {}
    path = None if folder is None else table_path(folder, found[0][2].weight.dtype)
    tables = {} if path is None else _load(path)
    by_shape: dict[tuple[int, int], list[torch.Tensor]] = {}
    for _, _, linear in found:
        by_shape.setdefault((linear.out_features, linear.in_features), []).append(linear.weight)
    with torch.inference_mode():
        missing = {shape: measure(weights) for shape, weights in by_shape.items() if shape not in tables}
    tables |= missing
    if path is not None and missing:
        _store(path, tables)
    for parent, name, linear in found:
        setattr(parent, name, SmallRowLinear(linear, tables[linear.out_features, linear.in_features]))
    return {shape: tables[shape] for shape in by_shape}

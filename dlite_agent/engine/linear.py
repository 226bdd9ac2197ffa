"""Matrix products for a handful of rows, chosen per weight shape by measuring.

Verifying a draft multiplies every weight by 2..16 rows, a packed pass of several sessions by up to 64. Memory traffic
is that of one row, yet stock kernels may take several times as long. So a few methods are tried on the model's own
weights, at fixed numbers of rows (others are padded, or multiplied in groups) and of threads; the fastest wins. The
table is kept per machine, so only the first load measures.

An exact table chooses among ways that give a row the same bits (`row_bits`), so that plain decoding, verifying and
packed passes agree to the last of them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import cycle, islice
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from dlite_agent.engine.rowwise import RowMode
from dlite_agent.errors import UnsupportedModelError

logger = logging.getLogger(__name__)

MAX_ROWS = 64
ROW_COUNTS = (1, 2, 4, 8, 16, 32, 64)
_REPEATS = 7
_IN_A_ROW = 8  # products timed together, each with a weight of its own
_HOPELESS = 2.0  # times the best known: not tried often
_NEAR = 1.5  # times the best known: measured again, when whatever disturbed the first time may be over
_WORTH_IT = 0.75  # another number of threads must take less than this of the time
_CACHE_BYTES = 64 << 20  # reading so much leaves nothing of a weight in the processor's caches
_FORMAT = 3
_MAX_THREADS = 1024
_ALIGNMENT = 64  # bytes; kernels may sum in another order where memory begins elsewhere
_TYPICAL_ROWS = (1, 2, 4, 8)  # an exact table serves these best


def _rows_first(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return functional.linear(x, weight)


def _columns_first(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.mm(weight, x.t()).t().contiguous()


def _onednn(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], None)
    return y


METHODS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
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

    def __call__(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Multiply `x [n, in]` by `weight [out, in]` transposed."""
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
        elif x.data_ptr() % _ALIGNMENT:
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


class SmallRowLinear(nn.Module):
    """An `nn.Linear` that multiplies up to MAX_ROWS rows in the way its table says, and more as before.

    Attributes:
        table: How to multiply.
        mode: In passes whose rows must have the bits that they have alone, any number of rows goes by the table; None
            if no pass needs that.
        is_stock: Multiply every number of rows as before, for comparison.
    """

    def __init__(self, linear: nn.Linear, table: RowTable, mode: RowMode | None = None) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.table = table
        self.mode = mode
        self.is_stock = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply to `x [..., in]`."""
        num_rows = x.numel() // self.in_features
        is_many = num_rows > MAX_ROWS and (self.mode is None or not self.mode.is_rowwise)
        if is_many or self.is_stock:
            return functional.linear(x, self.weight, self.bias)
        rows = x.reshape(num_rows, self.in_features)
        if num_rows <= MAX_ROWS:
            y = self.table.ways[num_rows - 1](rows, self.weight)
        else:
            y = torch.cat([self.table.ways[len(part) - 1](part, self.weight) for part in torch.split(rows, MAX_ROWS)])
        if self.bias is not None:
            y = y + self.bias
        return y.view(*x.shape[:-1], self.out_features)


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of one shape, and what a forward pass reads before it comes to them again.

    Attributes:
        same: Weights `[out, in]`.
        between: As many bytes as all weights of the model have, up to what empties the processor's caches.
    """

    same: Sequence[torch.Tensor]
    between: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """Rows out and in."""
        out_features, in_features = self.same[0].shape
        return out_features, in_features


def _least_ms(way: Way, x: torch.Tensor, weights: Weights, *, best: float) -> float:
    """Time products with `x` as a forward pass would do them: one weight after the other, none of them in the cache.

    The least of a few times is taken: whatever else the machine does only ever adds. What is far from the `best` known
    is tried twice only (the first time prepares the kernel).
    """
    num_products = min(_IN_A_ROW, len(weights.same))
    in_turn = cycle(weights.same)
    times = []
    for repeat in range(_REPEATS):
        row = list(islice(in_turn, num_products))
        weights.between.sum()
        start = time.perf_counter()
        for weight in row:
            way(x, weight)
        times.append((time.perf_counter() - start) * 1e3 / num_products)
        if repeat and min(times) > _HOPELESS * best:
            break
    return min(times)


def _thread_counts() -> tuple[int, ...]:
    """Return 0, for torch's own number, and its halves down to 1."""
    counts = [0]
    num_threads = torch.get_num_threads()
    while num_threads > 1:
        num_threads //= 2
        counts.append(num_threads)
    return tuple(counts)


def _methods_for(dtype: torch.dtype) -> list[str]:
    """Return the methods that work here with this type; not every build of torch has each."""
    able = []
    one = torch.ones(1, 1, dtype=dtype)
    for name, method in METHODS.items():
        try:
            method(one, one)
        except (RuntimeError, AttributeError):
            continue
        able.append(name)
    return able


def _candidates(weights: Weights, thread_counts: Sequence[int]) -> list[Way]:
    """Measure every method at every row count and number of threads; what is near the best once more, a while later."""
    once = list(_measured(weights, thread_counts))
    best = {n: min(way.milliseconds for way in once if way.num_rows == n) for n in ROW_COUNTS}
    near = [way for way in once if way.milliseconds < _NEAR * best[way.num_rows]]
    again = []
    for way in near:
        x = torch.randn(way.num_rows, weights.shape[1], dtype=weights.same[0].dtype)
        elapsed = _least_ms(way, x, weights, best=way.milliseconds)
        again.append(replace(way, milliseconds=min(elapsed, way.milliseconds)))
    return [*(way for way in once if way not in near), *again]


def _measured(weights: Weights, thread_counts: Sequence[int]) -> Iterator[Way]:
    dtype, in_features = weights.same[0].dtype, weights.shape[1]
    methods = _methods_for(dtype)
    for num_rows in ROW_COUNTS:
        x = torch.randn(num_rows, in_features, dtype=dtype)
        best = float("inf")
        for num_threads in thread_counts:
            for method in methods:
                unmeasured = Way(method, num_rows, 0.0, num_threads)
                elapsed = _least_ms(unmeasured, x, weights, best=best)
                best = min(best, elapsed)
                yield Way(method, num_rows, elapsed, num_threads)


def _table(shape: tuple[int, int], candidates: Sequence[Way]) -> RowTable:
    """Take the cheapest way for each row count; another number of threads has to be clearly better."""

    def best_for(num_rows: int) -> Way:
        def key(way: Way) -> tuple[float, int]:
            cost = way.cost(num_rows)
            return (cost / _WORTH_IT if way.num_threads else cost), -way.num_rows

        return min(candidates, key=key)

    return RowTable(shape, tuple(best_for(n) for n in range(1, MAX_ROWS + 1)))


def measure(weights: Weights) -> RowTable:
    """Measure every way to multiply on weights of one shape; returns the fastest for each row count."""
    return _table(weights.shape, _candidates(weights, _thread_counts()))


def measure_exact(weights: Weights) -> RowTable:
    """Do as `measure`, among ways that give a row the same bits wherever it stands.

    Raises:
        UnsupportedModelError: If no way to multiply does.
    """
    out_features, in_features = weights.shape
    candidates = _candidates(weights, (0,))
    classes: list[tuple[list[torch.Tensor], list[Way]]] = []
    for way in candidates:
        bits = row_bits(way, weights.same)
        if bits is None:
            continue
        known = next((ways for same, ways in classes if _are_equal(same, bits)), None)
        if known is None:
            classes.append((bits, [way]))
        else:
            known.append(way)
    if not classes:
        raise UnsupportedModelError(
            f"no product with weights {out_features}x{in_features} gives a row the same bits wherever it stands; "
            "load the model without exact=True"
        )
    tables = [_table(weights.shape, ways) for _, ways in classes]
    return min(tables, key=lambda table: sum(table.ways[n - 1].cost(n) for n in _TYPICAL_ROWS))


def is_exact(table: RowTable, weights: Sequence[torch.Tensor]) -> bool:
    """Tell whether a table's ways all give a row the same bits wherever it stands."""
    seen = [row_bits(way, weights) for way in dict.fromkeys(table.ways)]
    return all(bits is not None and seen[0] is not None and _are_equal(bits, seen[0]) for bits in seen)


def row_bits(way: Way, weights: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
    """Return what random rows become, or None if it depends on their places and on their neighbours.

    Tried on one weight of each alignment in memory, with the rows in order, rotated, in reverse, and each last group
    filled up with zeros. Sums in another order show in the last bits of some of the many outputs.
    """
    results = []
    for weight in {weight.data_ptr() % _ALIGNMENT: weight for weight in weights}.values():
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(MAX_ROWS, weight.shape[1], generator=generator).to(weight.dtype)
        y = way(x, weight)
        others = [way(x.roll(1, 0), weight).roll(-1, 0), way(x.flip(0), weight).flip(0)]
        ragged = way(x[: -way.num_rows + 1] if way.num_rows > 1 else x, weight)
        if not all(torch.equal(y, other) for other in others) or not torch.equal(y[: len(ragged)], ragged):
            return None
        results.append(y)
    return results


def _are_equal(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


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
        tables = {}
        for entry in stored:
            out_features, in_features = entry["shape"]
            distinct = [Way(**way) for way in entry["ways"]]
            shape = (out_features, in_features)
            tables[shape] = RowTable(shape, tuple(distinct[index] for index in entry["by_rows"]))
        return tables
    except (OSError, ValueError, LookupError, TypeError):
        return {}


def write_calibration(path: Path, text: str) -> None:
    """Write a file whole or not at all, whoever else writes it at the same time; its folder is made if need be.

    What cannot be written is found out again at the next load; a warning says so.
    """
    partial = path.with_suffix(f".{os.getpid()}-{time.monotonic_ns()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text)
        partial.replace(path)
    except OSError as error:
        logger.warning("%s cannot be kept (%s); it is measured at every load until it can", path, error)
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def _store(path: Path, tables: dict[tuple[int, int], RowTable]) -> None:
    entries = []
    for table in tables.values():
        distinct = list(dict.fromkeys(table.ways))
        by_rows = [distinct.index(way) for way in table.ways]
        entries.append({"shape": table.shape, "ways": [asdict(way) for way in distinct], "by_rows": by_rows})
    write_calibration(path, json.dumps(entries, indent=1))


def table_path(folder: Path, dtype: torch.dtype, *, exact: bool = False) -> Path:
    """Return where this machine's table for weights of `dtype` is kept."""
    kind = "exact-rows" if exact else "small-rows"
    return folder / f"{kind}-{_FORMAT}-{_machine_key(dtype)}.json"


def calibrate(
    model: nn.Module, *, folder: Path | None = None, mode: RowMode | None = None
) -> dict[tuple[int, int], RowTable]:
    """Replace every `nn.Linear` on the CPU by a `SmallRowLinear` with a measured table.

    Args:
        model: The target, on the CPU; other devices are left as they are (their kernels like few rows).
        folder: Where tables are kept between loads; None measures every time.
        mode: Tells passes that must be exact; their tables are, and are checked on every load. None for the fastest.

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
    path = None if folder is None else table_path(folder, found[0][2].weight.dtype, exact=mode is not None)
    tables = {} if path is None else _load(path)
    by_shape: dict[tuple[int, int], list[torch.Tensor]] = {}
    for _, _, linear in found:
        by_shape.setdefault((linear.out_features, linear.in_features), []).append(linear.weight)
    with torch.inference_mode():
        missing = _measure_missing(by_shape, tables, exact=mode is not None)
    tables |= missing
    if path is not None and missing:
        _store(path, tables)
    for parent, name, linear in found:
        table = tables[linear.out_features, linear.in_features]
        setattr(parent, name, SmallRowLinear(linear, table, mode))
    return {shape: tables[shape] for shape in by_shape}


def _measure_missing(
    by_shape: dict[tuple[int, int], list[torch.Tensor]], tables: dict[tuple[int, int], RowTable], *, exact: bool
) -> dict[tuple[int, int], RowTable]:
    """Measure what has no table, or one that is not exact here."""
    missing = {s: w for s, w in by_shape.items() if s not in tables or (exact and not is_exact(tables[s], w))}
    if not missing:
        return {}  # as at every load but the first
    num_bytes = sum(weight.nbytes for weights in by_shape.values() for weight in weights)
    between = torch.ones(min(num_bytes, _CACHE_BYTES) // 4)
    measure_one = measure_exact if exact else measure
    return {shape: measure_one(Weights(weights, between)) for shape, weights in missing.items()}

"""Tables of the fastest way to multiply, measured once per machine, dtype and weight shape."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import cycle, islice
from pathlib import Path

import torch
from torch.nn import functional

from dlite_agent.engine.products import ALIGNMENT, MAX_ROWS, METHODS, PACKED, RowTable, Way, pack
from dlite_agent.errors import UnsupportedModelError

logger = logging.getLogger(__name__)

ROW_COUNTS = (1, 2, 4, 6, 8, 12, 16, 32, 64)
_REPEATS = 7
_IN_A_ROW = 32  # products timed together at most, each with a weight of its own
_HOPELESS = 2.0  # times the best known: not tried often
_NEAR = 1.5  # times the best known: measured again, when whatever disturbed the first time may be over
_WORTH_IT = 0.75  # another number of threads must take less than this of the time
_CACHE_BYTES = 64 << 20  # reading so much leaves nothing of a weight in the processor's caches
_TOLERATED = 0.01  # what a product may be off, as a share of its largest element; bfloat16 has eight bits
_FORMAT = 4
_TYPICAL_ROWS = (1, 2, 4, 6, 8)  # where tables exclude each other, the one that serves these best is taken
_LITTLE = 1.05  # times the time of the best way
_SMALL_BYTES = 256 << 20  # so many of one shape may be there twice


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of one shape, and what a forward pass reads before it comes to them again.

    Attributes:
        same: Weights `[out, in]`.
        packed: The first of them, packed; none where that cannot be done.
        between: As many bytes as all weights of the model have, up to what empties the processor's caches.
    """

    same: Sequence[torch.Tensor]
    packed: Sequence[torch.Tensor]
    between: torch.Tensor

    @classmethod
    def of(cls, same: Sequence[torch.Tensor], between: torch.Tensor) -> Weights:
        """Pack as many as are multiplied in a row, if this build and machine can."""
        packed: list[torch.Tensor] = []
        with suppress(RuntimeError, AttributeError):
            packed += [pack(weight) for weight in same[: _num_in_a_row(same)]]
        return cls(same, packed, between)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows out and in."""
        out_features, in_features = self.same[0].shape
        return out_features, in_features

    def for_way(self, way: Way) -> Sequence[torch.Tensor]:
        """Return them as the way wants them."""
        return self.packed if way.is_packed else self.same


def _num_in_a_row(weights: Sequence[torch.Tensor]) -> int:
    """Return how many weights to multiply in a row: what precedes the first of them shall not count for much."""
    return min(_IN_A_ROW, len(weights), -(-_CACHE_BYTES // weights[0].nbytes))


def _least_ms(way: Way, x: torch.Tensor, weights: Weights, *, best: float) -> float:
    """Time products as a forward pass does them: one weight after the other, none of them in the cache, of fresh rows.

    The least of a few times is taken: whatever else the machine does only ever adds. What is far from the `best` known
    is tried twice only (the first time prepares the kernel).
    """
    num_products = _num_in_a_row(weights.same)
    in_turn = cycle(weights.for_way(way))
    times = []
    for repeat in range(_REPEATS):
        row = list(islice(in_turn, num_products))
        weights.between.sum()
        start = time.perf_counter()
        for weight in row:
            way(x.clone(), weight)  # another thread has to fetch rows that this one has just written
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
    """Return the methods that are right here for this type; not every build of torch has each."""
    able = []
    x = torch.arange(3 * 32).view(3, 32).remainder(3).sub(1).to(dtype)
    weight = torch.arange(20 * 32).view(20, 32).remainder(5).sub(2).to(dtype)
    expected = functional.linear(x, weight)
    for name, method in METHODS.items():
        with suppress(RuntimeError, AttributeError):
            y = method(x, pack(weight) if name == PACKED else weight)
            if (y - expected).abs().max() <= _TOLERATED * expected.abs().max():
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
    methods = [name for name in _methods_for(dtype) if name != PACKED or weights.packed]
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


def _cost(table: RowTable) -> float:
    return sum(table.cost(n) for n in _TYPICAL_ROWS)


def measure(weights: Weights) -> RowTable:
    """Measure every way to multiply on weights of one shape; returns the fastest for each row count.

    One copy of the weights, plain or packed, is taken if that costs little; both if they are small.
    """
    candidates = _candidates(weights, _thread_counts())
    kinds = ([way for way in candidates if way.is_packed], [way for way in candidates if not way.is_packed])
    one_copy = min((_table(weights.shape, ways) for ways in kinds if ways), key=_cost)
    both = _table(weights.shape, candidates)
    is_as_good = all(one_copy.cost(n) <= _LITTLE * both.cost(n) for n in _TYPICAL_ROWS)
    is_large = sum(weight.nbytes for weight in weights.same) > _SMALL_BYTES
    return one_copy if is_as_good or is_large else both


def measure_exact(weights: Weights) -> RowTable:
    """Do as `measure`, among ways that give a row the same bits wherever it stands.

    Raises:
        UnsupportedModelError: If no way to multiply does.
    """
    out_features, in_features = weights.shape
    classes: list[tuple[list[torch.Tensor], list[Way]]] = []
    for way in _candidates(weights, (0,)):
        bits = row_bits(way, weights.for_way(way))
        if bits is None:
            continue
        known = next((ways for same, ways in classes if _serve_together(ways[0], way, same, bits)), None)
        if known is None:
            classes.append((bits, [way]))
        else:
            known.append(way)
    if not classes:
        raise UnsupportedModelError(
            f"no product with weights {out_features}x{in_features} gives a row the same bits wherever it stands; "
            "load the model without exact=True"
        )
    return min((_table(weights.shape, ways) for _, ways in classes), key=_cost)


def is_exact(table: RowTable, weights: Sequence[torch.Tensor]) -> bool:
    """Tell whether a table's ways all give a row of plain weights `[out, in]` the same bits wherever it stands."""
    tried = [pack(weights[0])] if table.wants_packed else weights
    seen = [row_bits(way, tried) for way in dict.fromkeys(table.ways)]
    return all(bits is not None and seen[0] is not None and _are_equal(bits, seen[0]) for bits in seen)


def row_bits(way: Way, weights: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
    """Return what random rows become, or None if it depends on their places and on their neighbours.

    Tried on one weight of each alignment in memory (packed ones have the same), with the rows in order, rotated, in
    reverse, and each last group filled up with zeros. Sums in another order show in the last bits of some of the many
    outputs.
    """
    tried = weights[:1] if way.is_packed else list({w.data_ptr() % ALIGNMENT: w for w in weights}.values())
    results = []
    for weight in tried:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(MAX_ROWS, weight.shape[1], generator=generator).to(weight.dtype)
        y = way(x, weight)
        others = [way(x.roll(1, 0), weight).roll(-1, 0), way(x.flip(0), weight).flip(0)]
        ragged = way(x[: -way.num_rows + 1] if way.num_rows > 1 else x, weight)
        if not all(torch.equal(y, other) for other in others) or not torch.equal(y[: len(ragged)], ragged):
            return None
        results.append(y)
    return results


def _serve_together(one: Way, other: Way, bits: list[torch.Tensor], other_bits: list[torch.Tensor]) -> bool:
    return one.is_packed == other.is_packed and _are_equal(bits, other_bits)


def _are_equal(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


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


def tables_for(weights: Sequence[torch.Tensor], *, folder: Path | None, exact: bool) -> dict[tuple[int, int], RowTable]:
    """Return a table for each shape among plain weights `[out, in]` of one dtype.

    Args:
        weights: On the CPU.
        folder: Where tables are kept between loads; None measures every time.
        exact: Give a row the same bits wherever it stands; kept tables are checked for it.

    Raises:
        UnsupportedModelError: If exact products are wanted, and this machine has none.
    """
    path = None if folder is None else table_path(folder, weights[0].dtype, exact=exact)
    kept = {} if path is None else _load(path)
    by_shape: dict[tuple[int, int], list[torch.Tensor]] = {}
    for weight in weights:
        out_features, in_features = weight.shape
        by_shape.setdefault((out_features, in_features), []).append(weight)
    able = _methods_for(weights[0].dtype)
    kept = {shape: table for shape, table in kept.items() if all(way.method in able for way in table.ways)}
    tables = {s: kept[s] for s, same in by_shape.items() if s in kept and (not exact or is_exact(kept[s], same))}
    if missing := [shape for shape in by_shape if shape not in tables]:  # at the first load
        between = torch.ones(min(sum(weight.nbytes for weight in weights), _CACHE_BYTES) // 4)
        measure_one = measure_exact if exact else measure
        tables |= {shape: measure_one(Weights.of(by_shape[shape], between)) for shape in missing}
        if path is not None:
            _store(path, kept | tables)
    return tables

"""However a few rows are multiplied, the product is the same; the table is measured once and never trusted blindly."""

from __future__ import annotations

import json
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

from dlite_agent.engine import products
from dlite_agent.engine import row_tables as module
from dlite_agent.engine.linear import SmallRowLinear, calibrate
from dlite_agent.engine.products import MAX_ROWS, METHODS, PACKED, RowTable, Way
from dlite_agent.engine.row_tables import Weights, is_exact, measure, measure_exact, row_bits, table_path
from dlite_agent.engine.rowwise import RowMode
from dlite_agent.errors import UnsupportedModelError

SHAPES = {(7, 33), (64, 32)}
REAL_SHAPES = [(576, 576), (192, 576), (1536, 576), (576, 1536), (896, 896), (128, 896), (4864, 896), (896, 4864)]


def small_model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(33, 7), nn.Sequential(nn.Linear(32, 64, bias=False), nn.Linear(32, 64)))
    for parameter in model.requires_grad_(False).parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model.to(dtype)


def linears_of(model: nn.Module) -> list[SmallRowLinear]:
    return [child for child in model.modules() if isinstance(child, SmallRowLinear)]


def weights(*same: torch.Tensor) -> Weights:
    return Weights.of(same, torch.ones(1))


def rows(num_rows: int, width: int) -> torch.Tensor:
    return torch.randn(num_rows, width, generator=torch.Generator().manual_seed(num_rows))


@pytest.mark.parametrize("num_threads", [0, 1])
@pytest.mark.parametrize("way_rows", [1, 4, 16, MAX_ROWS])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("bias", [False, True])
def test_every_way_gives_the_product(method: str, way_rows: int, num_threads: int, bias: bool) -> None:
    linear = nn.Linear(33, 21, bias=bias).requires_grad_(False)
    way = Way(method, way_rows, 0.0, num_threads)
    small = SmallRowLinear(linear, RowTable((21, 33), (way,) * MAX_ROWS))
    before = torch.get_num_threads()
    for num_rows in (0, 1, 2, 3, 4, 5, 8, 9, 31, MAX_ROWS, MAX_ROWS + 1):
        x = rows(num_rows, 33).unsqueeze(0)
        for shaped in (x, x[0]):
            got = small(shaped)
            assert got.shape == linear(shaped).shape
            assert torch.allclose(got, linear(shaped), rtol=0, atol=1e-5)
    assert torch.get_num_threads() == before


def test_a_failing_product_leaves_the_number_of_threads_alone() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(RuntimeError):
            Way("rows", 1, 0.0, 1)(torch.zeros(1, 3), torch.zeros(4, 5))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("method", METHODS)
def test_the_original_can_be_had_back(method: str) -> None:
    linear = nn.Linear(33, 21).requires_grad_(False)
    original = linear.weight.clone()
    small = SmallRowLinear(linear, RowTable((21, 33), (Way(method, 16, 0.0),) * MAX_ROWS))
    x = rows(5, 33)
    assert torch.equal(small.stock()(x), linear(x))
    assert (small.weight is None) == (method == PACKED)
    assert {name: tensor.shape for name, tensor in small.state_dict().items()} == {"weight": (21, 33), "bias": (21,)}
    assert torch.equal(small.state_dict()["weight"], original)


def test_a_weight_that_others_read_stays_beside_its_packed_form() -> None:
    linear = nn.Linear(33, 21).requires_grad_(False)
    weight = linear.weight
    small = SmallRowLinear(linear, RowTable((21, 33), (Way(PACKED, 16, 0.0),) * MAX_ROWS), keeps_plain=True)
    assert small.weight is weight
    assert small.stock().weight.data_ptr() == weight.data_ptr()


def test_packed_and_plain_ways_can_serve_one_layer() -> None:
    linear = nn.Linear(33, 21).requires_grad_(False)
    ways = (Way("columns", 2, 0.0), Way("rows", 1, 0.0), *[Way(PACKED, 4, 0.0)] * (MAX_ROWS - 2))
    small = SmallRowLinear(linear, RowTable((21, 33), ways))
    for num_rows in (1, 2, 3, 7, MAX_ROWS, MAX_ROWS + 1):
        x = rows(num_rows, 33)
        assert torch.allclose(small(x), linear(x), rtol=0, atol=1e-5)
    assert small.weight is linear.weight
    assert list(small.state_dict()) == ["weight", "bias"]


@pytest.mark.parametrize("methods", [[PACKED], [name for name in METHODS if name != PACKED]], ids=["packed", "plain"])
def test_a_calibrated_model_computes_what_it_did(monkeypatch: pytest.MonkeyPatch, methods: list[str]) -> None:
    monkeypatch.setattr(module, "METHODS", {name: METHODS[name] for name in methods})
    model, original = small_model(), small_model()
    tables = calibrate(model)
    assert set(tables) == SHAPES
    assert len(linears_of(model)) == 3
    for num_rows in range(1, MAX_ROWS + 2):
        x = rows(num_rows, 33)
        assert torch.allclose(model[0](x), original[0](x), rtol=0, atol=1e-5)
    assert list(model.state_dict()) == list(original.state_dict())
    assert all(torch.equal(tensor, original.state_dict()[name]) for name, tensor in model.state_dict().items())


def test_plain_weights_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "METHODS", {name: METHODS[name] for name in METHODS if name != PACKED})
    model = small_model()
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    calibrate(model)
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == before


def test_plain_weights_go_when_packed_ones_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "METHODS", {PACKED: METHODS[PACKED]})
    model = small_model()
    plain = [weakref.ref(linear.weight) for linear in model.modules() if isinstance(linear, nn.Linear)]
    shared = list(model.modules())[-1]
    calibrate(model, shared=shared)
    assert [weight() is not None for weight in plain] == [False, False, True]
    assert [linear.weight is not None for linear in linears_of(model)] == [False, False, True]


def fake_times(monkeypatch: pytest.MonkeyPatch, times: dict[tuple[str, int, int], float]) -> None:
    """Let ways, named by method, rows and threads, cost what is given, and all others 100 ms."""

    def measured(way: Way, x: object, weights: object, *, best: float) -> float:
        return times.get((way.method, way.num_rows, way.num_threads), 100.0)

    monkeypatch.setattr(module, "_least_ms", measured)


def test_the_cheapest_way_is_taken_padded_or_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_times(monkeypatch, {("columns", 4, 0): 1.0, ("rows", 16, 0): 2.6})
    table = measure(weights(torch.zeros(3, 5)))
    chosen = [(way.method, way.num_rows) for way in table.ways]
    assert chosen == [("columns", 4)] * 8 + [("rows", 16)] * 8 + chosen[16:]
    assert [(chosen[n - 1], table.ways[n - 1].cost(n)) for n in (17, 20, 32, 64)] == [
        (("columns", 4), 5.0),
        (("columns", 4), 5.0),
        (("rows", 16), 5.2),
        (("rows", 16), 10.4),
    ]
    assert table.shape == (3, 5)


def test_products_are_timed_in_a_row_after_the_caches_were_emptied(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    class Between(torch.Tensor):
        def sum(self, *args: object, **kwargs: object) -> torch.Tensor:
            seen.append("emptied")
            return torch.zeros(1)

    def multiply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        seen.append("multiplied")
        return torch.mm(x, weight.t())

    monkeypatch.setitem(METHODS, "rows", multiply)
    monkeypatch.setattr(module, "METHODS", {"rows": multiply})
    measure(Weights.of([torch.randn(3, 5), torch.randn(3, 5)], torch.ones(1).as_subclass(Between)))
    assert seen.pop(0) == "multiplied"  # does the method work at all
    assert seen == ["emptied", "multiplied", "multiplied"] * (len(seen) // 3)


def test_a_model_is_measured_with_caches_as_its_own_pass_leaves_them(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    def measured(weights: Weights) -> RowTable:
        sizes.append(weights.between.nbytes)
        return RowTable(weights.shape, (Way("rows", 1, 1.0),) * MAX_ROWS)

    monkeypatch.setattr(module, "measure", measured)
    calibrate(small_model())
    assert sizes == [4 * (33 * 7 + 2 * 32 * 64)] * 2


@pytest.mark.parametrize(("milliseconds", "expected"), [(0.8, 0), (0.7, 1)])
def test_fewer_threads_must_be_clearly_faster(
    monkeypatch: pytest.MonkeyPatch, milliseconds: float, expected: int
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        fake_times(monkeypatch, {("rows", 1, 0): 1.0, ("rows", 1, 1): milliseconds})
        assert measure(weights(torch.zeros(3, 5))).ways[0].num_threads == expected
    finally:
        torch.set_num_threads(before)


def test_a_method_that_this_build_lacks_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such kernel")

    monkeypatch.setitem(METHODS, "onednn", missing)
    table = measure(weights(torch.randn(3, 5)))
    assert "onednn" not in {way.method for way in table.ways}


def test_a_method_that_is_wrong_here_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    table = RowTable((7, 33), (Way("rows", 1, 1.0),) * MAX_ROWS)
    module._store(table_path(tmp_path, torch.float32), {(7, 33): table})
    monkeypatch.setitem(METHODS, "rows", lambda x, weight: torch.mm(x, weight.t()) + 1)
    assert "rows" not in {way.method for way in measure(weights(torch.randn(3, 5))).ways}
    assert "rows" not in {way.method for way in calibrate(small_model(), folder=tmp_path)[7, 33].ways}


@pytest.mark.parametrize("error", [RuntimeError, AttributeError])
def test_a_build_that_cannot_pack_multiplies_plain_weights(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def missing(weight: torch.Tensor) -> torch.Tensor:
        raise error("no such layout")

    monkeypatch.setattr(module, "pack", missing)
    for mode in (None, RowMode()):
        assert not any(table.wants_packed for table in calibrate(small_model(), mode=mode).values())


def test_weights_that_could_not_be_packed_are_multiplied_plain() -> None:
    """A small one may be packed where there is no memory for another copy of these."""
    unpacked = Weights([torch.randn(3, 5)], [], torch.ones(1))
    assert not measure(unpacked).wants_packed
    assert not measure_exact(unpacked).wants_packed


PLAIN_TIMES = {("columns", 2, 0): 1.0, ("rows", 8, 0): 3.0}


@pytest.mark.parametrize(
    ("packed", "wants_packed", "wants_plain"),
    [
        ({(PACKED, 4, 0): 1.02, (PACKED, 8, 0): 2.0}, True, False),  # as good for one row, better for eight
        ({(PACKED, 4, 0): 2.1, (PACKED, 8, 0): 3.1}, False, True),
        ({(PACKED, 4, 0): 1.3, (PACKED, 8, 0): 2.0}, True, True),  # worse for one row, better for eight
    ],
)
def test_one_copy_of_the_weights_is_kept_unless_both_are_worth_it(
    monkeypatch: pytest.MonkeyPatch, packed: dict[tuple[str, int, int], float], wants_packed: bool, wants_plain: bool
) -> None:
    fake_times(monkeypatch, PLAIN_TIMES | packed)
    table = measure(weights(torch.zeros(3, 5)))
    assert (table.wants_packed, table.wants_plain) == (wants_packed, wants_plain)
    monkeypatch.setattr(module, "_SMALL_BYTES", 59)
    table = measure(weights(torch.zeros(3, 5)))  # 60 bytes
    assert table.wants_packed != table.wants_plain


def test_a_stored_table_is_taken_and_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for mode in (None, RowMode()):
        tables = calibrate(small_model(), folder=tmp_path, mode=mode)
        with monkeypatch.context() as patched:
            patched.setattr(module, "_candidates", None)  # not callable: measuring would be an error
            model = small_model()
            assert calibrate(model, folder=tmp_path, mode=mode) == tables
        assert [linear.table for linear in linears_of(model)] == [tables[7, 33], tables[64, 32], tables[64, 32]]
    names = {table_path(tmp_path, torch.float32, exact=exact).name for exact in (False, True)}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert len(names) == 2


def test_only_what_is_missing_is_measured_and_all_of_it_is_kept(tmp_path: Path) -> None:
    first = calibrate(nn.Sequential(nn.Linear(5, 6)), folder=tmp_path)
    calibrate(small_model(), folder=tmp_path)
    stored = json.loads(table_path(tmp_path, torch.float32).read_text())
    assert {tuple(entry["shape"]) for entry in stored} == SHAPES | {(6, 5)}
    assert calibrate(nn.Sequential(nn.Linear(5, 6)), folder=tmp_path) == first


def test_other_types_have_tables_of_their_own(tmp_path: Path) -> None:
    calibrate(small_model(), folder=tmp_path)
    calibrate(small_model(torch.bfloat16), folder=tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


WAY = {"method": "rows", "num_rows": 16, "milliseconds": 1.0, "num_threads": 0}


def entry(**changes: object) -> str:
    fields = {"shape": [7, 33], "ways": [WAY], "by_rows": [0] * MAX_ROWS} | changes
    return json.dumps([{name: value for name, value in fields.items() if value is not None}])


@pytest.mark.parametrize(
    "content",
    [
        "",
        "null",
        "{}",
        "[1]",
        '["rows"]',
        '{"shape": 1}',
        entry()[:-5],
        entry(ways=None),
        entry(by_rows=None),
        entry(shape=None),
        entry(shape=[7]),
        entry(shape=7),
        entry(ways=[]),
        entry(by_rows=[0] * 15),
        entry(by_rows=[1] * MAX_ROWS),
        entry(by_rows=["0"] * MAX_ROWS),
        entry(ways=[WAY | {"num_rows": 0}]),
        entry(ways=[WAY | {"num_rows": 10**12}]),
        entry(ways=[WAY | {"num_rows": "16"}]),
        entry(ways=[WAY | {"num_rows": 16.0}]),
        entry(ways=[WAY | {"num_threads": -1}]),
        entry(ways=[WAY | {"num_threads": None}]),
        entry(ways=[WAY | {"num_threads": 10**9}]),
        entry(ways=[WAY | {"method": "sideways"}]),
        entry(ways=[WAY | {"method": ["rows"]}]),
        entry(ways=[WAY | {"more": 1}]),
        entry(ways=[{"method": "rows", "milliseconds": 1.0}]),
        "\udc80",
    ],
)
def test_a_damaged_table_is_measured_again(tmp_path: Path, content: str) -> None:
    path = table_path(tmp_path, torch.float32)
    path.write_bytes(content.encode(errors="surrogateescape"))
    model, original = small_model(), small_model()
    assert set(calibrate(model, folder=tmp_path)) == SHAPES
    x = rows(3, 33)
    assert torch.allclose(model[0](x), original[0](x), rtol=0, atol=1e-5)
    stored = json.loads(path.read_text())
    assert {tuple(kept["shape"]) for kept in stored} == SHAPES
    assert [kept.name for kept in tmp_path.iterdir()] == [path.name]


def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    assert set(calibrate(small_model(), folder=tmp_path / "file" / "calibration")) == SHAPES
    assert "measured at every load" in caplog.text


def test_a_full_disk_leaves_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fill_up(path: Path, text: str) -> int:
        path.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", fill_up)
    calibrate(small_model(), folder=tmp_path)
    assert not list(tmp_path.iterdir())
    assert "No space left" in caplog.text


def test_an_undamaged_table_is_not_measured_again(tmp_path: Path) -> None:
    """The entry that the cases above damage is a good one."""
    table_path(tmp_path, torch.float32).write_text(entry())
    assert calibrate(nn.Sequential(nn.Linear(33, 7)), folder=tmp_path)[7, 33].ways == (Way("rows", 16, 1.0),) * MAX_ROWS


def test_a_table_for_too_few_rows_cannot_be_made() -> None:
    with pytest.raises(ValueError, match="64 rows"):
        RowTable((1, 1), (Way("rows", 16, 0.0),) * 16)


def test_a_model_without_linears_has_no_table(tmp_path: Path) -> None:
    assert calibrate(nn.Sequential(nn.LayerNorm(4)), folder=tmp_path) == {}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("shape", [*REAL_SHAPES, (7, 33), (33, 21), (64, 32), (3, 1)], ids=str)
def test_an_exact_table_gives_each_row_the_bits_it_gets_alone(shape: tuple[int, int]) -> None:
    linear = nn.Linear(shape[1], shape[0]).requires_grad_(False)
    mode = RowMode()
    small = SmallRowLinear(linear, measure_exact(weights(linear.weight)), mode)
    x = rows(2 * MAX_ROWS + 3, shape[1])
    alone = torch.cat([small(row) for row in torch.split(x, 1)])
    for num_rows in (*range(1, 17), 31, 32, 33, MAX_ROWS, MAX_ROWS + 1, len(x)):
        for start in range(0, len(x) - num_rows + 1, 7):
            assert torch.equal(small(x[start : start + num_rows]), alone[start : start + num_rows])
    assert torch.allclose(alone, linear(x), rtol=0, atol=1e-3)


def test_the_fastest_table_is_not_exact_by_itself() -> None:
    """Bits do depend on the number of rows: a stock product of one row is not that of sixteen."""
    weight = torch.randn(896, 896, generator=torch.Generator().manual_seed(0))
    table = RowTable((896, 896), tuple(Way("rows", 1 if n == 1 else 16, 1.0) for n in range(1, MAX_ROWS + 1)))
    assert not is_exact(table, [weight])
    x = rows(16, 896)
    assert not torch.equal(nn.functional.linear(x, weight)[:1], nn.functional.linear(x[:1], weight))


def by_place(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A kernel that sums its last row in another order."""
    y = torch.mm(x, weight.t())
    y[-1] = torch.mm(x[-1:].flip(1), weight.flip(1).t())[0] * (1 + 2**-20)
    return y


def by_neighbour(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y = torch.mm(x, weight.t())
    y[1:] += y[:-1] * 2**-20
    return y


def test_ways_that_agree_to_the_last_bit_serve_together(monkeypatch: pytest.MonkeyPatch) -> None:
    def row_by_row(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.stack([(weight.double() @ row.double()).float() for row in x])

    monkeypatch.setattr(products, "METHODS", {"one": row_by_row, "two": row_by_row})
    monkeypatch.setattr(module, "METHODS", products.METHODS)
    fake_times(monkeypatch, {("one", 1, 0): 1.0, ("two", 8, 0): 2.5})
    table = measure_exact(weights(torch.randn(21, 33)))
    chosen = [(way.method, way.num_rows) for way in table.ways[:8]]
    assert chosen == [("one", 1)] * 2 + [("two", 8)] * 6


@pytest.mark.parametrize("kernel", [by_place, by_neighbour])
@pytest.mark.parametrize("num_rows", [2, 4, 64])
def test_a_kernel_whose_rows_depend_on_places_or_neighbours_is_seen(
    monkeypatch: pytest.MonkeyPatch, kernel: object, num_rows: int
) -> None:
    monkeypatch.setitem(METHODS, "rows", kernel)
    weight = torch.randn(21, 33, generator=torch.Generator().manual_seed(0))
    assert row_bits(Way("rows", num_rows, 0.0), [weight]) is None
    assert row_bits(Way("columns", num_rows, 0.0), [weight]) is not None


@pytest.mark.parametrize("kernel", [by_place, by_neighbour])
def test_with_no_other_kernel_rows_are_multiplied_one_by_one(monkeypatch: pytest.MonkeyPatch, kernel: object) -> None:
    monkeypatch.setitem(METHODS, "rows", kernel)
    monkeypatch.setattr(module, "METHODS", {"rows": kernel})
    assert {way.num_rows for way in measure_exact(weights(torch.randn(21, 33))).ways} == {1}


def test_a_kernel_that_never_repeats_its_bits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def restless(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return torch.mm(x, weight.t()) + len(calls) * 2**-12

    monkeypatch.setitem(METHODS, "rows", restless)
    monkeypatch.setattr(module, "METHODS", {"rows": restless})
    with pytest.raises(UnsupportedModelError, match=r"7x33.*exact"):
        calibrate(small_model(), mode=RowMode())


def test_a_stored_exact_table_that_is_not_exact_here_is_measured_again(tmp_path: Path) -> None:
    shape = (896, 896)
    linear = nn.Linear(896, 896, bias=False).requires_grad_(False)
    wrong = RowTable(shape, tuple(Way("rows", 1 if n == 1 else 16, 1.0) for n in range(1, MAX_ROWS + 1)))
    path = table_path(tmp_path, torch.float32, exact=True)
    module._store(path, {shape: wrong})
    table = calibrate(nn.Sequential(linear), folder=tmp_path, mode=RowMode())[shape]
    assert table != wrong
    assert is_exact(table, [linear.weight])
    assert module._load(path) == {shape: table}


def test_exact_products_are_refused_on_a_device_without_them() -> None:
    model = nn.Sequential(nn.Linear(5, 6, device="meta"))
    with pytest.raises(UnsupportedModelError, match="CPU"):
        calibrate(model, mode=RowMode())
    assert calibrate(model) == {}

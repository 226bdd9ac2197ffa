"""However a few rows are multiplied, the product is the same; the table is measured once and never trusted blindly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from dlite_agent.engine import linear as module
from dlite_agent.engine.linear import MAX_ROWS, METHODS, RowTable, SmallRowLinear, Way, calibrate, table_path

SHAPES = {(7, 33), (64, 32)}


def small_model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(33, 7), nn.Sequential(nn.Linear(32, 64, bias=False), nn.Linear(32, 64)))
    for parameter in model.requires_grad_(False).parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model.to(dtype)


def linears_of(model: nn.Module) -> list[SmallRowLinear]:
    return [child for child in model.modules() if isinstance(child, SmallRowLinear)]


@pytest.mark.parametrize("num_padded", [0, 16])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("bias", [False, True])
def test_every_way_gives_the_product(method: str, num_padded: int, bias: bool) -> None:
    linear = nn.Linear(33, 21, bias=bias).requires_grad_(False)
    ways = tuple(Way(method, max(n, num_padded), 0.0) for n in range(1, MAX_ROWS + 1))
    small = SmallRowLinear(linear, RowTable((21, 33), ways))
    for num_rows in range(21):
        x = torch.randn(1, num_rows, 33, generator=torch.Generator().manual_seed(num_rows))
        for shaped in (x, x[0]):
            got = small(shaped)
            assert got.shape == linear(shaped).shape
            assert torch.allclose(got, linear(shaped), rtol=0, atol=1e-5)


def test_a_stock_linear_gives_the_very_bits_of_the_original() -> None:
    linear = nn.Linear(33, 21).requires_grad_(False)
    small = SmallRowLinear(linear, RowTable((21, 33), (Way("columns", MAX_ROWS, 0.0),) * MAX_ROWS))
    small.is_stock = True
    x = torch.randn(1, 5, 33, generator=torch.Generator().manual_seed(0))
    assert torch.equal(small(x), linear(x))


def test_a_calibrated_model_computes_what_it_did() -> None:
    model, original = small_model(), small_model()
    tables = calibrate(model)
    assert set(tables) == SHAPES
    assert len(linears_of(model)) == 3
    for num_rows in range(1, 21):
        x = torch.randn(num_rows, 33, generator=torch.Generator().manual_seed(num_rows))
        assert torch.allclose(model[0](x), original[0](x), rtol=0, atol=1e-5)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in original.named_parameters()]


def test_the_fastest_way_measured_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns are fast at 4 rows, and nothing else is; with more rows than 8, rows at 16."""

    def measured(action: object, weights: object) -> float:
        order = [(n, name) for n in module.ROW_COUNTS for name in METHODS]
        num_rows, method = order[len(calls) % len(order)]
        calls.append(method)
        return {(4, "columns"): 1.0, (16, "rows"): 2.0}.get((num_rows, method), 9.0)

    calls: list[str] = []
    monkeypatch.setattr(module, "_least_ms", measured)
    table = module.measure([torch.zeros(3, 5)])
    chosen = [(way.method, way.num_rows) for way in table.ways]
    assert chosen == [("columns", 4)] * 4 + [("rows", 16)] * 12
    assert table.shape == (3, 5)


def test_a_stored_table_is_taken_and_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = calibrate(small_model(), folder=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [table_path(tmp_path, torch.float32).name]
    monkeypatch.setattr(module, "measure", None)  # not callable: measuring would be an error
    model = small_model()
    assert calibrate(model, folder=tmp_path) == tables
    assert [linear.table for linear in linears_of(model)] == [tables[7, 33], tables[64, 32], tables[64, 32]]


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


def entry(**changes: object) -> str:
    way = {"method": "rows", "num_rows": 16, "milliseconds": 1.0}
    fields = {"shape": [7, 33], "ways": [way] * 16} | changes
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
        entry(shape=None),
        entry(shape=[7]),
        entry(shape=7),
        entry(ways=[]),
        entry(ways=[{"method": "rows", "num_rows": 16, "milliseconds": 1.0}] * 15),
        entry(ways=[{"method": "rows", "num_rows": 8, "milliseconds": 1.0}] * 16),
        entry(ways=[{"method": "rows", "num_rows": "16", "milliseconds": 1.0}] * 16),
        entry(ways=[{"method": "rows", "num_rows": 16.0, "milliseconds": 1.0}] * 16),
        entry(ways=[{"method": "sideways", "num_rows": 16, "milliseconds": 1.0}] * 16),
        entry(ways=[{"method": "rows", "milliseconds": 1.0}] * 16),
        "\udc80",
    ],
)
def test_a_damaged_table_is_measured_again(tmp_path: Path, content: str) -> None:
    path = table_path(tmp_path, torch.float32)
    path.write_bytes(content.encode(errors="surrogateescape"))
    model, original = small_model(), small_model()
    assert set(calibrate(model, folder=tmp_path)) == SHAPES
    x = torch.randn(3, 33)
    assert torch.allclose(model[0](x), original[0](x), rtol=0, atol=1e-5)
    stored = json.loads(path.read_text())
    assert {tuple(kept["shape"]) for kept in stored} == SHAPES
    assert [kept.name for kept in tmp_path.iterdir()] == [path.name]


def test_a_table_for_too_few_rows_cannot_be_made() -> None:
    with pytest.raises(ValueError, match="16 rows"):
        RowTable((1, 1), (Way("rows", 16, 0.0),) * 15)
    with pytest.raises(ValueError, match="16 rows"):
        RowTable((1, 1), (Way("rows", 15, 0.0),) * 16)


def test_a_model_without_linears_has_no_table(tmp_path: Path) -> None:
    assert calibrate(nn.Sequential(nn.LayerNorm(4)), folder=tmp_path) == {}
    assert list(tmp_path.iterdir()) == []

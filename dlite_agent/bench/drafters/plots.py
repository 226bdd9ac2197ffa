"""Pictures of a drafter benchmark; they need matplotlib, and nothing else in this package does."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from dlite_agent.bench.drafters.tally import TURNS
from dlite_agent.errors import MissingDependencyError

if TYPE_CHECKING:
    from dlite_agent.bench.drafters.figures import DrafterReport

Points = tuple[list[Any], list[float]]


def require_matplotlib() -> Any:
    """Return matplotlib's module of figures.

    Raises:
        MissingDependencyError: If it is not installed.
    """
    try:
        return importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise MissingDependencyError(
            f"plots need matplotlib ({error}); install it (pip install 'dlite-agent[bench]'), or leave --plots out"
        ) from error


def draw(report: DrafterReport, folder: Path, *, model: str) -> list[Path]:
    """Draw tau by turn, the cost of a draft by context and the bytes held by context; returns the files.

    Args:
        report: What was measured on one target.
        folder: Where to; created if need be.
        model: The target's name, which titles and file names carry.

    Raises:
        MissingDependencyError: If matplotlib is not installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^\w.-]+", "-", model).strip("-")
    pictures: dict[str, tuple[Mapping[str, Points], str, str]] = {
        "tau-by-turn": (dict(_tau_by_turn(report)), "turn", "tokens per target pass, T=0"),
        "draft-cost-by-context": (dict(_cost_by_context(report)), "context, tokens", "ms per draft"),
        "state-bytes-by-context": (dict(_held_by_context(report)), "context, tokens", "bytes held by the drafter"),
    }
    paths = []
    for picture, (lines, x_label, y_label) in pictures.items():
        paths.append(folder / f"{name}-{picture}.png")
        _picture(lines, paths[-1], title=model, x_label=x_label, y_label=y_label)
    return paths


def _tau_by_turn(report: DrafterReport) -> Iterator[tuple[str, Points]]:
    agents = report.records.of_agents()
    for spec in report.names:
        taus = {turn: agents.tau(spec, "greedy", turn=turn) for turn in TURNS}
        known = {turn: tau for turn, tau in taus.items() if tau is not None}
        yield report.label(spec), (list(known), list(known.values()))


def _cost_by_context(report: DrafterReport) -> Iterator[tuple[str, Points]]:
    for spec, by_context in report.costs.items():
        yield report.label(spec), (list(by_context), [median(cost.draft_ms) for cost in by_context.values()])


def _held_by_context(report: DrafterReport) -> Iterator[tuple[str, Points]]:
    for spec in report.names:
        held = report.records.held(spec)
        held += [(context, cost.held_bytes) for context, cost in report.costs.get(spec, {}).items()]
        held.sort()
        yield report.label(spec), ([context for context, _ in held], [float(num_bytes) for _, num_bytes in held])


def _picture(lines: Mapping[str, Points], path: Path, *, title: str, x_label: str, y_label: str) -> None:
    figure = require_matplotlib().Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.add_subplot()
    for name, (x, y) in lines.items():
        axes.plot(x, y, marker="o", markersize=3, label=name)
    axes.set(title=title, xlabel=x_label, ylabel=y_label)
    axes.set_ylim(bottom=0)
    if lines:
        axes.legend()
    figure.savefig(path, dpi=120)

"""`dlite-agent bench drafters`: the tables and the JSON line of drafters against each other."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dlite_agent.arguments import positive
from dlite_agent.bench.output import (
    add_recorded,
    check_writable,
    finish,
    mismatch_fields,
    print_mismatches,
    stderr_writer,
    with_given,
)
from dlite_agent.config import Settings

if TYPE_CHECKING:
    from dlite_agent.bench.drafters.figures import DrafterReport
    from dlite_agent.bench.drafters.measure import DrafterOptions
    from dlite_agent.bench.drafters.tally import Records


def add_drafters(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `drafters` to the benchmarks."""
    parser = kinds.add_parser("drafters", help="drafters against each other, on held-out sessions")
    add_recorded(parser, limit="so many sessions only, families taking turns", has_excerpt=False)
    parser.add_argument("--drafter", action="append", default=[], metavar="D", help="measure this one; may be repeated")
    parser.add_argument("--quick", action="store_true", help="the short sessions of subset smoke: a few minutes")
    parser.add_argument("--min-prompt", type=positive, metavar="N", help="leave out shorter prompts")
    parser.add_argument("--max-prompt", type=positive, metavar="N", help="leave out longer prompts")
    parser.add_argument("--min-turns", type=positive, metavar="N", help="leave out sessions of fewer turns")
    parser.add_argument("--max-turns", type=positive, metavar="N", help="so many turns of a session, spread evenly")
    parser.add_argument("--no-grammar", action="store_true", help="do not hold tool calls to the tools' schemas")
    parser.add_argument("--repeats", type=int, metavar="N", help="rounds of what is timed apart; 0 leaves that out")
    parser.add_argument(
        "--golden", type=Path, metavar="PATH", help="compare with recorded outputs of DLite checkpoints"
    )
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="draw pictures there; needs matplotlib")
    parser.add_argument("--out", type=Path, metavar="FILE", help="keep finished sessions there; a restart skips them")
    parser.set_defaults(command=_drafters)


def _drafters(arguments: argparse.Namespace, settings: Settings, console: Console) -> int:
    import torch

    from dlite_agent.bench.drafters import measure as drafters
    from dlite_agent.bench.drafters import plots
    from dlite_agent.bench.drafters.figures import headline
    from dlite_agent.bench.report import json_line

    check_writable(arguments.json)
    check_writable(arguments.out)
    if arguments.plots is not None:
        plots.require_matplotlib()
    torch.set_num_threads(settings.threads)
    options = _options(arguments)
    reports = drafters.measure(options, settings=settings, journal_path=arguments.out, say=stderr_writer())
    for model, report in reports.items():
        for table in _tables(model, report):
            console.print(table)
        print_mismatches(console, f"{model}: texts that are not the plain ones", report.records.mismatches())
        if arguments.plots is not None:
            for path in plots.draw(report, arguments.plots, model=model):
                console.print(escape(str(path)), soft_wrap=True, highlight=False)
    figures = {key: float(f"{value:.6g}") for key, value in headline(reports).items()}
    console.print(_figures_table(figures, reports))
    configuration = asdict(options) | {"workloads": str(options.workloads)}
    configuration["golden"] = None if options.golden is None else str(options.golden)
    del configuration["seed"]
    details = {model: _details(report) for model, report in reports.items()}
    finish(json_line("drafters", figures, seed=options.seed, details=details, **configuration), arguments.json)
    wrong = [m for report in reports.values() for m in report.records.mismatches()]
    return 0 if all(mismatch.is_near_tie for mismatch in wrong) else 1


def _options(arguments: argparse.Namespace) -> DrafterOptions:
    from dlite_agent.bench.drafters.measure import QUICK, DrafterOptions

    options = QUICK if arguments.quick else DrafterOptions()
    given = {
        "models": arguments.model and tuple(arguments.model),
        "subset": arguments.subset,
        "num_sessions": arguments.limit,
        "min_turns": arguments.min_turns,
        "max_turns": arguments.max_turns,
        "min_prompt": arguments.min_prompt,
        "max_prompt": arguments.max_prompt,
        "max_tokens": arguments.max_tokens,
        "num_rounds": arguments.repeats,
    }
    return with_given(
        options,
        given,
        drafters=tuple(arguments.drafter),
        workloads=arguments.workloads,
        has_grammar=not arguments.no_grammar,
        golden=arguments.golden,
        seed=arguments.seed,
    )


def _details(report: DrafterReport) -> dict[str, Any]:
    return {**report.as_dict(), "mismatches": [mismatch_fields(m) for m in report.records.mismatches()]}


def _tables(model: str, report: DrafterReport) -> list[Table]:
    """Tabulate one target: reach and cost, memory, tau in all places, changes of turn."""
    tables = [_reach_table(model, report), _memory_table(report), _places_table(report), _changes_table(report)]
    return [table for table in tables if table.row_count]


def _table(*columns: str) -> Table:
    """Return a table whose numbers stay whole: where the screen is narrow, names give way."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for index, column in enumerate(columns):
        table.add_column(column, no_wrap=index > 0, min_width=len(column) if index else None)
    return table


def _by_drafter(title: str, report: DrafterReport) -> Table:
    """Return a table with a column for each drafter."""
    table = Table(title, *(escape(report.label(spec)) for spec in report.names), box=None, padding=(0, 2, 0, 0))
    table.columns[0].no_wrap = True
    return table


def _number(value: float | None, form: str = ".2f") -> str:
    return "-" if value is None else format(value, form)


def _reach_table(model: str, report: DrafterReport) -> Table:
    """Tabulate each drafter's tau, speed and cost over all sessions."""
    from dlite_agent.bench.drafters.sessions import PLAIN

    records, agents = report.records, report.records.of_agents()
    columns = ("tau", "T=1", "tools", "prose", "tok/s", "x plain", "draft ms", "verify ms")
    table = _table(escape(model), *columns)
    plain = records.rate(PLAIN)
    for spec in report.names:
        rate = records.rate(spec)
        table.add_row(
            escape(report.label(spec)),
            _number(records.tau(spec, "greedy")),
            _number(records.tau(spec, "seeded")),
            _number(agents.tau(spec, "greedy", kind="tool")),
            _number(agents.tau(spec, "greedy", kind="prose")),
            _number(rate, ".1f"),
            _number(rate / plain if rate and plain else None),
            _number(records.draft_ms(spec)),
            _number(records.verify_ms(spec)),
        )
    return table


def _memory_table(report: DrafterReport) -> Table:
    """Tabulate what each drafter keeps between turns, and the drafts that were dropped for its faults."""
    table = _table("between turns", "bytes/token", "most kept", "stored", "faults")
    for spec in report.names:
        most = max((num_bytes for _, num_bytes in report.records.held(spec)), default=None)
        faults = sum(record.faults for record in report.records.of(spec))
        per_token = _number(report.records.bytes_per_token(spec), ".0f")
        table.add_row(escape(report.label(spec)), per_token, "-" if most is None else str(most), "0", str(faults))
    return table


def _places_table(report: DrafterReport) -> Table:
    """Tabulate tau by family, turn and context."""
    from dlite_agent.bench.drafters.tally import CONTEXTS, TURNS

    records, agents = report.records, report.records.of_agents()
    table = _by_drafter("tau T=0", report)

    def add(name: str, of: Records, **where: str) -> None:
        taus = [of.tau(spec, "greedy", **where) for spec in report.names]
        if any(tau is not None for tau in taus):
            table.add_row(name, *map(_number, taus))

    for family in records.families:
        add(escape(family), records.of_family(family))
    for turn in TURNS:
        add(f"turn {turn}", agents, turn=turn)
    for context in CONTEXTS:
        add(f"context {context}", records, context=context)
    return table


def _changes_table(report: DrafterReport) -> Table:
    """Tabulate what a draft costs by context, and a change of turn: the time until its first draft is there."""
    table = _by_drafter("ms, tokens", report)
    specs: Sequence[str] = list(report.names)
    for context in next(iter(report.costs.values()), {}):
        costs = [report.costs[spec][context].as_dict() for spec in specs]
        table.add_row(f"draft at {context}", *(_number(cost["draft_ms"]["median"]) for cost in costs))
        table.add_row(f"verify at {context}", *(_number(cost["verify_ms"]["median"]) for cost in costs))
    for change, by_spec in report.changes.items():
        changes: list[Any] = [by_spec[spec].as_dict() for spec in specs]
        table.add_row(change, *(_number(each["total_ms"]["median"], ".1f") for each in changes))
        table.add_row("  over plain", *(_number(each["extra_ms"]["median"], ".1f") for each in changes))
        table.add_row("  the draft", *(_number(each["draft_ms"]["median"], ".1f") for each in changes))
        table.add_row("  rows", *(str(each["rows"]) for each in changes))
    return table


def _figures_table(figures: dict[str, float], reports: dict[str, DrafterReport]) -> Table:
    by_model = {model: report.figures() for model, report in reports.items()}
    table = _table("figure", "value", *map(escape, reports))
    for key, value in figures.items():
        table.add_row(key, f"{value:.4g}", *(_number(each.get(key), ".4g") for each in by_model.values()))
    return table

"""`dlite-agent bench sessions`: the table and the JSON line of stored sessions."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dlite_agent.arguments import positive
from dlite_agent.bench.output import check_writable, figures_table, finish, stderr_writer, with_given
from dlite_agent.config import Settings

if TYPE_CHECKING:
    from dlite_agent.bench.sessions.measure import SessionOptions


def add_sessions_bench(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `sessions` to the benchmarks."""
    parser = kinds.add_parser("sessions", help="stored sessions: crashes, damage, restores, commits, a soak")
    parser.add_argument("--model", metavar="M", help="registry name, folder or hub id, for the speeds")
    parser.add_argument("--only", nargs="+", default=[], metavar="PART", help="crash, speed, soak: these only")
    parser.add_argument("--server", type=Path, metavar="PATH", help="a redis-server or valkey-server program")
    parser.add_argument("--quick", action="store_true", help="a small model, fewer runs, half a minute of soak")
    parser.add_argument("--kind", action="append", default=[], metavar="K", help="this crash only; may be repeated")
    parser.add_argument("--runs", type=positive, metavar="N", help="crashes in all, kinds taking turns")
    parser.add_argument("--seed", type=int, default=0, help="the first crash's (default: %(default)s)")
    parser.add_argument("--tokens", type=positive, metavar="N", help="length of the session that is restored")
    parser.add_argument("--repeats", type=positive, metavar="N", help="how often it is restored")
    parser.add_argument("--soak-minutes", type=float, metavar="M", help="how long the soak is")
    parser.add_argument("--out", type=Path, metavar="FILE", help="keep finished crashes there; a restart skips them")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the JSON line there too")
    parser.set_defaults(command=_sessions)


def _sessions(arguments: argparse.Namespace, settings: Settings, console: Console) -> int:
    import torch

    from dlite_agent.bench.report import json_line
    from dlite_agent.bench.sessions.measure import BARS, measure

    check_writable(arguments.json)
    check_writable(arguments.out)
    torch.set_num_threads(settings.threads)
    options = _options(arguments)
    report = measure(options, settings=settings, journal_path=arguments.out, say=stderr_writer())
    if counters := report.details.get("counters"):
        console.print(_counters_table(counters))
    console.print(figures_table(report.figures, report.spreads, BARS))
    for failure in report.failures:
        console.print(failure, highlight=False, markup=False)
    figures = {key: float(f"{value:.6g}") for key, value in report.figures.items()}
    configuration = asdict(options) | {"server": None if options.server is None else str(options.server)}
    del configuration["seed"]
    details = report.details | {"spreads": report.spreads, "failures": report.failures}
    finish(json_line("sessions", figures, seed=options.seed, details=details, **configuration), arguments.json)
    return 1 if report.failures else 0


def _options(arguments: argparse.Namespace) -> SessionOptions:
    from dlite_agent.bench.sessions.measure import QUICK, SessionOptions

    given = {
        "model": arguments.model,
        "num_runs": arguments.runs,
        "num_tokens": arguments.tokens,
        "num_rounds": arguments.repeats,
        "soak_minutes": arguments.soak_minutes,
    }
    return with_given(
        QUICK if arguments.quick else SessionOptions(),
        given,
        only=tuple(arguments.only),
        server=arguments.server,
        kinds=tuple(arguments.kind),
        seed=arguments.seed,
    )


def _counters_table(counters: dict[str, dict[str, int]]) -> Table:
    """Tabulate what the stores counted, by kind of crash."""
    names = list(dict.fromkeys(name for by_name in counters.values() for name in by_name))
    table = Table("crash", *names, box=None, padding=(0, 2, 0, 0))
    for kind, by_name in counters.items():
        table.add_row(escape(kind), *(str(by_name.get(name, 0)) for name in names))
    return table

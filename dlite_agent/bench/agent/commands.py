"""`dlite-agent bench agent`: the table and the JSON line of agents."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from dlite_agent.arguments import positive
from dlite_agent.bench.output import check_writable, figures_table, finish, stderr_writer, with_given
from dlite_agent.config import Settings

if TYPE_CHECKING:
    from dlite_agent.bench.agent.measure import AgentOptions


def add_agent_bench(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `agent` to the benchmarks."""
    parser = kinds.add_parser("agent", help="agents: sessions live and replayed, kills, broken calls, attacks")
    parser.add_argument("--model", metavar="M", help="registry name, folder or hub id, for sessions")
    parser.add_argument("--drafter", metavar="D", help="what drafts")
    parser.add_argument("--workloads", type=Path, metavar="PATH", help="recorded sessions (default: a small excerpt)")
    parts = "oracle, replay, live, race, kills, malformed, escapes"
    parser.add_argument("--only", nargs="+", default=[], metavar="PART", help=f"{parts}: these only")
    parser.add_argument("--quick", action="store_true", help="a small model, few sessions, three kills")
    parser.add_argument("--tasks", type=positive, metavar="N", help="sessions whose recorded calls are done")
    parser.add_argument("--limit", type=positive, metavar="N", help="sessions replayed")
    parser.add_argument("--live", type=positive, metavar="N", help="sessions run live")
    parser.add_argument("--calls", type=positive, metavar="N", help="model calls of the long session")
    parser.add_argument("--repeats", type=positive, metavar="N", help="how often it is replayed")
    parser.add_argument("--kills", type=positive, metavar="N", help="runs that are killed")
    parser.add_argument("--max-prompt", type=positive, metavar="N", help="where a replay ends")
    parser.add_argument("--max-tokens", type=positive, metavar="N", help="upper bound of tokens per reply")
    parser.add_argument("--seed", type=int, default=0, help="the first kill's (default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="keep finished sessions there; a restart skips them")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the JSON line there too")
    parser.set_defaults(command=_agent)


def _agent(arguments: argparse.Namespace, settings: Settings, console: Console) -> int:
    import torch

    from dlite_agent.bench.agent.measure import bars, measure
    from dlite_agent.bench.report import json_line

    check_writable(arguments.json)
    check_writable(arguments.out)
    torch.set_num_threads(settings.threads)
    options = _options(arguments)
    report = measure(options, settings=settings, journal_path=arguments.out, say=stderr_writer())
    console.print(figures_table(report.figures, report.spreads, bars(options.num_kills)))
    for text in [*report.failures, *(f"left out: {what}: {why}" for what, why in report.skipped.items())]:
        console.print(text, highlight=False, markup=False)
    figures = {key: float(f"{value:.6g}") for key, value in report.figures.items()}
    configuration = asdict(options) | {"workloads": str(options.workloads or "excerpt")}
    del configuration["seed"]
    details = report.details | {"spreads": report.spreads, "failures": report.failures, "skipped": report.skipped}
    finish(json_line("agent", figures, seed=options.seed, details=details, **configuration), arguments.json)
    return 1 if report.failures else 0


def _options(arguments: argparse.Namespace) -> AgentOptions:
    from dlite_agent.bench.agent.measure import QUICK, AgentOptions

    given = {
        "model": arguments.model,
        "drafter": arguments.drafter,
        "num_tasks": arguments.tasks,
        "num_sessions": arguments.limit,
        "num_live": arguments.live,
        "num_calls": arguments.calls,
        "num_rounds": arguments.repeats,
        "num_kills": arguments.kills,
        "max_prompt": arguments.max_prompt,
        "max_tokens": arguments.max_tokens,
    }
    options = QUICK if arguments.quick else AgentOptions()
    return with_given(options, given, only=tuple(arguments.only), workloads=arguments.workloads, seed=arguments.seed)

"""`dlite-agent bench ...`: each kind prints a table for people, then one JSON line for machines."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dlite_agent.arguments import positive
from dlite_agent.bench.agent.commands import add_agent_bench
from dlite_agent.bench.drafters.commands import add_drafters
from dlite_agent.bench.output import (
    add_recorded,
    check_writable,
    finish,
    mismatch_fields,
    print_mismatches,
    stderr_writer,
    with_given,
)
from dlite_agent.bench.sessions.commands import add_sessions_bench
from dlite_agent.config import Settings
from dlite_agent.errors import ConfigError

if TYPE_CHECKING:
    from dlite_agent.bench.contest import Spread
    from dlite_agent.bench.engine import EngineOptions, ModelReport
    from dlite_agent.bench.exact import SessionReport
    from dlite_agent.engine.target import Quantization


def add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `bench` and its kinds to the command line."""
    bench = commands.add_parser("bench", help="measure this machine")
    kinds = bench.add_subparsers(required=True, metavar="WHAT")
    _add_verify(kinds)
    _add_engine(kinds)
    _add_exact(kinds)
    add_drafters(kinds)
    add_sessions_bench(kinds)
    add_agent_bench(kinds)


def _add_verify(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    verify = kinds.add_parser("verify", help="what a verify pass costs, by rows")
    verify.add_argument(
        "--model", default="smollm2-135m", help="registry name, folder or hub id (default: %(default)s)"
    )
    verify.add_argument("--quantize", choices=("int8", "none"), default="none")
    verify.add_argument(
        "--context", type=positive, default=512, help="rows already in the cache (default: %(default)s)"
    )
    verify.add_argument("--repeats", type=positive, default=15, help="timings per figure (default: %(default)s)")
    verify.set_defaults(command=_verify)


def _add_engine(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    engine = kinds.add_parser("engine", help="the engine's figures, also against transformers")
    add_recorded(engine, limit="so many tool-call prompts, and half as many others")
    engine.add_argument("--peers", action="store_true", help="measure transformers' generate too")
    engine.add_argument("--quick", action="store_true", help="fewer and shorter prompts: a few minutes")
    engine.add_argument("--drafter", action="append", default=[], metavar="D", help="measure this drafter too")
    engine.add_argument("--assistant", metavar="M", help="model for transformers' assisted mode")
    engine.add_argument("--max-prompt", type=positive, metavar="N", help="leave out longer prompts")
    engine.add_argument("--repeats", type=positive, metavar="N", help="rounds of everything")
    engine.add_argument("--only", nargs="+", default=[], metavar="KEY", help="these figures only")
    engine.set_defaults(command=_engine)


def _add_exact(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    exact = kinds.add_parser("exact", help="compare speculative with plain texts, every turn of every session")
    add_recorded(exact, limit="the first N sessions only")
    exact.add_argument("--drafter", default="lookup", metavar="D", help="what drafts (default: %(default)s)")
    exact.add_argument("--out", type=Path, metavar="FILE", help="keep finished sessions there; a restart skips them")
    exact.set_defaults(command=_exact)


def _verify(arguments: argparse.Namespace, settings: Settings, console: Console) -> int:
    import torch

    from dlite_agent.bench.report import json_line
    from dlite_agent.bench.verify_cost import ROWS, measure, with_stock_products
    from dlite_agent.engine.target import Target
    from dlite_agent.models import progress_bars, resolve

    torch.set_num_threads(settings.threads)
    with progress_bars() as progress:
        folder = resolve(arguments.model, settings=settings, progress=progress)
    quantize: Quantization | None = "int8" if arguments.quantize == "int8" else None
    calibration = settings.home / "calibration"
    targets = {"ours": Target.load(folder, quantize=quantize, cache_dir=calibration)}
    if arguments.context > (room := targets["ours"].max_positions - ROWS[-1]):
        raise ConfigError(f"--context {arguments.context}; this model has room for {room}")
    if quantize is None:  # int8 is exact, and has no stock products
        targets["stock"] = with_stock_products(Target.load(folder, cache_dir=calibration))
        targets["exact"] = Target.load(folder, exact=True, cache_dir=calibration)
    costs = measure(targets, context=arguments.context, repeats=arguments.repeats)
    table = Table("products", "rows", "median ms", "min", "max", "over our 1 row", box=None, padding=(0, 2, 0, 0))
    plain = costs["ours"][0].median_ms
    figures = {}
    for name, passes in costs.items():
        for cost in passes:
            ratio = cost.median_ms / plain
            figures[f"{name}_{cost.num_rows}_over_1"] = round(ratio, 3)
            numbers = (f"{cost.median_ms:.1f}", f"{cost.min_ms:.1f}", f"{cost.max_ms:.1f}", f"{ratio:.2f}")
            table.add_row(name, str(cost.num_rows), *numbers)
    console.print(table)
    configuration = {"model": arguments.model, "quantize": arguments.quantize, "context": arguments.context}
    print(json_line("verify", figures, **configuration))
    return 0


def _engine(arguments: argparse.Namespace, settings: Settings, console: Console) -> int:
    import torch

    from dlite_agent.bench import engine
    from dlite_agent.bench.report import json_line

    check_writable(arguments.json)
    torch.set_num_threads(settings.threads)
    options = _engine_options(arguments)
    reports = engine.measure(options, settings=settings, say=stderr_writer())
    headline = engine.headline(reports)
    for model, report in reports.items():
        console.print(_rates_table(model, report))
    console.print(_figures_table(headline, reports))
    for model, report in reports.items():
        print_mismatches(console, f"{model}: texts of ours that differ", report.mismatches)
        print_mismatches(console, f"{model}: texts of transformers that are not ours", report.differences)
    figures = {key: round(spread.median, 4) for key, spread in headline.items()}
    configuration = asdict(options) | {"workloads": str(options.workloads or "excerpt")}
    del configuration["seed"]
    details = {model: _details(report) for model, report in reports.items()}
    line = json_line("engine", figures, seed=options.seed, details=details, **configuration)
    finish(line, arguments.json)
    return 0


def _engine_options(arguments: argparse.Namespace) -> EngineOptions:
    from dlite_agent.bench.engine import QUICK, EngineOptions

    options = QUICK if arguments.quick else EngineOptions()
    given = {
        "models": arguments.model and tuple(arguments.model),
        "num_prompts": arguments.limit,
        "max_prompt": arguments.max_prompt,
        "max_tokens": arguments.max_tokens,
        "num_rounds": arguments.repeats,
    }
    return with_given(
        options,
        given,
        has_peers=arguments.peers,
        drafters=tuple(arguments.drafter),
        assistant=arguments.assistant,
        workloads=arguments.workloads,
        subset=arguments.subset,
        only=tuple(arguments.only),
        seed=arguments.seed,
    )


def _rates_table(model: str, report: ModelReport) -> Table:
    """Tabulate the tokens per second of each way of decoding."""
    columns = ("tool_tokens_per_s", "prose_tokens_per_s", "end_to_end_tokens_per_s")
    table = Table(escape(model), "tool calls", "prose", "end to end", "tau", box=None, padding=(0, 2, 0, 0))
    for name, rates in report.rates.items():
        if columns[-1] in rates:
            cells = [_cell(rates[column]) if column in rates else "-" for column in columns]
            table.add_row(name, *cells, f"{rates['tool_tau']:.2f}" if "tool_tau" in rates else "-")
    return table


def _cell(spread: dict[str, float]) -> str:
    return f"{spread['median']:.1f} ({spread['min']:.1f}-{spread['max']:.1f})"


def _figures_table(headline: dict[str, Spread], reports: dict[str, ModelReport]) -> Table:
    from dlite_agent.bench.engine import BARS

    columns = ("figure", "value", "min", "max", "bar", "", *reports)
    table = Table(*columns, box=None, padding=(0, 2, 0, 0))
    for key, spread in headline.items():
        bar = BARS[key]
        by_model = [f"{r.figures[key].median:.2f}" if key in r.figures else "-" for r in reports.values()]
        numbers = [f"{value:.2f}" for value in (spread.median, spread.min, spread.max)]
        table.add_row(key, *numbers, *bar.judged(spread.median), *by_model)
    return table


def _details(report: ModelReport) -> dict[str, Any]:
    """Return what lies behind the figures of one model, for JSON."""
    texts = ("mismatches", "int8_mismatches", "differences")
    return {
        "figures": {key: spread.as_dict() for key, spread in report.figures.items()},
        "rates": report.rates,
        "sizes": report.sizes,
        **{name: [mismatch_fields(mismatch) for mismatch in getattr(report, name)] for name in texts},
    }


def _exact(arguments: argparse.Namespace, settings: Settings, console: Console) -> int:
    from dlite_agent.bench.engine import DEFAULT_MODELS
    from dlite_agent.bench.prompts import recorded_sessions
    from dlite_agent.bench.report import json_line

    check_writable(arguments.json)
    check_writable(arguments.out)
    sessions = recorded_sessions(arguments.workloads, subset=arguments.subset, limit=arguments.limit)
    models = arguments.model or list(DEFAULT_MODELS)
    max_tokens = 64 if arguments.max_tokens is None else arguments.max_tokens
    by_model = {model: _exact_reports(model, sessions, arguments, settings, max_tokens=max_tokens) for model in models}
    columns = ("model", "sessions", "turns", "tokens", "skipped", "mismatches", "near ties")
    table = Table(*columns, box=None, padding=(0, 2, 0, 0))
    for model, reports in by_model.items():
        totals = _totals(reports)
        table.add_row(escape(model), str(len(reports)), *(str(value) for value in totals.values()))
        print_mismatches(console, model, [m for report in reports for m in report.mismatches])
    console.print(table)
    figures = _totals(report for reports in by_model.values() for report in reports)
    configuration = {"models": models, "drafter": arguments.drafter, "max_tokens": max_tokens}
    configuration |= {"workloads": str(arguments.workloads or "excerpt"), "subset": arguments.subset}
    details = {
        model: {"mismatches": [mismatch_fields(m) for report in reports for m in report.mismatches]}
        for model, reports in by_model.items()
    }
    line = json_line("exact", figures, seed=arguments.seed, details=details, **configuration)
    finish(line, arguments.json)
    return 0 if not figures["mismatches"] else 1


def _totals(reports: Iterable[SessionReport]) -> dict[str, int]:
    reports = list(reports)
    found = [mismatch for report in reports for mismatch in report.mismatches]
    return {
        "turns": sum(report.turns for report in reports),
        "tokens": sum(report.tokens for report in reports),
        "skipped": sum(report.skipped for report in reports),
        "mismatches": len(found),
        "near_ties": sum(mismatch.is_near_tie for mismatch in found),
    }


def _exact_reports(
    model: str, sessions: Sequence[Any], arguments: argparse.Namespace, settings: Settings, *, max_tokens: int
) -> list[SessionReport]:
    """Compare all sessions on one model."""
    from dlite_agent import runtime as runtimes
    from dlite_agent.bench.exact import Comparison, compare_sessions, sampling_modes
    from dlite_agent.bench.journal import Journal

    runtime = runtimes.shared_runtime(model, drafter=arguments.drafter, quantize=None, store=None, settings=settings)
    try:
        comparison = Comparison(
            runtime.target,
            runtime.drafter,
            runtime.end_ids,
            max_tokens=max_tokens,
            modes=sampling_modes(arguments.seed),
        )
        configuration = {
            "target": runtime.target.fingerprint,
            "drafter": arguments.drafter,
            "max_tokens": max_tokens,
            "seed": arguments.seed,
        }
        say = stderr_writer()
        return compare_sessions(
            comparison,
            sessions,
            runtime,
            journal=Journal(arguments.out, configuration),
            report=lambda r: say(f"{model}: {r.session}: {r.turns} turns, {len(r.mismatches)} mismatches"),
        )
    finally:
        runtimes.close_all()

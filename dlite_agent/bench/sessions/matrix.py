"""The crash matrix: every way in which stored sessions may be hurt, run with many seeds.

A run is named by its scenario and its seed, and can be repeated by itself. Whatever happens, a reply is token-identical
to that of a cold run, or a typed error came before its first token, and the session can be used afterwards.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from dlite_agent.bench.journal import Journal
from dlite_agent.bench.sessions import crashes, damages, strangers
from dlite_agent.bench.sessions.servers import running
from dlite_agent.bench.sessions.trial import Lab, Trial, TrialReport, quiet_logs

KINDS: Mapping[str, Callable[[Trial], None]] = {
    "worker-killed": crashes.worker_killed,
    "server-killed": crashes.server_killed,
    "connection-cut": crashes.connection_cut,
    "reads-cancelled": crashes.reads_cancelled,
    "replies-shifted": crashes.replies_shifted,
    "replies-stale": crashes.replies_stale,
    "workers-alternate": crashes.workers_alternate,
    "clock-off": crashes.clock_off,
    "memory-short": damages.memory_short,
    "blocks-expired": damages.blocks_expired,
    "record-damaged": damages.record_damaged,
    "record-swapped": damages.record_swapped,
    "head-damaged": damages.head_damaged,
    "weights-changed": strangers.weights_changed,
    "template-changed": strangers.template_changed,
    "tools-changed": strangers.tools_changed,
    "tenants": strangers.tenants,
    "names-alike": strangers.names_alike,
    "names-hostile": strangers.names_hostile,
}


def run_trial(lab: Lab, kind: str, seed: int) -> TrialReport:
    """Do one run; what it raises itself is reported as a session that cannot be used."""
    trial = Trial(lab, kind, seed)
    with quiet_logs():
        try:
            KINDS[kind](trial)
        except Exception as error:  # a run that breaks must not end the others
            trial.unusable.append(f"the run ended with {type(error).__name__}: {error}")
    return trial.report()


def run_matrix(
    binaries: tuple[Path, ...],
    *,
    kinds: Sequence[str],
    num_runs: int,
    seed: int,
    journal: Journal,
    say: Callable[[str], None],
) -> list[TrialReport]:
    """Do the runs that the journal does not hold, kinds taking turns; returns the reports of all."""
    wanted = [(kinds[index % len(kinds)], seed + index // len(kinds)) for index in range(num_runs)]
    found = {(report.kind, report.seed): report for report in map(TrialReport.from_dict, journal.reports())}
    left = [run for run in wanted if run not in found]
    with running(binaries) as servers, tempfile.TemporaryDirectory(prefix="dlite-bench-") as folder:
        lab = Lab(servers, Path(folder))
        for number, (kind, each) in enumerate(left):
            report = run_trial(lab, kind, each)
            journal.add(asdict(report))
            found[kind, each] = report
            if not report.is_fine:
                say("\n".join(describe(report)))
            elif number % 50 == 49:
                say(f"{number + 1} of {len(left)} runs")
    return [found[run] for run in wanted]


def describe(report: TrialReport) -> Iterator[str]:
    """Yield what a failed run saw, and the command that repeats it."""
    yield f"{report.kind}, seed {report.seed}, {report.server}: {report.note}"
    for name in ("wrong", "unusable", "lost"):
        yield from (f"  {name}: {text}" for text in getattr(report, name))
    yield f"  again: dlite-agent bench sessions --only crash --kind {report.kind} --seed {report.seed} --runs 1"


def figures(reports: Sequence[TrialReport]) -> dict[str, float]:
    """Count the runs with wrong texts, with sessions that could not be used, and with lost turns."""
    return {
        "crash_runs": len(reports),
        "crash_wrong": sum(bool(report.wrong) for report in reports),
        "crash_unusable": sum(bool(report.unusable) for report in reports),
        "crash_lost": sum(bool(report.lost) for report in reports),
    }


def counters_by_kind(reports: Sequence[TrialReport]) -> dict[str, dict[str, int]]:
    """Sum what the stores counted, and the typed errors callers saw, by scenario."""
    totals: dict[str, Counter[str]] = {}
    for report in reports:
        total = totals.setdefault(report.kind, Counter())
        total["runs"] += 1
        total["typed errors"] += len(report.errors)
        total.update({name: value for name, value in report.counters.items() if not name.startswith("bytes")})
    return {kind: dict(total) for kind, total in totals.items()}

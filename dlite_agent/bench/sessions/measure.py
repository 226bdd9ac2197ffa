"""The figures of stored sessions, and what each has to be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dlite_agent.bench.engine import Bar
from dlite_agent.bench.journal import Journal
from dlite_agent.bench.sessions.matrix import KINDS, counters_by_kind, describe, figures, run_matrix
from dlite_agent.bench.sessions.servers import find_servers
from dlite_agent.bench.sessions.soak import SoakOptions, soak
from dlite_agent.bench.sessions.speed import SpeedOptions, measure_speed
from dlite_agent.config import Settings
from dlite_agent.errors import ConfigError
from dlite_agent.models import progress_bars, resolve

PARTS = ("crash", "speed", "soak")
BARS = {
    "crash_wrong": Bar(0.0, is_ceiling=True),
    "crash_unusable": Bar(0.0, is_ceiling=True),
    "crash_lost": Bar(0.0, is_ceiling=True),
    "restore_over_prefill": Bar(0.1, is_ceiling=True),
    "restore_wrong": Bar(0.0, is_ceiling=True),
    "commit_visible_ms": Bar(20.0, is_ceiling=True),
    "write_amplification": Bar(1.1, is_ceiling=True),
    "ten_forks_over_one": Bar(1.3, is_ceiling=True),
    "drafter_keys": Bar(0.0, is_ceiling=True),
    "soak_wrong": Bar(0.0, is_ceiling=True),
    "soak_lost": Bar(0.0, is_ceiling=True),
    "soak_errors": Bar(0.0, is_ceiling=True),
    "soak_memory_growth": Bar(1.1, is_ceiling=True),
}


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """What to measure, and how long.

    Attributes:
        model: Registry name, folder or hub id; for the speeds. Crashes and the soak use tiny random weights.
        only: Parts wanted of `PARTS`; empty for all.
        server: A server program; None for the embedded one, and for crashes `redis-server` too, if it is on PATH.
        kinds: Scenarios of the crash matrix; empty for all.
        num_runs: Runs of it, scenarios taking turns.
        num_tokens: Length of the session that is restored.
        num_turns: Turns whose commits are measured.
        num_rounds: How often the session is restored, and computed.
        soak_minutes: Of the soak.
        seed: The first seed of the crash matrix; names tokens and kills elsewhere.
    """

    model: str = "qwen2.5-coder-0.5b"
    only: Sequence[str] = ()
    server: Path | None = None
    kinds: Sequence[str] = ()
    num_runs: int = 228
    num_tokens: int = 4096
    num_turns: int = 8
    num_rounds: int = 3
    soak_minutes: float = 10.0
    seed: int = 0

    def __post_init__(self) -> None:
        for what, given, known in (("part", self.only, PARTS), ("scenario", self.kinds, tuple(KINDS))):
            if unknown := sorted(set(given) - set(known)):
                raise ConfigError(f"no {what} {unknown[0]!r}; expected {', '.join(known)}")

        if not self.soak_minutes > 0:
            raise ConfigError(f"soak_minutes is {self.soak_minutes:g}; expected more than 0")

    def wants(self, part: str) -> bool:
        """Whether a part is wanted."""
        return not self.only or part in self.only


QUICK = SessionOptions(
    model="smollm2-135m", num_runs=2 * len(KINDS), num_tokens=1024, num_turns=3, num_rounds=1, soak_minutes=0.5
)


@dataclass(slots=True)
class SessionsReport:
    """What was measured.

    Attributes:
        figures: Each figure's value.
        spreads: Median, least and most of those that were measured several times.
        details: What lies behind them.
        failures: Descriptions of what went wrong.
    """

    figures: dict[str, float] = field(default_factory=dict)
    spreads: dict[str, dict[str, float]] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)


def measure(
    options: SessionOptions, *, settings: Settings, journal_path: Path | None, say: Callable[[str], None]
) -> SessionsReport:
    """Measure the parts that are wanted, crashes first; `say` is told what is being done."""
    binaries = find_servers(options.server)
    report = SessionsReport()
    if options.wants("crash"):
        _measure_crashes(options, binaries, Journal(journal_path, {"bench": "sessions crash"}), report, say)
    if options.wants("speed"):
        _measure_speed(options, binaries[0], settings, report, say)
    if options.wants("soak"):
        _measure_soak(options, binaries[0], report, say)
    return report


def _measure_crashes(
    options: SessionOptions,
    binaries: tuple[Path, ...],
    journal: Journal,
    report: SessionsReport,
    say: Callable[[str], None],
) -> None:
    kinds = tuple(options.kinds) or tuple(KINDS)
    say(f"{options.num_runs} crashes from seed {options.seed}: {', '.join(kinds)}")
    trials = run_matrix(binaries, kinds=kinds, num_runs=options.num_runs, seed=options.seed, journal=journal, say=say)
    report.figures |= figures(trials)
    report.details["counters"] = counters_by_kind(trials)
    report.details["servers"] = sorted({trial.server for trial in trials})
    report.failures += ["\n".join(describe(trial)) for trial in trials if not trial.is_fine]


def _measure_speed(
    options: SessionOptions, binary: Path, settings: Settings, report: SessionsReport, say: Callable[[str], None]
) -> None:
    with progress_bars() as progress:
        folder = resolve(options.model, settings=settings, progress=progress)
    speed = measure_speed(
        SpeedOptions(folder, settings, options.num_tokens, options.num_turns, options.num_rounds, options.seed),
        binary,
        say=say,
    )
    report.figures |= {name: spread.median for name, spread in speed.figures.items()}
    report.figures["restore_wrong"] = speed.wrong
    report.spreads |= {name: spread.as_dict() for name, spread in speed.figures.items()}
    report.details["speed"] = speed.details


def _measure_soak(options: SessionOptions, binary: Path, report: SessionsReport, say: Callable[[str], None]) -> None:
    soaked = soak(SoakOptions(options.soak_minutes, seed=options.seed), binary, say=say)
    report.figures |= {
        "soak_turns": soaked.num_turns,
        "soak_kills": soaked.num_kills,
        "soak_wrong": len(soaked.wrong),
        "soak_lost": len(soaked.lost),
        "soak_errors": len(soaked.errors),
    }
    growth = soaked.memory_growth()
    if growth is not None:
        report.figures["soak_memory_growth"] = growth
    report.details["soak"] = {
        "sessions": soaked.num_sessions,
        "ended": soaked.num_ended,
        "samples": soaked.samples[:: max(1, len(soaked.samples) // 40)],
    }
    report.failures += [*soaked.wrong, *soaked.lost, *soaked.errors]

"""The figures of agents, and what each has to be. Only sessions that are not held out are used."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dlite_agent.bench.agent.equal import replay_all
from dlite_agent.bench.agent.kills import run_kills
from dlite_agent.bench.agent.live import replay_stalls, run_all_live
from dlite_agent.bench.agent.malformed import MALFORMED, try_malformed
from dlite_agent.bench.agent.oracle import equal_percent, run_oracles
from dlite_agent.bench.agent.race import StockChatModel, long_session, race
from dlite_agent.bench.agent.sessions import dev_sessions, dev_tasks
from dlite_agent.bench.agent.siege import besiege
from dlite_agent.bench.engine import Bar
from dlite_agent.bench.journal import Journal
from dlite_agent.bench.peers import load_stock
from dlite_agent.chat_model import ChatDLite
from dlite_agent.config import Settings
from dlite_agent.errors import ConfigError, MissingDependencyError
from dlite_agent.models import progress_bars, resolve
from dlite_agent.runtime import close_all

PARTS = ("oracle", "replay", "live", "race", "kills", "malformed", "escapes")


def bars(num_kills: int) -> dict[str, Bar]:
    """Return what each figure has to be."""
    return {
        "bfcl_oracle_equal": Bar(100.0, is_ceiling=False),
        "tau2_oracle_equal": Bar(100.0, is_ceiling=False),
        "replay_equal": Bar(100.0, is_ceiling=False),
        "reprefill_per_turn": Bar(1.0, is_ceiling=True),
        "loop_stall_ms": Bar(20.0, is_ceiling=True),
        "session20_over_hf": Bar(0.25, is_ceiling=True),
        "kill_resumed": Bar(num_kills, is_ceiling=False),
        "malformed_bounded": Bar(100.0, is_ceiling=False),
        "escapes": Bar(0.0, is_ceiling=True),
    }


@dataclass(frozen=True, slots=True)
class AgentOptions:
    """What to measure, and how long.

    Attributes:
        model: Registry name, folder or hub id, for sessions live and replayed. Kills use tiny random weights.
        drafter: What drafts.
        only: Parts wanted of `PARTS`; empty for all, where those that lack a package are left out.
        workloads: Folder of recorded sessions; None for the excerpt.
        num_tasks: Sessions of each benchmark whose recorded calls are done; None for all.
        num_sessions: Sessions replayed with speculation on and off.
        num_live: Sessions run live.
        num_calls: Model calls of the long session.
        num_rounds: How often it is replayed.
        num_kills: Runs that are killed.
        max_prompt: Where a replay ends.
        max_tokens: Upper bound of tokens per reply.
        seed: The first kill's.
    """

    model: str = "qwen2.5-coder-0.5b"
    drafter: str = "auto"
    only: Sequence[str] = ()
    workloads: Path | None = None
    num_tasks: int | None = None
    num_sessions: int = 100
    num_live: int = 10
    num_calls: int = 20
    num_rounds: int = 3
    num_kills: int = 50
    max_prompt: int = 12_000
    max_tokens: int = 48
    seed: int = 0

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.only) - set(PARTS)):
            raise ConfigError(f"no part {unknown[0]!r}; expected {', '.join(PARTS)}")

    def wants(self, part: str) -> bool:
        """Whether a part is wanted."""
        return not self.only or part in self.only


QUICK = AgentOptions(
    model="smollm2-135m",
    num_tasks=4,
    num_sessions=2,
    num_live=1,
    num_calls=4,
    num_rounds=1,
    num_kills=3,
    max_prompt=4096,
    max_tokens=16,
)


@dataclass(slots=True)
class AgentReport:
    """What was measured.

    Attributes:
        figures: Each figure's value.
        spreads: Median, least and most of those that were measured several times.
        details: What lies behind them, session by session.
        failures: Descriptions of what went wrong.
        skipped: Parts that could not be measured here, and why.
    """

    figures: dict[str, float] = field(default_factory=dict)
    spreads: dict[str, dict[str, float]] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)


def measure(
    options: AgentOptions,
    *,
    settings: Settings,
    journal_path: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> AgentReport:
    """Measure the parts that are wanted; `say` is told what is being done.

    Raises:
        MissingDependencyError: If a part that was asked for by name needs a package that is not installed.
        ConfigError: If sessions cannot be read.
    """
    bench = _Bench(options, settings, journal_path, say)
    parts: dict[str, Callable[[], None]] = {
        "oracle": bench.oracle,
        "replay": bench.replay,
        "live": bench.live,
        "race": bench.race,
        "kills": bench.kills,
        "malformed": bench.malformed,
        "escapes": bench.escapes,
    }
    try:
        for name in filter(options.wants, PARTS):
            parts[name]()
    finally:
        close_all()
    return bench.report


class _Bench:
    def __init__(
        self, options: AgentOptions, settings: Settings, journal_path: Path | None, say: Callable[[str], None]
    ) -> None:
        self._options = options
        self._settings = settings
        self._journal_path = journal_path
        self._say = say
        self.report = AgentReport()

    def oracle(self) -> None:
        """Do the recorded calls of both benchmarks through our tools."""
        for kind in ("bfcl", "tau2"):
            with self._unless_missing(f"{kind} oracle"):
                tasks = dev_tasks(self._options.workloads, kind)[: self._options.num_tasks]
                if not tasks:
                    self._skip(f"{kind} oracle", "there are no such sessions here; give --workloads")
                    continue
                reports = run_oracles(tasks, journal=self._journal(f"oracle {kind}"), say=self._say)
                self.report.figures[f"{kind}_oracle_equal"] = equal_percent(reports)
                self.report.figures[f"{kind}_oracle_calls"] = sum(each.calls for each in reports)
                self.report.figures[f"{kind}_end_state_equal"] = (
                    100 * sum(each.is_end_equal for each in reports) / len(reports)
                )
                self.report.details[f"{kind}_oracle"] = [asdict(each) for each in reports]
                self.report.failures += [
                    f"{each.session}: {each.equal} of {each.calls} results equal, first: {each.differing}"
                    for each in reports
                    if each.equal < each.calls or not each.is_end_equal
                ]

    def replay(self) -> None:
        """Replay sessions with speculation on and off."""
        options = self._options
        speculative, plain = self._chat(options.drafter), self._chat("null")
        journal = self._journal(
            "replay",
            target=speculative.runtime.target.fingerprint,
            drafter=options.drafter,
            max_prompt=options.max_prompt,
            max_tokens=options.max_tokens,
        )
        reports = replay_all(
            dev_sessions(options.workloads),
            plain,
            speculative,
            num_sessions=options.num_sessions,
            max_prompt=options.max_prompt,
            journal=journal,
            say=self._say,
        )
        if not reports:
            raise ConfigError(f"no session has a prompt of at most {options.max_prompt} tokens; raise --max-prompt")
        self.report.figures["replay_equal"] = 100 * sum(not each.differing for each in reports) / len(reports)
        self.report.figures["replay_sessions"] = len(reports)
        if any(each.append_only for each in reports):
            self.report.figures["reprefill_per_turn"] = max(each.beyond for each in reports)
        self.report.details["replay"] = [asdict(each) for each in reports]
        self.report.failures += [
            f"{each.session}, call {number}: {expected!r} without speculation, {got!r} with it"
            for each in reports
            for number, expected, got in each.differing
        ]

    def live(self) -> None:
        """Run sessions of BFCL live; where its package is not installed, replay one on an event loop."""
        chat = self._chat(self._options.drafter)
        with self._unless_missing("live"):
            tasks = dev_tasks(self._options.workloads, "bfcl")
            tasks = [task for task in tasks if not task.session.added_tools][: self._options.num_live]
            journal = self._journal(
                "live",
                target=chat.runtime.target.fingerprint,
                drafter=self._options.drafter,
                max_tokens=self._options.max_tokens,
            )
            reports = run_all_live(tasks, chat, journal=journal, say=self._say)
            self.report.figures["loop_stall_ms"] = max(each.stall_p99_ms for each in reports)
            self.report.figures["live_sessions"] = len(reports)
            self.report.figures["live_end_state_equal"] = sum(each.is_end_equal for each in reports)
            self.report.details["live"] = [asdict(each) for each in reports]
            return
        session = dev_sessions(self._options.workloads)[0]
        stalls = replay_stalls(session, chat, max_calls=self._options.num_calls)
        self.report.figures["loop_stall_ms"] = stalls.p99_ms
        self.report.details["stalls"] = asdict(stalls)

    def race(self) -> None:
        """Replay one long session by our model and by a stock one."""
        options = self._options
        ours = self._chat(options.drafter)
        with progress_bars() as progress:
            folder = resolve(options.model, settings=self._settings, progress=progress)
        target = ours.runtime.target
        stock = StockChatModel(
            model=load_stock(folder, dtype=target.dtype), runtime=ours.runtime, max_tokens=options.max_tokens
        )
        room = target.max_positions - options.max_tokens
        session = long_session(dev_sessions(options.workloads), ours, calls=options.num_calls, room=room)
        found = race(session, ours, stock, calls=options.num_calls, num_rounds=options.num_rounds, say=self._say)
        self.report.figures["session20_over_hf"] = found.ratio.median
        self.report.figures["session20_calls"] = found.calls
        self.report.spreads["session20_over_hf"] = found.ratio.as_dict()
        self.report.details["race"] = asdict(found)
        del stock
        gc.collect()

    def kills(self) -> None:
        """Kill agents, and resume them."""
        journal = self._journal("kills")
        reports = run_kills(self._options.num_kills, seed=self._options.seed, journal=journal, say=self._say)
        self.report.figures["kill_resumed"] = sum(each.is_resumed for each in reports)
        self.report.details["kills"] = [asdict(each) for each in reports]
        self.report.failures += [f"kill {each.seed}: {fault}" for each in reports for fault in each.faults]

    def malformed(self) -> None:
        """Meet a model whose calls are malformed, kind by kind."""
        reports = [try_malformed(kind) for kind in MALFORMED]
        self.report.figures["malformed_bounded"] = 100 * sum(not each.faults for each in reports) / len(reports)
        self.report.figures["malformed_kinds"] = len(reports)
        self.report.failures += [f"malformed, {each.kind}: {fault}" for each in reports for fault in each.faults]

    def escapes(self) -> None:
        """Attack the tools."""
        found = besiege(say=self._say)
        self.report.figures["escapes"] = len(found.escaped)
        self.report.figures["attacks"] = found.attacks
        self.report.details["siege"] = asdict(found)
        self.report.failures += [f"{name}: {'; '.join(faults)}" for name, faults in found.escaped.items()]
        self.report.failures += [f"{name} was answered {answer!r}" for name, answer in found.unexpected.items()]

    def _chat(self, drafter: str) -> ChatDLite:
        return ChatDLite(
            model=self._options.model,
            drafter=drafter,
            quantize=None,
            max_tokens=self._options.max_tokens,
            settings=self._settings,
        )

    def _journal(self, part: str, **configuration: Any) -> Journal:
        return Journal(self._journal_path, {"bench": f"agent {part}", **configuration})

    def _skip(self, what: str, why: str) -> None:
        self.report.skipped[what] = why
        self._say(f"{what} is left out: {why}")

    @contextmanager
    def _unless_missing(self, what: str) -> Iterator[None]:
        """Leave out what needs a package that is not there, unless it was asked for by name."""
        try:
            yield
        except MissingDependencyError as error:
            if self._options.only:
                raise
            self._skip(what, str(error))

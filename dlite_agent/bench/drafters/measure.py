"""Drafters against each other on held-out sessions: how far they reach, what they cost, what they keep.

For each target and drafter: tau by family, part of the reply, turn and context (`sessions`, `tally`); the time
of a draft by context (`cost`); what a change of turn costs (`turn_changes`); the bytes held between turns
(`held_bytes`). Where several targets are measured, a figure is that of the target it is worst for.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING

from dlite_agent import runtime as runtimes
from dlite_agent.bench import passes
from dlite_agent.bench.contest import OurSide, tap
from dlite_agent.bench.drafters import shift
from dlite_agent.bench.drafters.cost import draft_costs
from dlite_agent.bench.drafters.figures import DrafterReport
from dlite_agent.bench.drafters.held_out import HeldOutSession, held_out_sessions
from dlite_agent.bench.drafters.sessions import PLAIN, Bounds, Contestant, SessionBench, contestant, measure_sessions
from dlite_agent.bench.drafters.tally import Record, Records
from dlite_agent.bench.drafters.turn_changes import TurnChanges
from dlite_agent.bench.journal import Journal
from dlite_agent.config import Settings
from dlite_agent.drafters import golden
from dlite_agent.drafters.history import KINDS
from dlite_agent.drafters.loading import load_drafter, trained_for
from dlite_agent.engine.draft_length import PassCost
from dlite_agent.engine.target import Target
from dlite_agent.errors import ConfigError, DrafterMismatchError

if TYPE_CHECKING:
    from dlite_agent.runtime import Runtime

DEFAULT_MODELS = ("smollm2-135m", "qwen2.5-coder-1.5b")
"""The models that drafters come with the package for."""

_SHIFT_TOKENS = 24
_BETWEEN = (2048, 4096)


@dataclass(frozen=True, slots=True)
class DrafterOptions:
    """What to measure, and how long.

    Attributes:
        models: Registry names, folders or hub ids.
        drafters: What `load_drafter` takes; empty for `default_drafters`. Plain decoding is always among them.
        workloads: Recorded sessions.
        subset: A list of ids among them; None for all held-out sessions.
        num_sessions: The first so many, families taking turns; None for all.
        min_turns: Fewest turns of a session that is measured.
        max_turns: Most turns that are measured of each; None for all.
        min_prompt: Shortest prompt.
        max_prompt: Longest prompt.
        max_tokens: Upper bound of tokens per reply.
        num_rounds: How often costs and turn changes are timed; 0 leaves them out.
        long_context: The long context at which drafts are timed, if the target has room for it.
        change_context: The context whose turns change.
        result_tokens: Length of the tool result that comes behind it.
        has_grammar: Whether tool calls are held to the tools' schemas, as a chat model holds them.
        golden: Folder of reference checkpoints with recorded outputs, or of one; None for no comparison.
        seed: Names the sampling noise.
    """

    models: Sequence[str] = DEFAULT_MODELS
    drafters: Sequence[str] = ()
    workloads: Path | None = None
    subset: str | None = None
    num_sessions: int | None = None
    min_turns: int = 1
    max_turns: int | None = None
    min_prompt: int = 0
    max_prompt: int = 16_000
    max_tokens: int = 64
    num_rounds: int = 5
    long_context: int = passes.LONG_CONTEXT
    change_context: int = 2048
    result_tokens: int = 1000
    has_grammar: bool = True
    golden: Path | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_tokens < 3:
            raise ConfigError(f"max_tokens is {self.max_tokens}; expected at least 3: a first token, a draft, a bonus")
        if self.min_prompt > self.max_prompt:
            raise ConfigError(f"no prompt has from {self.min_prompt} to {self.max_prompt} tokens; lower min_prompt")
        if self.num_rounds < 0:
            raise ConfigError(f"num_rounds is {self.num_rounds}; expected 0 or more")


QUICK = DrafterOptions(
    subset="smoke",
    max_turns=3,
    max_prompt=4096,
    max_tokens=24,
    num_rounds=2,
    change_context=768,
    result_tokens=256,
)


def measure(
    options: DrafterOptions,
    *,
    settings: Settings,
    journal_path: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, DrafterReport]:
    """Measure every model, one after the other.

    Args:
        options: What to measure.
        settings: Where models are.
        journal_path: Keeps finished sessions, so that an interrupted run goes on where it was.
        say: Is told what is being done.

    Raises:
        ConfigError: If there are no such sessions, or no turn of theirs fits.
    """
    sessions = held_out_sessions(
        options.workloads,
        subset=options.subset,
        min_turns=options.min_turns,
        limit=options.num_sessions,
        say=say,
    )
    checks = {} if options.golden is None else {"golden_max_err": golden_error(options.golden)}
    reports = {}
    for model in options.models:
        try:
            runtime = runtimes.shared_runtime(model, drafter=PLAIN, quantize=None, store=None, settings=settings)
            bench = _Bench(runtime, options, settings, say=say)
            reports[model] = bench.measure(sessions, journal_path)
            reports[model].checks |= checks
        finally:
            runtimes.close_all()
            gc.collect()
    if not any(record.turns for report in reports.values() for record in report.records.of(PLAIN)):
        raise ConfigError("no turn has a prompt of those lengths and room for a reply; change min_prompt or max_prompt")
    return reports


def golden_error(folder: Path) -> float:
    """Return the largest error of the reference checkpoints in a folder, or of the one that it is.

    Raises:
        ConfigError: If there is none, or the greedy drafts are not the recorded ones.
    """
    folders = sorted(path.parent for path in [*folder.glob("config.json"), *folder.glob("*/config.json")])
    if not folders:
        raise ConfigError(f"{folder} holds no reference checkpoint; expected config.json, there or one folder below")
    largest = 0.0
    for each in folders:
        report = golden.check(each)
        if not report.drafts_equal:
            raise ConfigError(f"the drafts of {each} are not the recorded ones; see `dlite-agent drafter check`")
        largest = max(largest, report.hidden_error, report.forced_logits_error, report.greedy_logits_error)
    return largest


def default_drafters(target: Target) -> list[str]:
    """Return plain decoding, lookup, each kind of drafter that comes with the package for a target, and its hybrid."""
    trained = [kind for kind in ("dlite", *KINDS) if trained_for(target, kind=kind) is not None]
    return [PLAIN, "lookup", *trained, *(["auto"] if "dlite" in trained else [])]


class _Bench:
    """The drafters of one target."""

    def __init__(
        self, runtime: Runtime, options: DrafterOptions, settings: Settings, *, say: Callable[[str], None]
    ) -> None:
        self._runtime = runtime
        self._target: Target = runtime.target
        self._options = options
        self._settings = settings
        self._tell = say

    def _say(self, text: str) -> None:
        self._tell(f"{self._runtime.name}: {text}")

    def measure(self, sessions: Sequence[HeldOutSession], journal_path: Path | None) -> DrafterReport:
        contestants = self._contestants()
        self._say(f"{len(sessions)} sessions, {len(contestants)} drafters: {', '.join(c.spec for c in contestants)}")
        records = self._measure_sessions(contestants, sessions, journal_path)
        report = DrafterReport({c.spec: c.drafter.name for c in contestants}, Records(records))
        report.pivot_bytes = self._pivot_bytes(contestants)
        ids = self._long_text(sessions)
        if self._options.num_rounds:
            self._measure_costs(report, contestants, ids)
        self._measure_shift(report, contestants, ids)
        return report

    def _contestants(self) -> list[Contestant]:
        """Load the drafters; those made for another target are left out."""
        specs = list(self._options.drafters)
        if not specs:
            specs = default_drafters(self._target)
        cost = PassCost.of(self._target, folder=self._settings.home / "calibration")
        sampling = Bounds(1, 1, seed=self._options.seed).sampling()
        contestants = []
        for spec in dict.fromkeys([PLAIN, *specs]):
            try:
                drafter = load_drafter(spec, self._target)
            except DrafterMismatchError as error:
                self._say(f"{spec} is left out: {error}")
                continue
            contestants.append(contestant(spec, drafter, self._target, cost))
            contestants[-1].warm_up(self._target, list(sampling.values()))
        return contestants

    def _measure_sessions(
        self, contestants: Sequence[Contestant], sessions: Sequence[HeldOutSession], journal_path: Path | None
    ) -> list[Record]:
        options = self._options
        specs = [contestant.spec for contestant in contestants]
        bounds = Bounds(
            options.max_prompt,
            options.max_tokens,
            options.max_turns,
            options.has_grammar,
            options.seed,
            min_prompt=options.min_prompt,
        )
        configuration = {"target": self._target.fingerprint, "drafters": specs, **asdict(bounds)}
        return measure_sessions(
            SessionBench(self._runtime, contestants, bounds),
            sessions,
            specs,
            journal=Journal(journal_path, configuration),
            say=self._say,
        )

    def _pivot_bytes(self, contestants: Sequence[Contestant]) -> int:
        """Return the size of the target's row that a session keeps for the DLite drafter, 0 where there is none."""
        layers = [len(c.layer_ids) for c in contestants if shift.dlite_of(c.drafter) is not None]
        return layers[0] * self._target.hidden_size * self._target.dtype.itemsize if layers else 0

    def _long_text(self, sessions: Sequence[HeldOutSession]) -> list[int]:
        """Return the tokens of some sessions' last prompts, as many as the longest context needs."""
        wanted = max(passes.SHORT_CONTEXT, self._options.long_context, self._options.change_context)
        wanted += self._options.result_tokens
        ids: list[int] = []
        for session in sessions:
            turn = session.turns[-1]
            known = [message for message in turn.messages if message is not None]
            ids += self._runtime.encoder.encode(self._runtime.render(known, turn.tools))
            if len(ids) >= wanted:
                return ids
        return list(islice(cycle(ids), wanted))

    def _measure_costs(self, report: DrafterReport, contestants: Sequence[Contestant], ids: Sequence[int]) -> None:
        options, target = self._options, self._target
        long = min(options.long_context, passes.long_context(target))
        short = min(passes.SHORT_CONTEXT, long // 2)
        contexts = [short, *(context for context in _BETWEEN if short < context < long), long]
        self._say(f"drafts at {', '.join(map(str, contexts))} tokens of context")
        report.costs = draft_costs(target, contestants, ids, contexts=contexts, num_rounds=options.num_rounds)
        room = target.max_positions // 2
        base, result = min(options.change_context, room), min(options.result_tokens, room // 2)
        self._say(f"changes of turn behind {base} tokens, a tool result of {result}")
        changes = TurnChanges(
            target,
            contestants,
            base=ids[:base],
            result=ids[base : base + result],
            load=lambda spec: load_drafter(spec, target),
        )
        report.changes = changes.measure(num_rounds=options.num_rounds)

    def _measure_shift(self, report: DrafterReport, contestants: Sequence[Contestant], ids: Sequence[int]) -> None:
        prompt = ids[: min(passes.SHORT_CONTEXT, self._target.max_positions - 2 * _SHIFT_TOKENS)]
        for each in contestants:
            drafter = shift.dlite_of(each.drafter)
            if drafter is not None:
                tap(self._target, each.layer_ids)
                side = OurSide(self._target, end_ids=frozenset())
                change = shift.largest_change(drafter, side, prompt, max_tokens=_SHIFT_TOKENS)
                report.checks["shift_100k"] = max(change, report.checks.get("shift_100k", 0.0))

"""The figures of drafters on one target, from what was counted and timed.

A figure is there only if the drafters that it compares were measured, and only where there is something to compare
(no turn is the tenth in a short session). Of several drafters of one name, the first counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

from dlite_agent.bench.drafters.cost import Costs
from dlite_agent.bench.drafters.sessions import PLAIN
from dlite_agent.bench.drafters.tally import CONTEXTS, TURNS, Mode, Records
from dlite_agent.bench.drafters.turn_changes import TurnCost

CEILINGS = frozenset(
    ["draft_8k_over_512", "draft_over_verify", "drafter_state_bytes", "shift_100k", "golden_max_err", "mismatches"]
)
"""Figures that are better the smaller they are; the others are better the larger."""

_FIRST_TURN, _LATE_TURN = next(iter(TURNS)), list(TURNS)[-1]
_LONG = list(CONTEXTS)[-1]


@dataclass(slots=True)
class DrafterReport:
    """What was measured on one target.

    Attributes:
        names: The name of each drafter, by what was asked for.
        records: What the sessions gave.
        costs: What drafts cost by context length.
        changes: What turns cost, by change and drafter.
        checks: Figures that are measured on their own.
        pivot_bytes: Size of the one row that a session keeps for a DLite drafter.
    """

    names: dict[str, str]
    records: Records
    costs: Costs = field(default_factory=dict)
    changes: dict[str, dict[str, TurnCost]] = field(default_factory=dict)
    checks: dict[str, float] = field(default_factory=dict)
    pivot_bytes: int = 0

    def spec(self, name: str) -> str | None:
        """Return the first drafter of a name, or None."""
        return next((spec for spec, found in self.names.items() if found == name), None)

    def label(self, spec: str) -> str:
        """Return a short name for people: what was asked for, or the drafter's name and its folder's."""
        return spec if "/" not in spec else f"{self.names[spec]}:{Path(spec).name}"

    def figures(self, mode: Mode = "greedy") -> dict[str, float]:
        """Return the figures; those of tau are of one way of drawing tokens."""
        values = {
            "speed_over_dspark": self._family_ratio("dlite", "dspark"),
            "speed_over_dspark_8k": self._family_ratio("dlite", "dspark", context=_LONG),
            "tau_over_dspark": self._tau_ratio("dlite", "dspark", mode),
            "tau_late_over_first": self.late_over_first("dlite", mode),
            "hybrid_tau_tools": self._tau("hybrid", mode, kind="tool"),
            "hybrid_over_lookup": self._tau_ratio("hybrid", "lookup", mode),
            "hybrid_over_plain": self._rate_ratio("hybrid", PLAIN),
            "draft_8k_over_512": self._long_over_short(),
            "draft_over_verify": self._draft_over_verify(),
            "drafter_state_bytes": self._most_held(),
            "mismatches": float(len(self.records.mismatches())),
        }
        return {key: value for key, value in values.items() if value is not None} | self.checks

    def family_ratios(self, over: str, under: str, **where: str) -> dict[str, float]:
        """Return how many times faster one drafter is than another, by agents' family, at the planner's lengths."""
        agents = self.records.of_agents()
        ratios = {}
        for family in agents.families:
            rates = [agents.of_family(family).rate(spec, **where) for spec in self._pair(over, under)]
            if len(rates) == 2 and rates[0] and rates[1]:
                ratios[family] = rates[0] / rates[1]
        return ratios

    def late_over_first(self, name: str, mode: Mode) -> float | None:
        """Return tau at the last turns over that at the first, in agents' sessions that have both."""
        spec = self.spec(name)
        if spec is None:
            return None
        long = self.records.of_agents().of_sessions_with(_LATE_TURN)
        late, first = (long.tau(spec, mode, turn=turn) for turn in (_LATE_TURN, _FIRST_TURN))
        return late / first if late and first else None

    def as_dict(self) -> dict[str, Any]:
        """Return all that was measured, for JSON."""
        return {
            "names": self.names,
            "figures": self.figures(),
            "figures_seeded": self.figures("seeded"),
            "speed_over_dspark_by_family": self.family_ratios("dlite", "dspark"),
            "hybrid_over_plain_by_family": self.family_ratios("hybrid", PLAIN),
            "tau_late_over_first": {name: self.late_over_first(name, "greedy") for name in self.names.values()},
            "drafters": {spec: self._drafter(spec) for spec in self.names},
            "draft_cost": {
                spec: {str(context): cost.as_dict() for context, cost in by_context.items()}
                for spec, by_context in self.costs.items()
            },
            "turn_changes": {
                change: {spec: cost.as_dict() for spec, cost in by_spec.items()}
                for change, by_spec in self.changes.items()
            },
            "pivot_bytes": self.pivot_bytes,
        }

    def _drafter(self, spec: str) -> dict[str, Any]:
        """Return one drafter's numbers, for JSON."""
        records, agents = self.records, self.records.of_agents()
        modes: tuple[Mode, ...] = ("greedy", "seeded")
        tau = {
            mode: {
                "all": records.tau(spec, mode),
                "agents": agents.tau(spec, mode),
                "by_family": {name: records.of_family(name).tau(spec, mode) for name in records.families},
                "by_kind": {kind: agents.tau(spec, mode, kind=kind) for kind in ("tool", "prose")},
                "by_turn": {turn: agents.tau(spec, mode, turn=turn) for turn in TURNS},
                "by_context": {context: records.tau(spec, mode, context=context) for context in CONTEXTS},
            }
            for mode in modes
        }
        own = list(records.of(spec))
        seconds = sum(record.turn_seconds for record in own)
        return {
            "tau": tau,
            "accepted": _by_position(record.accepted_at for record in own),
            "reached": _by_position(record.reached_at for record in own),
            "drafted": _by_position(record.drafted_at for record in own),
            "draft_ms": {context: records.draft_ms(spec, context=context) for context in CONTEXTS},
            "verify_ms": {context: records.verify_ms(spec, context=context) for context in CONTEXTS},
            "tokens_per_s": records.rate(spec),
            "turn_tokens_per_s": sum(record.turn_tokens for record in own) / seconds if seconds else None,
            "tool_tokens": agents.cell(spec, "greedy", kind="tool").tokens,
            "prose_tokens": agents.cell(spec, "greedy", kind="prose").tokens,
            "held_bytes_per_token": records.bytes_per_token(spec),
            "held_bytes_most": max((num_bytes for _, num_bytes in records.held(spec)), default=None),
            "stored_bytes": 0,  # the session store knows of no drafter: none of its records could hold any of it
            "turns": sum(record.turns for record in own),
            "skipped": sum(record.skipped for record in own),
            "faults": sum(record.faults for record in own),
        }

    def _pair(self, over: str, under: str) -> list[str]:
        """Return the two drafters of these names, or nothing."""
        specs = [self.spec(name) for name in (over, under)]
        return [spec for spec in specs if spec is not None] if None not in specs else []

    def _family_ratio(self, over: str, under: str, **where: str) -> float | None:
        ratios = self.family_ratios(over, under, **where)
        return fmean(ratios.values()) if ratios else None

    def _rate_ratio(self, over: str, under: str) -> float | None:
        rates = [self.records.of_agents().rate(spec) for spec in self._pair(over, under)]
        return rates[0] / rates[1] if len(rates) == 2 and rates[0] and rates[1] else None

    def _tau(self, name: str, mode: Mode, **where: str) -> float | None:
        spec = self.spec(name)
        return None if spec is None else self.records.of_agents().tau(spec, mode, **where)

    def _tau_ratio(self, over: str, under: str, mode: Mode) -> float | None:
        above, below = self._tau(over, mode), self._tau(under, mode)
        return above / below if above and below else None

    def _dlite(self) -> str | None:
        """Return the drafter whose costs count: DLite alone, or what holds it."""
        return self.spec("dlite") or self.spec("hybrid")

    def _long_over_short(self) -> float | None:
        by_context = self.costs.get(self._dlite() or "", {})
        if len(by_context) < 2:
            return None
        short, long = (median(by_context[pick(by_context)].draft_ms) for pick in (min, max))
        return long / short if short else None

    def _draft_over_verify(self) -> float | None:
        spec = self._dlite()
        if spec is None:
            return None
        draft, verify = self.records.draft_ms(spec), self.records.verify_ms(spec)
        return draft / verify if draft is not None and verify else None

    def _most_held(self) -> float | None:
        """Return the most that a drafter of DLite's held between two turns."""
        held = [
            num_bytes
            for name in ("dlite", "hybrid")
            for spec in self.names
            if self.names[spec] == name
            for _, num_bytes in self.records.held(spec)
        ]
        return float(max(held)) if held else None


def _by_position(counts: Iterable[list[int]]) -> list[int]:
    """Add up counts by position of a draft."""
    total: list[int] = []
    for each in counts:
        total += [0] * (len(each) - len(total))
        for k, count in enumerate(each):
            total[k] += count
    return total


def headline(reports: Mapping[str, DrafterReport]) -> dict[str, float]:
    """Return each figure of the target it is worst for; mismatches of all together."""
    by_target = [report.figures() for report in reports.values()]
    keys = dict.fromkeys(key for figures in by_target for key in figures)
    worst: dict[str, float] = {}
    for key in keys:
        pick: Callable[[Iterable[float]], float] = max if key in CEILINGS else min
        worst[key] = pick(figures[key] for figures in by_target if key in figures)
    if by_target:
        worst["mismatches"] = sum(figures["mismatches"] for figures in by_target)
    return worst

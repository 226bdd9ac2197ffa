"""What the target passes of measured sessions gave, counted by where they happened.

A pass is counted where its first token lies: in a tool call or in prose (see `reply_parts`), at that turn of the
session, behind so many tokens of context. The first pass of a reply, prefill's, is not counted. `tau` is the tokens of
some passes over their number; a pass that ends in a drafted end token has no bonus token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Literal

from dlite_agent.bench.exact import Mismatch
from dlite_agent.bench.prompts import Kind
from dlite_agent.engine.request import Step

Mode = Literal["greedy", "seeded", "speed"]
"""Greedy and seeded (temperature 1) draft as much as they can, for tau; speed, greedy too, as the planner chooses."""

TURNS = {"1": 1, "2-4": 4, "5-9": 9, "10+": 1 << 30}
"""Buckets of turns, counted from 1, and the last turn of each."""

CONTEXTS = {"<1k": 999, "1-4k": 3999, "4-8k": 7999, "8k+": 1 << 30}
"""Buckets of context lengths in tokens, and the longest of each."""


def bucket(value: int, buckets: Mapping[str, int]) -> str:
    """Return the name of the bucket that a value falls into."""
    return next(name for name, most in buckets.items() if value <= most)


@dataclass(frozen=True, slots=True)
class Place:
    """Where passes happened: how tokens were drawn, in what part of a reply, at which turn, behind how much context."""

    mode: Mode
    kind: Kind
    turn: str
    context: str


@dataclass(slots=True)
class Cell:
    """The passes of one place.

    Attributes:
        passes: How many.
        tokens: What they gave.
        seconds: How long they took, drafting and all.
        draft_ms: Time to draft, pass by pass.
        verify_ms: Time in the target and in verification, pass by pass.
    """

    passes: int = 0
    tokens: int = 0
    seconds: float = 0.0
    draft_ms: list[float] = field(default_factory=list)
    verify_ms: list[float] = field(default_factory=list)

    def add(self, step: Step, seconds: float) -> None:
        """Count a pass."""
        self.passes += 1
        self.tokens += len(step.tokens)
        self.seconds += seconds
        self.draft_ms.append(round(step.draft_seconds * 1e3, 4))
        self.verify_ms.append(round(step.target_seconds * 1e3, 4))

    def merge(self, other: Cell) -> None:
        """Count another cell's passes too."""
        self.passes += other.passes
        self.tokens += other.tokens
        self.seconds += other.seconds
        self.draft_ms += other.draft_ms
        self.verify_ms += other.verify_ms


@dataclass(slots=True)
class Record:
    """What one drafter did in one session.

    Attributes:
        session: The session's name.
        family: Where it is from.
        is_agent: Whether it is an agent's.
        drafter: The drafter, as it was asked for.
        turns: Turns measured.
        skipped: Turns whose prompt is too short or too long.
        faults: Drafts dropped because the drafter broke its contract.
        cells: Passes by place.
        accepted_at: Of the greedy drafts, how many were accepted at each position.
        reached_at: How many had a token there, and all before it accepted.
        drafted_at: How many had a token there.
        turn_tokens: Tokens of all replies, at the planner's draft lengths.
        turn_seconds: Time of those turns, the new prompt rows included.
        held: After each turn, tokens of context and bytes that the drafter holds for its texts.
        mismatches: Texts that are not the plain ones.
    """

    session: str
    family: str
    is_agent: bool
    drafter: str
    turns: int = 0
    skipped: int = 0
    faults: int = 0
    cells: dict[Place, Cell] = field(default_factory=dict)
    accepted_at: list[int] = field(default_factory=list)
    reached_at: list[int] = field(default_factory=list)
    drafted_at: list[int] = field(default_factory=list)
    turn_tokens: int = 0
    turn_seconds: float = 0.0
    held: list[tuple[int, int]] = field(default_factory=list)
    mismatches: list[Mismatch] = field(default_factory=list)

    def add_lap(
        self, mode: Mode, steps: Sequence[tuple[float, Step]], kinds: Sequence[Kind], *, turn: int, prompt: int
    ) -> None:
        """Count the passes of one reply.

        Args:
            mode: How tokens were drawn and draft lengths chosen.
            steps: The passes and the seconds of each.
            kinds: What each token of the reply is part of.
            turn: Turns before this one.
            prompt: Tokens of the prompt.
        """
        offset = 0
        for number, (seconds, step) in enumerate(steps):
            self.faults += step.num_faults
            if number:
                turn_name, context = bucket(turn + 1, TURNS), bucket(prompt + offset, CONTEXTS)
                self.cells.setdefault(Place(mode, kinds[offset], turn_name, context), Cell()).add(step, seconds)
                if mode == "greedy":
                    self._count_positions(step)
            offset += len(step.tokens)

    def _count_positions(self, step: Step) -> None:
        accepted = len(step.tokens) - step.sources.count("bonus")
        missing = step.num_proposed - len(self.drafted_at)
        for counts in (self.accepted_at, self.reached_at, self.drafted_at):
            counts.extend([0] * missing)
        for k in range(step.num_proposed):
            self.drafted_at[k] += 1
            self.reached_at[k] += k <= accepted
            self.accepted_at[k] += k < accepted

    def as_dict(self) -> dict[str, Any]:
        """Return the record for JSON."""
        others = {name: getattr(self, name) for name in self.__slots__ if name not in ("cells", "mismatches")}
        cells = [{**asdict(place), **asdict(cell)} for place, cell in self.cells.items()]
        return {**others, "cells": cells, "mismatches": [asdict(mismatch) for mismatch in self.mismatches]}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Record:
        """Read a record back.

        Raises:
            LookupError: If a field of a cell is missing.
            TypeError: If one is missing elsewhere, or unknown.
        """
        places = Place.__slots__
        cells = {
            Place(**{name: cell[name] for name in places}): Cell(**{k: v for k, v in cell.items() if k not in places})
            for cell in fields["cells"]
        }
        held = [(context, num_bytes) for context, num_bytes in fields["held"]]
        mismatches = [Mismatch(**mismatch) for mismatch in fields["mismatches"]]
        return cls(**{**fields, "cells": cells, "held": held, "mismatches": mismatches})


class Records:
    """The records of one target, and what follows from them."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.records = list(records)

    def of_agents(self) -> Records:
        """Return those of agents' sessions only."""
        return Records([record for record in self.records if record.is_agent])

    def of_family(self, family: str) -> Records:
        """Return those of one family."""
        return Records([record for record in self.records if record.family == family])

    def of_sessions_with(self, turn: str) -> Records:
        """Return those of sessions that got as far as a bucket of turns."""
        names = {r.session for r in self.records if any(place.turn == turn for place in r.cells)}
        return Records([record for record in self.records if record.session in names])

    @property
    def families(self) -> list[str]:
        """The families there are, in order of their names."""
        return sorted({record.family for record in self.records})

    def of(self, drafter: str) -> Iterator[Record]:
        """Yield the records of one drafter."""
        return (record for record in self.records if record.drafter == drafter)

    def cell(self, drafter: str, mode: Mode, **where: str) -> Cell:
        """Return the passes of a drafter; `where` names buckets by field of `Place`, all where it does not."""
        total = Cell()
        for record in self.of(drafter):
            for place, cell in record.cells.items():
                if place.mode == mode and all(getattr(place, name) == value for name, value in where.items()):
                    total.merge(cell)
        return total

    def tau(self, drafter: str, mode: Mode, **where: str) -> float | None:
        """Return tokens per pass, or None where there was no pass."""
        cell = self.cell(drafter, mode, **where)
        return cell.tokens / cell.passes if cell.passes else None

    def rate(self, drafter: str, **where: str) -> float | None:
        """Return tokens per second at the planner's draft lengths, behind the first pass; None where nothing was."""
        cell = self.cell(drafter, "speed", **where)
        return cell.tokens / cell.seconds if cell.seconds else None

    def draft_ms(self, drafter: str, **where: str) -> float | None:
        """Return the median time to draft, in milliseconds; None where nothing was."""
        values = self.cell(drafter, "greedy", **where).draft_ms
        return median(values) if values else None

    def verify_ms(self, drafter: str, **where: str) -> float | None:
        """Return the median time of a target pass and its verification, in milliseconds; None where nothing was."""
        values = self.cell(drafter, "greedy", **where).verify_ms
        return median(values) if values else None

    def held(self, drafter: str) -> list[tuple[int, int]]:
        """Return tokens of context and bytes held, turn by turn of all sessions."""
        return [pair for record in self.of(drafter) for pair in record.held]

    def bytes_per_token(self, drafter: str) -> float | None:
        """Return the bytes that a drafter holds per token of context; None where nothing was."""
        pairs = self.held(drafter)
        return sum(num_bytes for _, num_bytes in pairs) / sum(context for context, _ in pairs) if pairs else None

    def mismatches(self) -> list[Mismatch]:
        """Return the texts that are not the plain ones."""
        return [mismatch for record in self.records for mismatch in record.mismatches]

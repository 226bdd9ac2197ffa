"""Drafters side by side on recorded sessions: every turn, every drafter, drafting behind rows computed once.

A turn's prompt keeps the rows of the one before. Drafters without a memory of their texts share those rows; one with a
memory has a session of its own, as it would have in use. Each reply is decoded three times by each drafter, and the
drafters alternate: at the planner's draft lengths (first, so that what a new turn costs a drafter is in its time),
then greedily and with a seed, drafting as much as they can. All must give the tokens that plain decoding gives.

Replies are held to the offered tools' grammar as a chat model holds them (`tool_choice="auto"`), and what it forces is
drafted, by every drafter but plain decoding, which drafts nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from langchain_core.messages import AIMessage, AnyMessage

from dlite_agent.bench.contest import OurSide, tap
from dlite_agent.bench.drafters.held_bytes import HeldBytes, StateKeeper
from dlite_agent.bench.drafters.held_out import HeldOutSession
from dlite_agent.bench.drafters.reply_parts import token_kinds
from dlite_agent.bench.drafters.tally import Mode, Record
from dlite_agent.bench.exact import first_difference
from dlite_agent.bench.journal import Journal
from dlite_agent.drafters.protocol import Drafter
from dlite_agent.engine.constraint import TokenConstraint
from dlite_agent.engine.draft_length import AdaptiveLength, PassCost
from dlite_agent.engine.request import Step
from dlite_agent.engine.sampling import SamplingParams
from dlite_agent.engine.target import Target
from dlite_agent.errors import UnsupportedSchemaError

if TYPE_CHECKING:
    from dlite_agent.runtime import Runtime
    from dlite_agent.train.recordings import Turn

PLAIN = "null"
_WARM_UP_IDS = tuple(range(10, 26))
_WARM_UP_TOKENS = 8

Tools = Sequence[Mapping[str, Any]]

Lap = list[tuple[float, Step]]
"""The passes of one reply, and the seconds of each."""


@dataclass(slots=True)
class Contestant:
    """One drafter on one target.

    Attributes:
        spec: The drafter, as it was asked for.
        drafter: The drafter itself.
        layer_ids: The target's layers whose features it reads.
        planner: Its own, so that it learns from its own drafts only.
        held: Counts the bytes that it holds for texts.
    """

    spec: str
    drafter: Drafter
    layer_ids: tuple[int, ...]
    planner: AdaptiveLength
    held: HeldBytes = field(init=False)

    def __post_init__(self) -> None:
        self.held = HeldBytes(self.drafter)

    @property
    def has_memory(self) -> bool:
        """Whether the drafter keeps something about its texts."""
        return isinstance(self.drafter, StateKeeper)

    def warm_up(self, target: Target, sampling: Sequence[SamplingParams]) -> None:
        """Draft a little, so that what all texts share is made, and counted as the drafter's own from then on."""
        tap(target, self.layer_ids)
        side = OurSide(target, end_ids=frozenset())
        ids = [token % target.vocab_size for token in _WARM_UP_IDS] * 2
        for params in sampling:
            side.run(ids, self.drafter, max_tokens=_WARM_UP_TOKENS, sampling=params)
        del side
        self.held = HeldBytes(self.drafter)


def contestant(spec: str, drafter: Drafter, target: Target, cost: PassCost) -> Contestant:
    """Make a contestant of a drafter that was just loaded for a target."""
    return Contestant(spec, drafter, target.layer_ids, AdaptiveLength(cost))


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much of the sessions is measured.

    Attributes:
        max_prompt: Longest prompt.
        max_tokens: Upper bound of tokens per reply.
        max_turns: Most turns of a session, spread evenly; None for all.
        has_grammar: Whether tool calls are held to the tools' schemas.
        seed: Names the sampling noise.
        min_prompt: Shortest prompt. Of the turns taken, the last that is too short is decoded too, but not counted: a
            drafter with a memory comes to the next having read as much as it would have in use.
    """

    max_prompt: int
    max_tokens: int
    max_turns: int | None = None
    has_grammar: bool = True
    seed: int = 0
    min_prompt: int = 0

    def sampling(self) -> dict[Mode, SamplingParams]:
        """Return how tokens are drawn, in the order in which the modes are measured."""
        seeded = SamplingParams(temperature=1.0, seed=self.seed)
        return {"speed": SamplingParams(), "greedy": SamplingParams(), "seeded": seeded}


class SessionBench:
    """Measures all contestants on one session after the other."""

    def __init__(self, runtime: Runtime, contestants: Sequence[Contestant], bounds: Bounds) -> None:
        """Set up; the first contestant must be plain decoding."""
        assert contestants[0].spec == PLAIN
        self._runtime = runtime
        self._contestants = list(contestants)
        self._bounds = bounds
        self._most = min(bounds.max_prompt, runtime.target.max_positions - bounds.max_tokens)

    def measure(self, session: HeldOutSession) -> list[Record]:
        """Measure every contestant on a session; one record each."""
        records, uncounted = self._new_records(session), self._new_records(session)
        sides = self._new_sides()
        replies: dict[int, str] = {}
        before: tuple[int, tuple[int, ...]] | None = None
        for index, ids in self._prompts(session, replies):
            turn = session.turns[index]
            is_counted = self._bounds.min_prompt <= len(ids) <= self._most
            if not is_counted:
                for record in records:
                    record.skipped += 1
                before = (index, ids) if len(ids) <= self._most else None
                if before is None or not session.needs_replies:
                    continue
            elif before is not None:
                self._turn(sides, uncounted, before[1], session.turns[before[0]].tools, turn=before[0])
            before = None
            laps = self._turn(sides, records if is_counted else uncounted, ids, turn.tools, turn=index)
            if is_counted:
                self._take(records, laps, ids, turn.tools, turn=index)
            replies[len(turn.messages)] = self._text(_tokens(laps["speed"][0]))
        return records

    def _new_records(self, session: HeldOutSession) -> list[Record]:
        return [Record(session.id, session.family, session.is_agent, c.spec) for c in self._contestants]

    def _prompts(self, session: HeldOutSession, replies: Mapping[int, str]) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yield the turns to measure and their prompts; `replies` are the target's own, by their place."""
        known: Sequence[int] = ()
        for index in session.chosen_turns(self._bounds.max_turns):
            turn = session.turns[index]
            messages = _filled(turn, replies)
            if messages is None:
                return
            known = self._runtime.encoder.encode(self._runtime.render(messages, turn.tools), known)
            yield index, tuple(known)

    def _text(self, tokens: Sequence[int]) -> str:
        """Return the text of a reply."""
        is_ended = tokens[-1] in self._runtime.end_ids
        return self._runtime.encoder.decode(tokens[: len(tokens) - is_ended])

    def _new_sides(self) -> list[OurSide]:
        """Return each contestant's session; those without a memory share one."""
        target, end_ids = self._runtime.target, self._runtime.end_ids
        shared = OurSide(target, end_ids=end_ids)
        return [OurSide(target, end_ids=end_ids) if c.has_memory else shared for c in self._contestants]

    def _turn(
        self, sides: Sequence[OurSide], records: Sequence[Record], ids: Sequence[int], tools: Tools, *, turn: int
    ) -> dict[Mode, list[Lap]]:
        """Let every contestant decode the reply in every mode; returns laps by mode in the contestants' order."""
        prefill_seconds: dict[int, float] = {}
        for side, contestant in zip(sides, self._contestants, strict=True):
            if id(side) not in prefill_seconds:
                tap(side.target, contestant.layer_ids)
                prefill_seconds[id(side)] = side.extend(ids, contestant.drafter)
        laps: dict[Mode, list[Lap]] = {}
        order = [(turn + i) % len(sides) for i in range(len(sides))]
        for mode, sampling in self._bounds.sampling().items():
            found: dict[int, Lap] = {}
            for index in order:
                if mode == "greedy" and self._contestants[index].spec == PLAIN:
                    found[index] = laps["speed"][index]  # it has no draft lengths to choose
                    continue
                contestant, constraint = self._contestants[index], self._constraint(tools)
                found[index] = self._lap(
                    sides[index], contestant, ids, mode=mode, sampling=sampling, held_to=constraint
                )
            laps[mode] = [found[index] for index in range(len(sides))]
        for index, record in enumerate(records):
            lap = laps["speed"][index]
            record.turn_tokens += sum(len(step.tokens) for _, step in lap)
            record.turn_seconds += prefill_seconds[id(sides[index])] + sum(seconds for seconds, _ in lap)
        return laps

    def _lap(
        self,
        side: OurSide,
        contestant: Contestant,
        ids: Sequence[int],
        *,
        mode: Mode,
        sampling: SamplingParams,
        held_to: TokenConstraint | None,
    ) -> Lap:
        """Decode one reply."""
        tap(side.target, contestant.layer_ids)
        planner = contestant.planner if mode == "speed" else None
        options: dict[str, Any] = {"max_tokens": self._bounds.max_tokens, "sampling": sampling, "planner": planner}
        options |= {"constraint": held_to} | ({"max_draft": 0} if contestant.spec == PLAIN else {})
        lap: Lap = []
        before = time.perf_counter()
        for step in side.steps(ids, contestant.drafter, **options):
            now = time.perf_counter()
            lap.append((now - before, step))
            before = now
        return lap

    def _constraint(self, tools: Tools) -> TokenConstraint | None:
        """Return what holds a reply, or None where nothing does or can."""
        if not tools or not self._bounds.has_grammar:
            return None
        try:
            dialect = self._runtime.template.dialect
            constraint: TokenConstraint = self._runtime.grammars.tool_call(tools, choice="auto", dialect=dialect)
            return constraint
        except UnsupportedSchemaError:
            return None

    def _take(
        self,
        records: Sequence[Record],
        laps: Mapping[Mode, list[Lap]],
        ids: Sequence[int],
        tools: Tools,
        *,
        turn: int,
    ) -> None:
        """Count the laps of one turn, and compare their tokens with plain decoding's."""
        for contestant, record in zip(self._contestants, records, strict=True):
            record.turns += 1
            record.held.append((len(ids), contestant.held()))
        for mode, sampling in self._bounds.sampling().items():
            expected = _tokens(laps[mode][0])
            kinds = token_kinds(expected, self._runtime, tools)
            for record, lap in zip(records, laps[mode], strict=True):
                tokens = _tokens(lap)
                same = kinds if tokens == expected else token_kinds(tokens, self._runtime, tools)
                record.add_lap(mode, lap, same, turn=turn, prompt=len(ids))
                found = first_difference(self._runtime.target, ids, expected, tokens, sampling=sampling)
                if found is not None:
                    named = replace(found, session=record.session, turn=turn, mode=f"{mode}, {record.drafter}")
                    record.mismatches.append(named)


def _tokens(lap: Lap) -> list[int]:
    return [token for _, step in lap for token in step.tokens]


def _filled(turn: Turn, replies: Mapping[int, str]) -> list[AnyMessage] | None:
    """Put the target's own replies where the conversation needs them; None if one was not measured."""
    messages: list[AnyMessage] = []
    for place, message in enumerate(turn.messages):
        if message is None and place not in replies:
            return None
        messages.append(AIMessage(replies[place]) if message is None else message)
    return messages


def measure_sessions(
    bench: SessionBench,
    sessions: Sequence[HeldOutSession],
    specs: Sequence[str],
    *,
    journal: Journal,
    say: Callable[[str], None],
) -> list[Record]:
    """Measure the sessions that the journal does not have; returns the records of all.

    Only times that were measured together are compared: a session that lacks a drafter's record is measured again with
    all of them, and the journal's configuration must say which ones those are.
    """
    finished = _finished(journal)
    records: list[Record] = []
    for number, session in enumerate(sessions, start=1):
        known = finished.get(session.id, {})
        if not known.keys() >= set(specs):
            measured = bench.measure(session)
            for record in measured:
                journal.add(record.as_dict())
            known = {record.drafter: record for record in measured}
            num_wrong = sum(len(record.mismatches) for record in measured)
            counts = f"{measured[0].turns} turns, {measured[0].skipped} left out, {num_wrong} mismatches"
            say(f"{number} of {len(sessions)}: {session.id}: {counts}")
        records += [known[spec] for spec in specs]
    return records


def _finished(journal: Journal) -> dict[str, dict[str, Record]]:
    """Return the journal's records by session and drafter; of equal ones the latest."""
    finished: dict[str, dict[str, Record]] = {}
    for fields in journal.reports():
        try:
            record = Record.from_dict(fields)
        except (LookupError, TypeError):
            continue
        finished.setdefault(record.session, {})[record.drafter] = record
    return finished

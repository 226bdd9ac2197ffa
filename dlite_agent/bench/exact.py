"""Does speculation change the text? Every assistant turn of recorded sessions, plain against speculative.

Each turn is decoded four times behind the same prompt rows: greedily and with a seed, plain and speculative. The two
ways of drawing share their passes, which are packed and have other numbers of rows, plain or speculative. What differs
is listed with the distance between the two best tokens there, from a pass of its own over all tokens before: where that
is tiny, rounding alone can turn the choice (a near tie). A near tie counts like any other mismatch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from dlite_agent.bench.contest import OurSide
from dlite_agent.bench.journal import Journal
from dlite_agent.bench.prompts import session_prompts
from dlite_agent.drafters.null import NullDrafter
from dlite_agent.drafters.protocol import Drafter
from dlite_agent.engine.decode import PREFILL_CHUNK, run_pass
from dlite_agent.engine.draft_length import FixedLength
from dlite_agent.engine.sampling import SamplingParams, gumbel_noise, kept_tokens
from dlite_agent.engine.target import Target
from dlite_agent.recorded import RecordedSession

if TYPE_CHECKING:
    from dlite_agent.runtime import Runtime

NEAR_TIE = 1e-4


def sampling_modes(seed: int) -> dict[str, SamplingParams]:
    """Return the ways of drawing tokens that are compared."""
    return {"greedy": SamplingParams(), "seeded": SamplingParams(temperature=0.8, top_p=0.95, seed=seed)}


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The first token at which two texts of a prompt differ.

    Attributes:
        session: The recorded session.
        turn: Assistant turns before it.
        mode: How tokens were drawn.
        position: Tokens generated before it.
        expected: The first text's token there, or None where that text had ended.
        got: The other text's token.
        gap: Distance between the two best tokens' scores; None if there was but one to choose from.
    """

    session: str
    turn: int
    mode: str
    position: int
    expected: int | None
    got: int | None
    gap: float | None

    @property
    def is_near_tie(self) -> bool:
        """Whether rounding alone can have turned the choice."""
        return self.gap is not None and self.gap < NEAR_TIE


@dataclass(frozen=True, slots=True)
class SessionReport:
    """What was compared in one session.

    Attributes:
        session: Its name.
        turns: Prompts compared, each in all modes.
        tokens: Tokens of the plain texts.
        skipped: Prompts that leave the model no room.
        mismatches: Texts that differ.
    """

    session: str
    turns: int = 0
    tokens: int = 0
    skipped: int = 0
    mismatches: tuple[Mismatch, ...] = ()


@dataclass(frozen=True, slots=True)
class Comparison:
    """What is compared with what, on one target.

    Attributes:
        target: The target.
        drafter: The drafter of the speculative texts.
        end_ids: Tokens that end a text.
        max_tokens: Upper bound of tokens of a text.
        modes: How tokens are drawn.
    """

    target: Target
    drafter: Drafter
    end_ids: frozenset[int]
    max_tokens: int
    modes: Mapping[str, SamplingParams] = field(default_factory=lambda: sampling_modes(0))

    def session(self, session: RecordedSession, runtime: Runtime) -> SessionReport:
        """Compare every turn of a session; a turn's prompt keeps the rows of the one before as far as they agree."""
        sides = self.sides()
        report = SessionReport(session.id)
        for prompt in session_prompts(session, runtime):
            if len(prompt.ids) > self.target.max_positions - self.max_tokens:
                report = replace(report, skipped=report.skipped + 1)
                continue
            num_tokens, found = self.prompt(sides, prompt.ids)
            named = tuple(replace(m, session=prompt.session_id, turn=prompt.turn) for m in found)
            report = replace(
                report,
                turns=report.turns + 1,
                tokens=report.tokens + num_tokens,
                mismatches=report.mismatches + named,
            )
        return report

    def sides(self) -> list[OurSide]:
        """Return a side for each mode, without rows."""
        return [OurSide(self.target, end_ids=self.end_ids) for _ in self.modes]

    def prompt(self, sides: Sequence[OurSide], ids: Sequence[int]) -> tuple[int, list[Mismatch]]:
        """Compare the texts of one prompt in every mode; returns the tokens compared and what differs."""
        sides[0].extend(ids)
        for side in sides[1:]:
            side.follow(sides[0], ids)
        plain = self._texts(sides, ids, NullDrafter())
        speculative = self._texts(sides, ids, self.drafter)
        found = []
        for (mode, sampling), expected, got in zip(self.modes.items(), plain, speculative, strict=True):
            mismatch = first_difference(self.target, ids, expected, got, sampling=sampling)
            if mismatch is not None:
                found.append(replace(mismatch, mode=mode))
        return sum(map(len, plain)), found

    def _texts(self, sides: Sequence[OurSide], ids: Sequence[int], drafter: Drafter) -> list[list[int]]:
        """Decode in every mode, in passes that serve all."""
        decodings = [
            side.decoding(ids, drafter, max_tokens=self.max_tokens, sampling=sampling)
            for side, sampling in zip(sides, self.modes.values(), strict=True)
        ]
        while unfinished := [decoding for decoding in decodings if not decoding.is_done]:
            alone = [decoding for decoding in unfinished if decoding.needs_own_pass]
            run_pass(self.target, alone[:1] or unfinished, FixedLength())
        for decoding in decodings:
            if decoding.error is not None:
                raise decoding.error
        return [decoding.state.ids[len(ids) :].tolist() for decoding in decodings]


def first_difference(
    target: Target, ids: Sequence[int], expected: Sequence[int], got: Sequence[int], *, sampling: SamplingParams
) -> Mismatch | None:
    """Return where two texts of a prompt part, or None where they do not."""
    if tuple(expected) == tuple(got):
        return None
    shared = min(len(expected), len(got))
    position = next((i for i in range(shared) if expected[i] != got[i]), shared)
    gap = gap_between_best(target, [*ids, *expected[:position]], sampling)
    return Mismatch("", 0, "", position, _at(expected, position), _at(got, position), gap)


def _at(tokens: Sequence[int], position: int) -> int | None:
    return tokens[position] if position < len(tokens) else None


def gap_between_best(target: Target, ids: Sequence[int], sampling: SamplingParams) -> float | None:
    """Return how far apart the two best tokens behind `ids` score, from a fresh pass; None if only one can be drawn."""
    cache = target.new_cache()
    logits = torch.empty(0)
    for start in range(0, len(ids), PREFILL_CHUNK):
        logits = target.forward(ids[start : start + PREFILL_CHUNK], cache).logits[-1]
    scores = logits.double()
    if not sampling.is_greedy:
        kept, log_p = kept_tokens(logits, sampling)
        scores = log_p + gumbel_noise(kept, seed=sampling.seed, position=len(ids))
    if len(scores) < 2:
        return None
    best, second = torch.topk(scores, 2).values.tolist()
    return float(best - second)


def finished_sessions(journal: Journal) -> dict[str, SessionReport]:
    """Return the reports of a journal by session; lines that are none are left out."""
    finished = {}
    for fields in journal.reports():
        try:
            fields["mismatches"] = tuple(Mismatch(**mismatch) for mismatch in fields["mismatches"])
            finished[fields["session"]] = SessionReport(**fields)
        except (LookupError, TypeError):
            continue
    return finished


def compare_sessions(
    comparison: Comparison,
    sessions: Iterable[RecordedSession],
    runtime: Runtime,
    *,
    journal: Journal,
    report: Callable[[SessionReport], None] = lambda report: None,
) -> list[SessionReport]:
    """Compare sessions that the journal has not, and add them to it; returns the reports of all."""
    finished = finished_sessions(journal)
    reports = []
    for session in sessions:
        if session.id not in finished:
            done = comparison.session(session, runtime)
            journal.add(asdict(done))
            report(done)
            finished[session.id] = done
        reports.append(finished[session.id])
    return reports

"""Sessions replayed with speculation on and off: the same text, and no token computed twice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dlite_agent.bench.agent.replay import CallNotes, ReplayedCall, replay
from dlite_agent.bench.journal import Journal
from dlite_agent.chat_model import ChatDLite
from dlite_agent.recorded import RecordedSession


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """What two replays of a session gave.

    Attributes:
        session: Its name.
        calls: Model calls.
        num_prompt: Tokens of all prompts.
        num_prefilled: Tokens computed, with speculation.
        num_generated: Tokens of all replies, with speculation.
        append_only: Calls whose prompt continues the one before.
        beyond: Of those, the most tokens that were computed though they were not new.
        differing: Calls whose text is another with speculation: number, text without, text with.
    """

    session: str
    calls: int
    num_prompt: int
    num_prefilled: int
    num_generated: int
    append_only: int
    beyond: int
    differing: tuple[tuple[int, str, str], ...] = ()

    @classmethod
    def of(cls, session: str, plain: Sequence[ReplayedCall], speculative: Sequence[ReplayedCall]) -> ReplayReport:
        """Compare two replays, call by call."""
        pairs = enumerate(zip(plain, speculative, strict=False))
        differing = [(number, one.raw, other.raw) for number, (one, other) in pairs if one.raw != other.raw]
        if len(plain) != len(speculative):
            differing.append((-1, f"{len(plain)} calls", f"{len(speculative)} calls"))
        continued = [call for call in (*plain, *speculative) if call.is_append_only]
        return cls(
            session,
            calls=len(speculative),
            num_prompt=sum(call.num_prompt for call in speculative),
            num_prefilled=sum(call.num_prefilled for call in speculative),
            num_generated=sum(call.num_generated for call in speculative),
            append_only=sum(call.is_append_only for call in speculative),
            beyond=max((call.num_beyond for call in continued), default=0),
            differing=tuple(differing),
        )

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> ReplayReport:
        """Read a report of a journal."""
        return cls(**{**fields, "differing": tuple(tuple(each) for each in fields["differing"])})


def replay_twice(
    session: RecordedSession, plain: ChatDLite, speculative: ChatDLite, *, max_prompt: int
) -> ReplayReport:
    """Replay a session without and with speculation, each in a session of its own."""
    calls = []
    for name, chat in (("plain", plain), ("speculative", speculative)):
        notes = CallNotes(chat.runtime, max_prompt)
        asyncio.run(replay(session, chat, thread_id=f"{session.id} {name}", notes=notes))
        calls.append(notes.calls)
    return ReplayReport.of(session.id, *calls)


def replay_all(
    sessions: Sequence[RecordedSession],
    plain: ChatDLite,
    speculative: ChatDLite,
    *,
    num_sessions: int,
    max_prompt: int,
    journal: Journal,
    say: Callable[[str], None],
) -> list[ReplayReport]:
    """Replay the first so many sessions that have a call with room; those of the journal are not replayed again."""
    finished = {report.session: report for report in map(ReplayReport.from_dict, journal.reports())}
    reports: list[ReplayReport] = []
    for session in sessions:
        if len(reports) == num_sessions:
            break
        report = finished.get(session.id)
        if report is None:
            report = replay_twice(session, plain, speculative, max_prompt=max_prompt)
            journal.add(asdict(report))
            say(f"{session.id}: {report.calls} calls replayed, {len(report.differing)} texts differ")
        if report.calls:
            reports.append(report)
    return reports

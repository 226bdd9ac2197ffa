"""What a run tells its view, beside the events of the turns themselves (`dlite_agent.agent.events`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from dlite_agent.agent.events import AgentEvent

Outcome = Literal["done", "stopped", "failed", "waiting"]


@dataclass(frozen=True, slots=True)
class StartEvent:
    """A conversation that begins or goes on.

    Attributes:
        thread: Its name.
        workspace: The folder its tools may use.
        model: The target.
        num_turns: Messages of the person so far.
        stored_tokens: Tokens whose rows the session store should have.
        is_cut: Whether the last turn did not end; it is closed before the next one begins.
    """

    thread: str
    workspace: str
    model: str
    num_turns: int
    stored_tokens: int
    is_cut: bool


@dataclass(frozen=True, slots=True)
class ResumedEvent:
    """What the first call of a resumed conversation cost: tokens restored from the store, and computed again."""

    restored: int
    computed_again: int


@dataclass(frozen=True, slots=True)
class MessageEvent:
    """A message of the person, whose turn begins."""

    text: str


@dataclass(frozen=True, slots=True)
class ApprovalEvent:
    """A tool call that waits for a decision."""

    id: str
    name: str
    args: dict[str, Any]


@dataclass(frozen=True, slots=True)
class TurnEndEvent:
    """The end of a turn: "waiting" is one whose question is still open, `stats` are `Figures.as_json`."""

    outcome: Outcome
    stats: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ErrorEvent:
    """What went wrong; a fatal error ends the run."""

    kind: str
    message: str
    is_fatal: bool = False


@dataclass(frozen=True, slots=True)
class NoteEvent:
    """A line for the person."""

    text: str


@dataclass(frozen=True, slots=True)
class HelpEvent:
    """The commands, and what each does."""

    commands: dict[str, str]


@dataclass(frozen=True, slots=True)
class ToolsEvent:
    """The tools: objects with `name`, `what` and `is_asked` (whether its calls wait for a decision)."""

    tools: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class StatsEvent:
    """`Figures.as_json` of the last turn and of the conversation."""

    last_turn: dict[str, Any]
    in_all: dict[str, Any]


@dataclass(frozen=True, slots=True)
class SessionsEvent:
    """Stored sessions: objects with `thread`, `num_turns`, `num_tokens`, `num_bytes` and `last_turn_at`."""

    sessions: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class ForkedEvent:
    """A new thread that the conversation goes on in.

    Attributes:
        thread: Its name.
        origin: The thread it has its history from; nothing changed there.
        num_tokens: Tokens of the stored session that it shares, 0 if there is none.
        num_records: Records of that session; none was copied.
    """

    thread: str
    origin: str
    num_tokens: int
    num_records: int


@dataclass(frozen=True, slots=True)
class UndoneEvent:
    """A message that was taken back.

    Attributes:
        text: The message.
        num_turns: Messages of the person that are left.
        checkpoint: Where the thread was; `/fork NAME CHECKPOINT` goes on from there.
    """

    text: str
    num_turns: int
    checkpoint: str


@dataclass(frozen=True, slots=True)
class EndEvent:
    """The end of the run, and the command that takes the conversation up again."""

    resume_with: str


RunEvent = (
    AgentEvent
    | StartEvent
    | ResumedEvent
    | MessageEvent
    | ApprovalEvent
    | TurnEndEvent
    | ErrorEvent
    | NoteEvent
    | HelpEvent
    | ToolsEvent
    | StatsEvent
    | SessionsEvent
    | ForkedEvent
    | UndoneEvent
    | EndEvent
)

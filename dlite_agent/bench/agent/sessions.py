"""The recorded sessions that the agent benchmark uses: none that is held out for measuring drafters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, SystemMessage, ToolMessage

from dlite_agent.bench.prompts import EXCERPT
from dlite_agent.environments import LiveTask, read_live_tasks
from dlite_agent.errors import ConfigError
from dlite_agent.recorded import RecordedSession, read_sessions, taking_turns
from dlite_agent.train.split import held_out_groups, read_groups, read_listed_ids


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """What one run of an agent's graph replays.

    Attributes:
        given: The messages it is given: what the user says, and what stands before the first such message.
        replies: What the assistant said, one a model call.
        results: Tool results by the id of their call.
        tools: The tools that are offered.
    """

    given: tuple[AnyMessage, ...]
    replies: tuple[AIMessage, ...]
    results: dict[str, ToolMessage]
    tools: list[dict[str, Any]]


def dev_sessions(workloads: Path | None) -> list[RecordedSession]:
    """Read the sessions that are not held out, families taking turns; those of the excerpt without a folder.

    Raises:
        ConfigError: If nothing can be read.
    """
    held_out = held_out_ids(workloads)
    sessions = [
        session
        for session in read_sessions(workloads or EXCERPT)
        if session.id not in held_out and any(isinstance(message, AIMessage) for message in session.messages[1:])
    ]
    return taking_turns(sessions, family=lambda session: session.id.split("/", 1)[0])


def dev_tasks(workloads: Path | None, kind: str) -> list[LiveTask]:
    """Read the sessions of a benchmark that can be run live and are not held out."""
    held_out = held_out_ids(workloads)
    tasks = read_live_tasks(workloads or EXCERPT)
    return [task for task in tasks if task.kind == kind and task.session.id not in held_out]


def held_out_ids(workloads: Path | None) -> frozenset[str]:
    """Return the held-out sessions of a folder; of the excerpt there are none."""
    if workloads is None:
        return frozenset()
    if not workloads.is_dir():
        raise ConfigError(f"{workloads} is no folder; give the one with agent/*.jsonl and subsets.json")
    groups = read_groups(workloads)
    held_out = held_out_groups(groups, read_listed_ids(workloads))
    return frozenset(name for name, group in groups.items() if group in held_out)


def split_turns(session: RecordedSession, *, max_calls: int | None = None) -> Iterator[RecordedTurn]:
    """Yield what the graph is run with, one after the other, at most `max_calls` replies in all."""
    messages = [message for message in session.messages if not isinstance(message, SystemMessage)]
    offset = len(session.messages) - len(messages)
    left = len(messages) if max_calls is None else max_calls
    at = 0
    while at < len(messages) and left > 0:
        start = _first_reply(messages, at)
        end = _next_user(messages, start)
        replies = tuple(message for message in messages[start:end] if isinstance(message, AIMessage))[:left]
        results = {m.tool_call_id: m for m in messages[start:end] if isinstance(m, ToolMessage)}
        left -= len(replies)
        if replies:
            yield RecordedTurn(tuple(messages[at:start]), replies, results, session.tools_at(start + offset))
        at = end


def _first_reply(messages: Sequence[AnyMessage], at: int) -> int:
    """Return where the first reply behind a user's message stands, or the end."""
    user = _next_user(messages, at)
    return next((i for i in range(user, len(messages)) if isinstance(messages[i], AIMessage)), len(messages))


def _next_user(messages: Sequence[AnyMessage], at: int) -> int:
    return next((i for i in range(at, len(messages)) if isinstance(messages[i], HumanMessage)), len(messages))

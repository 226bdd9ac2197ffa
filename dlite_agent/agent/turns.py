"""Reading a conversation: what happened since the person last spoke."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage


@dataclass(frozen=True, slots=True)
class DoneCall:
    """A tool call of this turn and its result."""

    name: str
    canonical_args: str
    result: ToolMessage


def canonical(args: Mapping[str, Any]) -> str:
    """Return arguments as text that does not depend on key order."""
    return json.dumps(args, sort_keys=True, default=str)


def calls_of_turn(messages: Sequence[BaseMessage]) -> list[DoneCall]:
    """Return the calls that have results since the last human message, oldest first."""
    start = next((i for i in range(len(messages) - 1, -1, -1) if isinstance(messages[i], HumanMessage)), -1)
    turn = messages[start + 1 :]
    results = {message.tool_call_id: message for message in turn if isinstance(message, ToolMessage)}
    calls = [call for message in turn if isinstance(message, AIMessage) for call in message.tool_calls]
    return [
        DoneCall(call["name"], canonical(call["args"]), results[call["id"]]) for call in calls if call["id"] in results
    ]

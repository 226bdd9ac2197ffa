"""Reading a conversation: what happened since the person last spoke."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, InvalidToolCall, ToolCall, ToolMessage
from langgraph.types import Command

ENDED_BY = "dlite_ended_by"
"""Key in `additional_kwargs` of an AI message that was not written by the model: why the turn was ended."""


@dataclass(frozen=True, slots=True)
class DoneCall:
    """A tool call of this turn and its result."""

    name: str
    canonical_args: str
    result: ToolMessage


@dataclass(frozen=True, slots=True)
class Round:
    """A reply of the model and the results of its calls so far, whatever lies between them."""

    reply: AIMessage
    results: tuple[ToolMessage, ...]

    @property
    def open_calls(self) -> list[ToolCall]:
        """The calls that have no result."""
        answered = self._answered
        return [call for call in self.reply.tool_calls if call["id"] not in answered]

    @property
    def open_invalid_calls(self) -> list[InvalidToolCall]:
        """The invalid calls that have no result."""
        answered = self._answered
        return [call for call in self.reply.invalid_tool_calls if call["id"] not in answered]

    @property
    def _answered(self) -> set[str]:
        return {result.tool_call_id for result in self.results}


def canonical(args: Mapping[str, Any]) -> str:
    """Return arguments as text that does not depend on key order."""
    return json.dumps(args, sort_keys=True, default=str)


def is_summary(message: BaseMessage) -> bool:
    """Say whether a message is a summary of LangChain's or our compaction."""
    return message.additional_kwargs.get("lc_source") == "summarization"


def is_said(message: BaseMessage) -> bool:
    """Say whether a message is the person's own."""
    return isinstance(message, HumanMessage) and not is_summary(message)


def rounds_of_turn(messages: Sequence[BaseMessage]) -> list[Round]:
    """Return the rounds since the last human message, oldest first.

    A result belongs to the reply before it: some models use the same call ids in every reply.
    """
    start = next((i for i in range(len(messages) - 1, -1, -1) if isinstance(messages[i], HumanMessage)), -1)
    found: list[tuple[AIMessage, list[ToolMessage]]] = []
    for message in messages[start + 1 :]:
        if isinstance(message, AIMessage):
            found.append((message, []))
        elif isinstance(message, ToolMessage) and found:
            found[-1][1].append(message)
    return [Round(reply, tuple(results)) for reply, results in found]


def is_turn_over(messages: Sequence[BaseMessage]) -> bool:
    """Say whether the person may speak: nobody has spoken yet, or the model has the last word and no call is open."""
    if not messages:
        return True
    has_open = any(found.open_calls or found.open_invalid_calls for found in rounds_of_turn(messages))
    return isinstance(messages[-1], AIMessage) and not has_open


def calls_of_turn(messages: Sequence[BaseMessage]) -> list[DoneCall]:
    """Return the calls that have results since the last human message, oldest first."""
    done = []
    for turn_round in rounds_of_turn(messages):
        results = {result.tool_call_id: result for result in turn_round.results}
        done += [
            DoneCall(call["name"], canonical(call["args"]), results[call["id"]])
            for call in turn_round.reply.tool_calls
            if call["id"] in results
        ]
    return done


def message_of(result: ToolMessage | Command[Any]) -> ToolMessage | None:
    """Return the one tool message that a tool's outcome adds, if it is one."""
    if isinstance(result, ToolMessage):
        return result
    added: Any = result.update.get("messages", ()) if isinstance(result.update, dict) else ()
    return added[0] if len(added) == 1 and isinstance(added[0], ToolMessage) else None


def with_message(result: ToolMessage | Command[Any], message: ToolMessage) -> ToolMessage | Command[Any]:
    """Return an outcome with another tool message in it; what else a command does stays."""
    if isinstance(result, ToolMessage):
        return message
    assert isinstance(result.update, dict)
    return replace(result, update={**result.update, "messages": [message]})


def refusal(call: ToolCall | InvalidToolCall, reason: str, **additional: Any) -> ToolMessage:
    """Return the error result of a call that was not run."""
    return ToolMessage(
        f"Error: this call was not run: {reason}",
        tool_call_id=call["id"] or "",
        name=call["name"] or "unknown",
        status="error",
        additional_kwargs=additional,
    )


def closing_message(reason: str, *, kind: str) -> AIMessage:
    """Return the message that ends a turn in the model's place, so that no turn ends without a word."""
    return AIMessage(f"I stopped here: {reason}.", additional_kwargs={ENDED_BY: kind})

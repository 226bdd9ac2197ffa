"""Calls that are none: truncated, malformed, to no tool, with wrong arguments.

A reply whose only calls are invalid would end the agent silently, wrong arguments would go round until the recursion
limit, and LangChain completes truncated JSON to half a call that runs. Here such a call is never run, is answered with
an error, and the model may try again a bounded number of times.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import jsonschema
from jsonschema.exceptions import UnknownType
from langchain.agents.middleware import AgentMiddleware
from langchain.agents.middleware.types import ModelRequest, ModelResponse, ToolCallRequest, hook_config
from langchain_core.messages import AIMessage, BaseMessage, InvalidToolCall, ToolCall, ToolMessage
from langchain_core.messages.tool import invalid_tool_call
from langchain_core.tools import BaseTool
from langgraph.types import Command
from pydantic import BaseModel, ValidationError
from referencing import Registry
from referencing.exceptions import Unresolvable

from dlite_agent.agent.reports import report
from dlite_agent.agent.turns import Round, closing_message, refusal, rounds_of_turn
from dlite_agent.prompting.messages import METADATA_KEY

INVALID = "dlite_invalid"
"""Key in `additional_kwargs` of the error that answers an invalid call."""

_ADVICE = "Write one complete call with valid arguments, or answer in plain text."
_CUT = "the reply reached its token limit inside it, so it has to be shorter"
_CUT_REASONS = ("length", "max_tokens", "MAX_TOKENS")
_REASON_CHARACTERS = 300


class InvalidCallRetry(AgentMiddleware[Any, Any, Any]):
    """Answers invalid calls with errors, lets the model try again, and ends with words.

    An invalid call is never run. After `max_retries` retries in a row the model has to answer without tools; if it
    calls all the same, the turn ends with a message that says what went wrong (`additional_kwargs["dlite_ended_by"]`).
    Each round with invalid calls is a report "invalid_calls".
    """

    def __init__(self, *, max_retries: int = 2, max_rounds: int = 8) -> None:
        """Set the bounds of one turn.

        Args:
            max_retries: How many times in a row the model is asked again.
            max_rounds: How many replies with invalid calls one turn may have, in a row or not.
        """
        super().__init__()
        self.max_retries = max_retries
        self.max_rounds = max_rounds

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> ModelResponse[Any]:
        """Withhold tools after the last retry; settle the ids of the calls, and which of them are whole."""
        return _settled(handler(self._bounded(request)))

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]
    ) -> ModelResponse[Any]:
        """Do the same asynchronously."""
        return _settled(await handler(self._bounded(request)))

    @hook_config(can_jump_to=["model", "end"])
    def after_model(self, state: Any, runtime: Any) -> dict[str, Any] | None:
        """Answer invalid calls with errors; go back to the model if there was no valid one, or end in words."""
        rounds = rounds_of_turn(state["messages"])
        if not rounds:
            return None
        *before, last = rounds
        if self._is_spent(before):
            return self._end(before, last, runtime)
        invalid = last.open_invalid_calls
        if not invalid:
            return None
        errors = [refusal(call, f"{_reason(call, last.reply)}. {_ADVICE}", **{INVALID: True}) for call in invalid]
        report(runtime, "invalid_calls", calls=[call["name"] for call in invalid], num_rounds=_num_last(before) + 1)
        return {"messages": errors} if last.open_calls else {"messages": errors, "jump_to": "model"}

    def wrap_tool_call(
        self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], ToolMessage | Command[Any]]
    ) -> ToolMessage | Command[Any]:
        """Run a call whose arguments fit its tool; answer any other with an error."""
        return _refused(request) or _marked(request, handler(request))

    async def awrap_tool_call(
        self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], Awaitable[ToolMessage | Command[Any]]]
    ) -> ToolMessage | Command[Any]:
        """Do the same asynchronously."""
        return _refused(request) or _marked(request, await handler(request))

    def _bounded(self, request: ModelRequest[Any]) -> ModelRequest[Any]:
        is_spent = self._is_spent(rounds_of_turn(request.messages))
        return request.override(tool_choice="none") if is_spent else request

    def _is_spent(self, rounds: Sequence[Round]) -> bool:
        return _num_last(rounds) > self.max_retries or sum(map(_is_invalid, rounds)) >= self.max_rounds

    @staticmethod
    def _end(before: Sequence[Round], last: Round, runtime: Any) -> dict[str, Any] | None:
        """End the turn, unless the model did so in words."""
        calls: list[ToolCall | InvalidToolCall] = [*last.open_invalid_calls, *last.open_calls]
        if not calls and last.reply.text.strip():
            return None
        num_rounds = sum(map(_is_invalid, before)) + 1
        errors = [refusal(call, "no more calls in this turn", **{INVALID: True}) for call in calls]
        closing = closing_message(f"{num_rounds} replies had no valid tool call", kind="invalid_calls")
        report(runtime, "turn_ended", by="invalid_calls", num_rounds=num_rounds)
        return {"messages": [*errors, closing], "jump_to": "end"}


def _is_invalid(turn_round: Round) -> bool:
    return any(INVALID in result.additional_kwargs for result in turn_round.results)


def _num_last(rounds: Sequence[Round]) -> int:
    """Count the last rounds in a row with an invalid call."""
    valid = (index for index, turn_round in enumerate(reversed(rounds)) if not _is_invalid(turn_round))
    return next(valid, len(rounds))


def _reason(call: Any, reply: AIMessage) -> str:
    if _is_cut(reply):
        return _CUT
    return _one_line(call.get("error") or "its arguments are no complete JSON object")


def _is_cut(reply: AIMessage) -> bool:
    metadata = reply.response_metadata
    return any(metadata.get(key) in _CUT_REASONS for key in ("finish_reason", "stop_reason"))


def _settled(response: ModelResponse[Any]) -> ModelResponse[Any]:
    result: list[BaseMessage] = [
        _settle(message) if isinstance(message, AIMessage) else message for message in response.result
    ]
    return replace(response, result=result)


def _settle(reply: AIMessage) -> AIMessage:
    """Give each call an id of its own, and take the last call of a reply that was cut for an invalid one.

    Models other than `ChatDLite` hand a call out as valid that LangChain completed from truncated JSON.
    """
    calls = [call.copy() for call in reply.tool_calls]
    invalid = [call.copy() for call in reply.invalid_tool_calls]
    if calls and _is_cut(reply) and METADATA_KEY not in reply.response_metadata:
        half = calls.pop()
        args = json.dumps(half["args"], ensure_ascii=False, default=str)
        invalid.append(invalid_tool_call(name=half["name"], args=args, id=half["id"], error=_CUT))
    seen: set[str | None] = set()
    for call in (*calls, *invalid):
        if not call["id"] or call["id"] in seen:
            call["id"] = f"call_{uuid.uuid4().hex}"
        seen.add(call["id"])
    if calls == reply.tool_calls and invalid == reply.invalid_tool_calls:
        return reply
    return reply.model_copy(update={"tool_calls": calls, "invalid_tool_calls": invalid})


def _refused(request: ToolCallRequest) -> ToolMessage | None:
    fault = None if request.tool is None else _fault(request.tool, request.tool_call)
    return None if fault is None else refusal(request.tool_call, f"{fault}. {_ADVICE}", **{INVALID: True})


def _marked(request: ToolCallRequest, result: ToolMessage | Command[Any]) -> ToolMessage | Command[Any]:
    """Mark the error of a call to no tool; another middleware might have known the tool."""
    if request.tool is not None or not isinstance(result, ToolMessage) or result.status != "error":
        return result
    return result.model_copy(update={"additional_kwargs": {**result.additional_kwargs, INVALID: True}})


def _fault(tool: BaseTool, call: ToolCall) -> str | None:
    """Return what is wrong with a call's arguments, in one line, or None."""
    schema: Any = tool.tool_call_schema
    if isinstance(schema, dict):
        return _schema_fault(schema, call["args"])
    if not issubclass(schema, BaseModel):  # of pydantic 1; the tool checks it
        return None
    try:
        schema.model_validate(call["args"])
    except ValidationError as error:
        found = (f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        return _one_line(f"wrong arguments: {'; '.join(found)}")
    return None


def _schema_fault(schema: dict[str, Any], args: dict[str, Any]) -> str | None:
    """Return what does not fit a schema; where that is broken, or refers elsewhere, the tool has to check."""
    try:
        errors = jsonschema.Draft202012Validator(schema, registry=Registry()).iter_errors(args)
        first = next(iter(errors), None)
    except (UnknownType, Unresolvable, RecursionError, re.error):
        return None
    return None if first is None else _one_line(f"wrong arguments: {first.message}")


def _one_line(text: str) -> str:
    line = " ".join(text.split()).rstrip(".")
    return line if len(line) <= _REASON_CHARACTERS else f"{line[:_REASON_CHARACTERS]}..."

"""Small models repeat a call whose result they have. This answers from the record, then makes them answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

from langchain.agents.middleware import AgentMiddleware
from langchain.agents.middleware.types import ModelRequest, ModelResponse, ToolCallRequest
from langchain_core.messages import ToolMessage
from langgraph.types import Command

from dlite_agent.agent.reports import report
from dlite_agent.agent.turns import (
    DoneCall,
    calls_of_turn,
    canonical,
    closing_message,
    message_of,
    refusal,
    rounds_of_turn,
    with_message,
)

REPEATED = "dlite_repeated"
"""Key in `additional_kwargs` of a result that the model had: "recorded" (the call was not run) or "same" (it was)."""

_HINT = "You already made this call and this was its result. Do not repeat it: answer, or take the next step."


class RepeatGuard(AgentMiddleware[Any, Any, Any]):
    """Tells the model when a result is the one it has, and withholds tools after a bound.

    A call that equals the one before it is answered from the record: nothing can have changed in between by the agent's
    own doing. Calls that failed, calls to `volatile` tools and calls with others in between are run; if the result is
    the same again, it gets the same hint. A model that calls on without tools is stopped in words
    (`additional_kwargs["dlite_ended_by"]`). Each repeat is a report "repeated_call".
    """

    def __init__(
        self, *, max_repeats: int = 1, max_same: int = 3, max_calls: int = 12, volatile: Collection[str] = ()
    ) -> None:
        """Set the bounds of one turn; a model that reaches one has to answer in text.

        Args:
            max_repeats: Calls in a row that are answered from the record.
            max_same: Calls in a row that gave nothing new, run or not.
            max_calls: Calls in all.
            volatile: Tools whose results change by themselves, such as a clock; always run.
        """
        super().__init__()
        self.max_repeats = max_repeats
        self.max_same = max_same
        self.max_calls = max_calls
        self.volatile = frozenset(volatile)

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> ModelResponse[Any]:
        """Let the model answer without tools once it has repeated itself enough."""
        if not self._is_spent(calls_of_turn(request.messages)):
            return handler(request)
        return _ended(request, handler(request.override(tool_choice="none")))

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]
    ) -> ModelResponse[Any]:
        """Do the same asynchronously."""
        if not self._is_spent(calls_of_turn(request.messages)):
            return await handler(request)
        return _ended(request, await handler(request.override(tool_choice="none")))

    def wrap_tool_call(
        self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], ToolMessage | Command[Any]]
    ) -> ToolMessage | Command[Any]:
        """Answer a repeat from the record, run anything else."""
        return self._from_record(request) or self._compared(request, handler(request))

    async def awrap_tool_call(
        self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], Awaitable[ToolMessage | Command[Any]]]
    ) -> ToolMessage | Command[Any]:
        """Do the same asynchronously."""
        return self._from_record(request) or self._compared(request, await handler(request))

    def _is_spent(self, calls: Sequence[DoneCall]) -> bool:
        repeats = [call.result.additional_kwargs.get(REPEATED) for call in reversed(calls)]
        num_recorded = len(list(takewhile(lambda repeat: repeat == "recorded", repeats)))
        num_same = len(list(takewhile(lambda repeat: repeat is not None, repeats)))
        return num_recorded >= self.max_repeats or num_same >= self.max_same or len(calls) >= self.max_calls

    def _from_record(self, request: ToolCallRequest) -> ToolMessage | None:
        calls = calls_of_turn(request.state["messages"])
        is_repeat = bool(calls) and _is_call(calls[-1], request)
        if not is_repeat or request.tool_call["name"] in self.volatile or calls[-1].result.status == "error":
            return None
        recorded = calls[-1].result.model_copy(update={"tool_call_id": request.tool_call["id"] or "", "id": None})
        return _repeated(recorded, request, how="recorded")

    @staticmethod
    def _compared(request: ToolCallRequest, result: ToolMessage | Command[Any]) -> ToolMessage | Command[Any]:
        """Mark a result that is the same as the last one of the same call."""
        message = message_of(result)
        earlier = [call for call in calls_of_turn(request.state["messages"]) if _is_call(call, request)]
        if message is None or not earlier or _said(earlier[-1].result) != _said(message):
            return result
        return with_message(result, _repeated(message, request, how="same"))


def _ended(request: ModelRequest[Any], response: ModelResponse[Any]) -> ModelResponse[Any]:
    """End the turn of a model that calls tools although it had to answer."""
    open_calls = [call for turn_round in rounds_of_turn(response.result) for call in turn_round.open_calls]
    if not open_calls:
        return response
    report(request.runtime, "turn_ended", by="repeated_calls")
    errors = [refusal(call, "no more calls in this turn") for call in open_calls]
    closing = closing_message("the calls repeat themselves or are too many", kind="repeated_calls")
    return replace(response, result=[*response.result, *errors, closing])


def _is_call(call: DoneCall, request: ToolCallRequest) -> bool:
    return (call.name, call.canonical_args) == (request.tool_call["name"], canonical(request.tool_call["args"]))


def _said(result: ToolMessage) -> tuple[str, str]:
    return result.status, result.text.removesuffix(f"\n{_HINT}")


def _repeated(result: ToolMessage, request: ToolCallRequest, *, how: str) -> ToolMessage:
    report(request.runtime, "repeated_call", tool=request.tool_call["name"], how=how)
    marked = {**result.additional_kwargs, REPEATED: how}
    return result.model_copy(update={"content": f"{_said(result)[1]}\n{_HINT}", "additional_kwargs": marked})

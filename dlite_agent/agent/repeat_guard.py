"""Small models repeat a call whose result they have. This answers from the record, then makes them answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from langchain.agents.middleware import AgentMiddleware
from langchain.agents.middleware.types import ModelRequest, ModelResponse, ToolCallRequest
from langchain_core.messages import AIMessage, ToolMessage
from langgraph.types import Command

from dlite_agent.agent.turns import calls_of_turn, canonical

REPEATED = "dlite_repeated"
"""Key in `additional_kwargs` of a result that was answered from the record."""

_HINT = "You already made this call and this was its result. Do not repeat it: answer, or take the next step."


class RepeatGuard(AgentMiddleware[Any, Any, Any]):
    """Answers a call that equals the one before it from the record, and withholds tools after a bound.

    A call is a repeat if the last call with a result in this turn had the same name and arguments: nothing can have
    changed in between by the agent's own doing. After `max_repeats` repeats in a row the model has to answer in text.
    """

    def __init__(self, *, max_repeats: int = 1, max_calls: int = 12) -> None:
        """Set how many repeats in a row, and how many calls in one turn, are let pass."""
        super().__init__()
        self.max_repeats = max_repeats
        self.max_calls = max_calls

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> ModelResponse[Any] | AIMessage:
        """Let the model answer without tools once it has repeated itself enough."""
        return handler(self._bounded(request))

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]
    ) -> ModelResponse[Any] | AIMessage:
        """Do the same asynchronously."""
        return await handler(self._bounded(request))

    def wrap_tool_call(
        self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], ToolMessage | Command[Any]]
    ) -> ToolMessage | Command[Any]:
        """Answer a repeat from the record, run anything else."""
        return self._from_record(request) or handler(request)

    async def awrap_tool_call(
        self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], Awaitable[ToolMessage | Command[Any]]]
    ) -> ToolMessage | Command[Any]:
        """Do the same asynchronously."""
        return self._from_record(request) or await handler(request)

    def _bounded(self, request: ModelRequest[Any]) -> ModelRequest[Any]:
        calls = calls_of_turn(request.messages)
        last = calls[-self.max_repeats :]
        is_stuck = len(last) == self.max_repeats and all(REPEATED in call.result.additional_kwargs for call in last)
        if is_stuck or len(calls) >= self.max_calls:
            return request.override(tool_choice="none")
        return request

    def _from_record(self, request: ToolCallRequest) -> ToolMessage | None:
        calls = calls_of_turn(request.state["messages"])
        call = request.tool_call
        if not calls or (calls[-1].name, calls[-1].canonical_args) != (call["name"], canonical(call["args"])):
            return None
        text = str(calls[-1].result.content).removesuffix(f"\n{_HINT}")
        return ToolMessage(
            f"{text}\n{_HINT}",
            tool_call_id=call["id"] or "",
            name=call["name"],
            status=calls[-1].result.status,
            additional_kwargs={REPEATED: True},
        )

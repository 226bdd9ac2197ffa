"""Reports prompts that lost their cached prefix, in the stream of the graph."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Annotated, Any, NotRequired

from langchain.agents.middleware import AgentMiddleware, ExtendedModelResponse
from langchain.agents.middleware.types import AgentState, ModelRequest, ModelResponse, PrivateStateAttr
from langchain_core.messages import AIMessage
from langgraph.types import Command

from dlite_agent.agent.drift import PromptRecord, find_drift, record_prompt
from dlite_agent.agent.reports import report


class DriftState(AgentState[Any]):
    """Graph state with what is remembered of the last call."""

    last_prompt: NotRequired[Annotated[PromptRecord, PrivateStateAttr]]


class DriftReporter(AgentMiddleware[Any, Any, Any]):
    """Says which message, tool or template change had tokens computed again, how many, and how to avoid it.

    Give it last: it has to see requests as the model does. Each loss is a report "prefix_drift" with the fields of
    `agent.drift.Drift` and `advice`. Nothing is said of models that do not tell what they reused
    (`usage_metadata["input_token_details"]["cache_read"]`).
    """

    state_schema = DriftState

    def __init__(self, *, min_tokens: int = 16) -> None:
        """Set the least loss that is reported."""
        super().__init__()
        self.min_tokens = min_tokens

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> ExtendedModelResponse[Any]:
        """Compare the call with the last one, and remember it."""
        return self._compared(request, handler(request))

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]
    ) -> ExtendedModelResponse[Any]:
        """Do the same asynchronously."""
        return self._compared(request, await handler(request))

    def _compared(self, request: ModelRequest[Any], response: ModelResponse[Any]) -> ExtendedModelResponse[Any]:
        reply = next((message for message in response.result if isinstance(message, AIMessage)), None)
        if reply is None:
            return ExtendedModelResponse(response)
        now = record_prompt(request.system_message, request.messages, request.tools, reply)
        before: Any = request.state.get("last_prompt")
        drift = None if before is None else find_drift(before, now, reply)
        if drift is not None and drift.num_lost >= self.min_tokens:
            report(request.runtime, "prefix_drift", **asdict(drift), advice=drift.advice)
        return ExtendedModelResponse(response, Command(update={"last_prompt": now}))

"""A reply whose only calls are invalid would end the agent silently. This asks again, a bounded number of times."""

from __future__ import annotations

from typing import Any

from langchain.agents.middleware import AgentMiddleware
from langchain.agents.middleware.types import hook_config
from langchain_core.messages import AIMessage, ToolMessage

_PREFIX = "Error: this call was not run, it is not valid"


class InvalidCallRetry(AgentMiddleware[Any, Any, Any]):
    """Turns invalid tool calls into error results and lets the model try again.

    An invalid call is never run. After `max_retries` rounds in a row the turn ends with the invalid call in plain
    sight, in the last message's `invalid_tool_calls`.
    """

    def __init__(self, *, max_retries: int = 2) -> None:
        """Set how many times in a row the model is asked again."""
        super().__init__()
        self.max_retries = max_retries

    @hook_config(can_jump_to=["model"])
    def after_model(self, state: Any, runtime: Any) -> dict[str, Any] | None:
        """Answer invalid calls with errors; go back to the model if there was no valid one."""
        messages = state["messages"]
        last = messages[-1] if messages else None
        if (
            not isinstance(last, AIMessage)
            or not last.invalid_tool_calls
            or self._num_rounds(messages) >= self.max_retries
        ):
            return None
        errors = [
            ToolMessage(
                f"{_PREFIX} ({call.get('error') or 'its arguments are no complete JSON object'}). "
                "Write one complete call, or answer in plain text.",
                tool_call_id=call["id"] or "",
                name=call["name"] or "unknown",
                status="error",
            )
            for call in last.invalid_tool_calls
        ]
        return {"messages": errors} if last.tool_calls else {"messages": errors, "jump_to": "model"}

    @staticmethod
    def _num_rounds(messages: list[Any]) -> int:
        """Count the rounds of invalid calls that directly precede the last message."""
        rounds = 0
        for message in reversed(messages[:-1]):
            if isinstance(message, ToolMessage) and str(message.content).startswith(_PREFIX):
                continue
            if not isinstance(message, AIMessage) or not message.invalid_tool_calls:
                break
            rounds += 1
        return rounds

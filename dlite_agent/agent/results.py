"""Tool results of bounded size, with a handle to read the rest.

The whole text of a result that was cut is kept in the graph's state, under `tool_results`: a resumed thread and a fork
have it, and compaction does not take it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, NotRequired

from langchain.agents.middleware import AgentMiddleware
from langchain.agents.middleware.types import AgentState, PrivateStateAttr, ToolCallRequest
from langchain.tools import ToolRuntime
from langchain_core.messages import ToolMessage
from langchain_core.tools import ToolException
from langgraph.types import Command
from pydantic import BaseModel, Field

from dlite_agent.agent.shaping import plain_text, shape
from dlite_agent.errors import ConfigError
from dlite_agent.tools.factory import make_tool

MAX_KEPT_CHARS = 4_000_000
"""Characters of whole results in a graph's state; the oldest are dropped first."""

_LEAST_CHARS = 200


def keep_results(kept: dict[str, str] | None, new: dict[str, str] | None) -> dict[str, str]:
    """Merge whole results by handle, newest last, and drop the oldest ones above `MAX_KEPT_CHARS`."""
    new = new or {}
    merged = {handle: text for handle, text in (kept or {}).items() if handle not in new} | new
    total = sum(map(len, merged.values()))
    for handle in list(merged)[:-1]:
        if total <= MAX_KEPT_CHARS:
            break
        total -= len(merged.pop(handle))
    return merged


class ResultsState(AgentState[Any]):
    """Graph state with the whole texts of results that were cut."""

    tool_results: NotRequired[Annotated[dict[str, str], PrivateStateAttr, keep_results]]


class ReadResultArgs(BaseModel):
    """Arguments of `read_result`."""

    handle: str = Field(description="The handle that a shortened result names")
    start: int = Field(default=0, ge=0, description="First character")
    end: int | None = Field(default=None, description="Character to stop before")


class ResultShaper(AgentMiddleware[Any, Any, Any]):
    """Gives tool results one canonical, bounded text, and the model a tool to read what was left out.

    JSON gets sorted keys and no spaces, other text plain line ends; errors begin with "Error: ". The same result is the
    same bytes, whenever and however often a tool is called. Results with images and the like, and commands, pass.
    """

    state_schema = ResultsState

    def __init__(self, *, max_chars: int = 4000) -> None:
        """Set how many characters of a result enter the prompt.

        Raises:
            ConfigError: There would be no room for head and tail.
        """
        super().__init__()
        if max_chars < _LEAST_CHARS:
            raise ConfigError(f"max_chars is {max_chars}; expected {_LEAST_CHARS} or more")
        self.max_chars = max_chars
        self.tools = [make_tool(self._read_result(), ReadResultArgs)]

    def wrap_tool_call(
        self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], ToolMessage | Command[Any]]
    ) -> ToolMessage | Command[Any]:
        """Run the tool and shape its result."""
        return self._shaped(handler(request))

    async def awrap_tool_call(
        self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], Awaitable[ToolMessage | Command[Any]]]
    ) -> ToolMessage | Command[Any]:
        """Do the same asynchronously."""
        return self._shaped(await handler(request))

    def _shaped(self, result: ToolMessage | Command[Any]) -> ToolMessage | Command[Any]:
        if not isinstance(result, ToolMessage) or (result.name == "read_result" and result.status != "error"):
            return result
        text = plain_text(result.content)
        if text is None:
            return result
        if result.status == "error" and not text.lstrip().lower().startswith("error"):
            text = f"Error: {text}"
        shaped = shape(text, max_chars=self.max_chars)
        message = result.model_copy(update={"content": shaped.text})
        if shaped.handle is None:
            return message
        return Command(update={"messages": [message], "tool_results": {shaped.handle: shaped.whole}})

    def _read_result(self) -> Callable[..., str]:
        max_chars = self.max_chars

        def read_result(runtime: ToolRuntime[Any, Any], handle: str, start: int = 0, end: int | None = None) -> str:
            """Read the part of a result that was left out."""
            whole = (runtime.state.get("tool_results") or {}).get(handle)
            if whole is None:
                raise ToolException(f"there is no result {handle}; make the call again that gave it")
            stop = min(len(whole), start + max_chars, len(whole) if end is None else end)
            if stop <= start:
                raise ToolException(f"{handle} has {len(whole)} characters; start {start} and end {end} hold none")
            return f"{whole[start:stop]}\n(characters {start} to {stop} of {len(whole)})"

        return read_result

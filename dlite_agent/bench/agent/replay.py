"""Replays recorded sessions through `create_dlite_agent`: the model answers, the record goes on.

At every model call the model generates behind the recorded conversation; what it says is noted, and the graph goes on
with the recorded reply, whose calls are answered from the record.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from langchain.agents.middleware import AgentMiddleware
from langchain.agents.middleware.types import ModelRequest, ModelResponse, ToolCallRequest, hook_config
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AnyMessage, SystemMessage, ToolMessage
from langchain_core.tools import BaseTool, StructuredTool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command

from dlite_agent.agent import RepeatGuard, create_dlite_agent
from dlite_agent.agent.turns import rounds_of_turn
from dlite_agent.bench.agent.sessions import RecordedTurn, split_turns
from dlite_agent.engine.state import common_prefix
from dlite_agent.prompting.messages import METADATA_KEY
from dlite_agent.recorded import RecordedSession
from dlite_agent.reply import PromptTooLongError
from dlite_agent.tool_schemas import format_tools

if TYPE_CHECKING:
    from dlite_agent.runtime import Runtime

_MANY = 1_000_000
_KEPT = ("session", "snapshot", "stats")  # of a reply's record: where its session stands, not what it said

Prompt = tuple[str, Sequence[int]]
"""Text and token ids."""


@dataclass(frozen=True, slots=True)
class ReplayedCall:
    """One model call of a replay.

    Attributes:
        raw: What the model wrote, token for token.
        num_generated: Its tokens.
        num_prompt: Tokens of the prompt.
        num_prefilled: Those that were computed.
        num_beyond: Those computed though the call before had them; at most 1 where reuse works.
        is_append_only: Whether the prompt's text continues the one before.
    """

    raw: str
    num_generated: int
    num_prompt: int
    num_prefilled: int
    num_beyond: int
    is_append_only: bool


@dataclass(slots=True)
class CallNotes:
    """Notes each call of one replay, and compares its prompt with the one before.

    Attributes:
        runtime: Renders and encodes prompts.
        max_prompt: A longer one ends the replay.
        calls: What was noted.
    """

    runtime: Runtime
    max_prompt: int = _MANY
    calls: list[ReplayedCall] = field(default_factory=list)
    _text: str = ""
    _ids: Sequence[int] = ()

    def prompt(self, request: ModelRequest[Any]) -> Prompt:
        """Return the text and the ids of the prompt.

        Raises:
            PromptTooLongError: If there are more than `max_prompt`.
        """
        system = [] if request.system_message is None else [request.system_message]
        messages: list[AnyMessage] = [*system, *request.messages]
        text = self.runtime.render(messages, format_tools(request.tools))
        ids = self.runtime.encoder.encode(text, self._ids)
        if len(ids) > self.max_prompt:
            raise PromptTooLongError(f"the prompt has {len(ids)} tokens; the bound is {self.max_prompt}")
        return text, ids

    def add(self, prompt: Prompt, reply: AIMessage) -> None:
        """Note a call."""
        text, ids = prompt
        record = reply.response_metadata[METADATA_KEY]
        num_new = len(ids) - common_prefix(np.asarray(ids), np.asarray(self._ids, dtype=int))
        self.calls.append(
            ReplayedCall(
                raw=record["raw"],
                num_generated=record["stats"]["generated"],
                num_prompt=len(ids),
                num_prefilled=record["stats"]["prefilled"],
                num_beyond=record["stats"]["prefilled"] - num_new,
                is_append_only=text.startswith(self._text),
            )
        )
        self._text, self._ids = text, ids


class ScriptedReplies(AgentMiddleware[Any, Any, Any]):
    """Puts given replies in the place of the model's, which answers all the same."""

    def __init__(self, replies: Sequence[AIMessage], notes: CallNotes | None = None) -> None:
        """Set the replies of one turn, and where calls are noted."""
        super().__init__()
        self._replies = replies
        self._notes = notes

    @hook_config(can_jump_to=["end"])
    def before_model(self, state: Any, runtime: Any) -> dict[str, Any] | None:
        """End the turn where the script does: the user may speak right behind a tool result."""
        is_over = len(rounds_of_turn(state["messages"])) >= len(self._replies)
        return {"jump_to": "end"} if is_over else None

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> ModelResponse[Any]:
        """Let the model answer, and go on with the script."""
        prompt = None if self._notes is None else self._notes.prompt(request)
        return self._scripted(request, prompt, handler(request))

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]
    ) -> ModelResponse[Any]:
        """Do the same asynchronously."""
        prompt = None if self._notes is None else self._notes.prompt(request)
        return self._scripted(request, prompt, await handler(request))

    def _scripted(
        self, request: ModelRequest[Any], prompt: Prompt | None, response: ModelResponse[Any]
    ) -> ModelResponse[Any]:
        reply = next(message for message in response.result if isinstance(message, AIMessage))
        if self._notes is not None and prompt is not None:
            self._notes.add(prompt, reply)
        scripted = self._replies[len(rounds_of_turn(request.messages))].model_copy(deep=True)
        record = reply.response_metadata.get(METADATA_KEY) or {}
        kept = {key: record[key] for key in _KEPT if key in record}
        scripted.response_metadata = {**scripted.response_metadata, METADATA_KEY: kept}
        return replace(response, result=[scripted])


class RecordedReplies(ScriptedReplies):
    """Puts recorded replies in the place of the model's, and recorded results in the place of the tools'."""

    def __init__(self, turn: RecordedTurn, notes: CallNotes | None = None) -> None:
        """Set the turn, and where calls are noted."""
        super().__init__(turn.replies, notes)
        self._results = turn.results

    def wrap_tool_call(
        self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], ToolMessage | Command[Any]]
    ) -> ToolMessage | Command[Any]:
        """Answer from the record."""
        return self._result(request)

    async def awrap_tool_call(
        self, request: ToolCallRequest, handler: Callable[[ToolCallRequest], Awaitable[ToolMessage | Command[Any]]]
    ) -> ToolMessage | Command[Any]:
        """Do the same asynchronously."""
        return self._result(request)

    def _result(self, request: ToolCallRequest) -> ToolMessage:
        found = self._results.get(str(request.tool_call["id"]))
        if found is None:
            return ToolMessage("no result was recorded", tool_call_id=request.tool_call["id"], status="error")
        return found.model_copy(deep=True)


async def replay(
    session: RecordedSession,
    model: BaseChatModel,
    *,
    thread_id: str,
    notes: CallNotes | None = None,
    max_calls: int | None = None,
) -> None:
    """Replay a session, as far as prompts have room; calls are noted in `notes`."""
    config: Any = {"configurable": {"thread_id": thread_id}, "recursion_limit": 1000}
    saver = InMemorySaver()
    system = "\n\n".join(message.text for message in session.messages if isinstance(message, SystemMessage))
    options: dict[str, Any] = {"system_prompt": system} if system else {}
    for turn in split_turns(session, max_calls=max_calls):
        patient = RepeatGuard(max_repeats=_MANY, max_same=_MANY, max_calls=_MANY)
        middleware = [patient, RecordedReplies(turn, notes)]
        agent = create_dlite_agent(
            model, _tools(turn), has_plan=False, middleware=middleware, checkpointer=saver, **options
        )
        try:
            await agent.ainvoke({"messages": [message.model_copy() for message in turn.given]}, config)
        except PromptTooLongError:
            return


def _tools(turn: RecordedTurn) -> list[BaseTool]:
    """Return tools of the recorded schemas; the record answers for them."""

    def answer(**arguments: Any) -> str:
        raise AssertionError("the record answers")

    return [
        StructuredTool.from_function(
            func=answer,
            name=tool["function"]["name"],
            description=tool["function"]["description"],
            args_schema=tool["function"]["parameters"],
        )
        for tool in turn.tools
    ]

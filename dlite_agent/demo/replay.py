"""Replays recorded sessions through a LangGraph graph: real prompts that grow like an agent's, and what was reused.

Record k: messages[0..k) are fed, the model generates at assistant index k, then the RECORDED message and its tool
results continue the session.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypedDict

from langchain_core.messages import AIMessage, AnyMessage
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages

from dlite_agent.chat_model import ChatDLite
from dlite_agent.prompting.messages import METADATA_KEY
from dlite_agent.recorded import RecordedSession


@dataclass(frozen=True, slots=True)
class ReplayedCall:
    """What one model call of a replay reused.

    Attributes:
        num_prompt: Tokens of the prompt.
        num_new: Prompt tokens behind the longest prefix the session had seen.
        num_prefilled: Prompt tokens that were computed.
        is_append_only: Whether the prompt text continues the one before.
        text: What was generated.
        stats: The call's statistics.
    """

    num_prompt: int
    num_new: int
    num_prefilled: int
    is_append_only: bool
    text: str
    stats: dict[str, Any]

    @property
    def num_beyond(self) -> int:
        """Tokens prefilled though they were not new; at most 1 where reuse works."""
        return self.num_prefilled - self.num_new


class _State(TypedDict):
    messages: Annotated[list[AnyMessage], add_messages]
    reply: AIMessage


def replay(session: RecordedSession, model: ChatDLite, *, checkpointer: Any, thread_id: str) -> Iterator[ReplayedCall]:
    """Replay a session through a graph with a checkpointer; yields one item per assistant turn."""
    config: dict[str, Any] = {"configurable": {"thread_id": thread_id}}
    fed, seen_text = 0, ""
    seen_ids: list[int] = []
    for index, message in enumerate(session.messages):
        if not isinstance(message, AIMessage) or index == 0:
            continue
        tools = session.tools_at(index)
        graph = _graph(model, tools, checkpointer)
        state = graph.invoke({"messages": list(session.messages[fed:index])}, config)
        fed = index
        reply = state["reply"]
        text, ids = _prompt(model, state["messages"], tools, seen_ids)
        stats = reply.response_metadata[METADATA_KEY]["stats"]
        assert reply.usage_metadata is not None
        yield ReplayedCall(
            num_prompt=reply.usage_metadata["input_tokens"],
            num_new=len(ids) - _common(ids, seen_ids),
            num_prefilled=stats["prefilled"],
            is_append_only=text.startswith(seen_text),
            text=str(reply.content),
            stats=stats,
        )
        seen_text, seen_ids = text, ids


def _graph(model: ChatDLite, tools: list[dict[str, Any]], checkpointer: Any) -> Any:
    bound = model.bind_tools(tools) if tools else model

    def reply(state: _State) -> dict[str, Any]:
        return {"reply": bound.invoke(state["messages"])}

    builder = StateGraph(_State)
    builder.add_node("model", reply)
    builder.add_edge(START, "model")
    builder.add_edge("model", END)
    return builder.compile(checkpointer=checkpointer)


def _prompt(
    model: ChatDLite, messages: Sequence[AnyMessage], tools: list[dict[str, Any]], known_ids: list[int]
) -> tuple[str, list[int]]:
    """Render the prompt a call was given, to compare it with the one before."""
    runtime = model.runtime
    text = runtime.render(messages, tools)
    return text, runtime.encoder.encode(text, known_ids)


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))

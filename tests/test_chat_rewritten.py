"""A session whose history is rewritten says what a fresh one says, and computes what comes behind the common prefix."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import (
    ClearToolUsesEdit,
    ContextEditingMiddleware,
    SummarizationMiddleware,
    wrap_model_call,
)
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, RemoveMessage, SystemMessage, ToolMessage
from langchain_core.rate_limiters import InMemoryRateLimiter
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.memory import InMemorySaver

from dlite_agent import ChatDLite, Settings
from dlite_agent.engine.state import common_prefix
from dlite_agent.runtime import close_all
from dlite_agent.testing import write_tiny_chat_model

ANSWER = {
    "type": "json_schema",
    "json_schema": {"name": "answer", "schema": {"type": "string", "pattern": "^[a-z]{8}$"}},
}
"""Keeps the replies of random weights to letters, which their text encodes to the very same tokens."""


def tool_dict(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": f"To {name}.", "parameters": parameters}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChatDLite]:
    folder = write_tiny_chat_model(tmp_path_factory.mktemp("model"), max_position_embeddings=16384)
    settings = Settings(home=tmp_path_factory.mktemp("home"), redis_url=None, threads=1, offline=True)
    yield ChatDLite(model=str(folder), settings=settings, max_tokens=100)
    close_all()


def thread(name: str) -> RunnableConfig:
    return {"configurable": {"thread_id": name}}


def cache_read(message: Any) -> int:
    return int(message.usage_metadata["input_token_details"]["cache_read"])


def total(message: Any) -> int:
    return int(message.usage_metadata["total_tokens"])


def ids_of(model: ChatDLite, messages: list[AnyMessage], tools: list[Any]) -> list[int]:
    return model.runtime.encoder.encode(model.runtime.render(messages, tools))


def num_common(held: list[int], wanted: list[int]) -> int:
    return common_prefix(np.array(held, dtype=np.int32), np.array(wanted, dtype=np.int32))


def answer_afresh(model: ChatDLite, given: list[AnyMessage], tools: list[Any]) -> Any:
    options: dict[str, Any] = {"tools": tools, "tool_choice": "none"} if tools else {}
    return model.invoke(given, response_format=ANSWER, **options)


def check_as_fresh(
    model: ChatDLite, reply: Any, given: list[AnyMessage], before: list[AnyMessage], tools: tuple[list[Any], list[Any]]
) -> None:
    """Compare a session's reply with a fresh one; `before` is the text that the session held, with its last reply."""
    fresh = answer_afresh(model, given, tools[1])
    assert reply.content == fresh.content
    assert reply.usage_metadata["input_tokens"] == fresh.usage_metadata["input_tokens"]
    held, wanted = ids_of(model, before, tools[0]), ids_of(model, given, tools[1])
    common = num_common(held, wanted)
    assert common < len(wanted) - 1
    assert common - 1 <= cache_read(reply) <= common


SYSTEM, FIRST, SECOND = SystemMessage("Be brief."), HumanMessage("first", id="1"), HumanMessage("second", id="2")


@pytest.mark.parametrize("edit", ["remove", "replace", "insert", "system", "reply"])
def test_messages_that_change_cost_what_comes_behind_them(model: ChatDLite, edit: str) -> None:
    asking = model.bind(response_format=ANSWER)
    before: list[AnyMessage] = [SYSTEM, FIRST]
    for number in range(3):
        before += [asking.invoke(before, thread(edit)), HumanMessage(f"and {number}")]
    before[-1] = asking.invoke(before, thread(edit))
    given = list(before[:-1])
    if edit == "remove":
        del given[3:5]
    elif edit == "replace":
        given[3] = HumanMessage("something else")
    elif edit == "insert":
        given[3:3] = [SECOND, AIMessage("yes")]
    elif edit == "system":
        given[0] = SystemMessage("Be thorough.")
    else:
        given[4] = AIMessage("what it never said")
    reply = asking.invoke(given, thread(edit))
    check_as_fresh(model, reply, given, before, ([], []))
    again = asking.invoke([*given, reply, SECOND], thread(edit))
    assert cache_read(again) == total(reply) - 1  # the new history is the session's now


@pytest.mark.parametrize("change", ["more", "fewer", "other", "none"])
def test_tools_that_change_cost_what_comes_behind_them(model: ChatDLite, change: str) -> None:
    """Sessions of benchmarks give the model a missing tool in the middle of the conversation."""
    first, second = tool_dict("look"), tool_dict("leap")
    tools = {"more": [first, second], "fewer": [second], "other": [tool_dict("listen")], "none": []}[change]
    known = [first, second] if change == "fewer" else [first]
    name = f"tools {change}"
    said = model.invoke([SYSTEM, FIRST], thread(name), response_format=ANSWER, tools=known, tool_choice="none")
    before: list[AnyMessage] = [SYSTEM, FIRST, said]
    given = [*before, SECOND]
    options: dict[str, Any] = {"tools": tools, "tool_choice": "none"} if tools else {}
    reply = model.invoke(given, thread(name), response_format=ANSWER, **options)
    check_as_fresh(model, reply, given, before, (known, tools))


class Spy:
    """Keeps what a graph gave the model at each call, and has a call first and then an answer."""

    def __init__(self) -> None:
        self.given: list[list[AnyMessage]] = []
        self.replies: list[Any] = []

    def middleware(self) -> Any:
        @wrap_model_call
        def spy(request: Any, handler: Any) -> Any:
            is_answer = isinstance(request.messages[-1], ToolMessage) or not request.tools
            choice = {"tool_choice": ("none" if is_answer else "any") if request.tools else None}
            settings = {"parallel_tool_calls": False} if request.tools else {}
            self.given.append(list(request.messages))
            response = handler(request.override(model_settings={**settings, "response_format": ANSWER}, **choice))
            self.replies.append(response.result[0])
            return response

        return spy


def test_a_message_removed_from_a_graph_s_state_is_gone_from_the_session(model: ChatDLite) -> None:
    spy = Spy()
    agent: Any = create_agent(model, [], middleware=[spy.middleware()], checkpointer=InMemorySaver())
    config = thread("removed")
    for text in ("one", "two", "three"):
        agent.invoke({"messages": [HumanMessage(text, id=text)]}, config)
    agent.update_state(config, {"messages": [RemoveMessage("two")]})
    agent.invoke({"messages": [HumanMessage("four")]}, config)
    assert [message.content for message in spy.given[-1] if message.type == "human"] == ["one", "three", "four"]
    assert spy.replies[-1].content == answer_afresh(model, spy.given[-1], []).content
    held, wanted = (ids_of(model, messages, []) for messages in (spy.given[-2], spy.given[-1]))
    assert 0 < cache_read(spy.replies[-1]) <= num_common(held, wanted) < len(wanted) - 8


def test_a_summarized_history_is_answered_as_a_fresh_one(model: ChatDLite) -> None:
    spy = Spy()
    summarizing = SummarizationMiddleware(
        model, trigger=("messages", 6), keep=("messages", 2), summary_prompt="{messages}"
    )
    agent: Any = create_agent(model, [], middleware=[summarizing, spy.middleware()], checkpointer=InMemorySaver())
    for number in range(5):
        agent.invoke({"messages": [HumanMessage(f"message {number}")]}, thread("summarized"))
    shortened = [i for i in range(1, 5) if len(spy.given[i]) <= len(spy.given[i - 1])]
    assert shortened  # it did summarize
    for given, reply in zip(spy.given, spy.replies, strict=True):
        assert reply.content == answer_afresh(model, given, []).content


def test_cleared_tool_results_are_answered_as_a_fresh_history(model: ChatDLite) -> None:
    def look() -> str:
        """Look around."""
        return "a lake, and behind it a hill " * 4

    spy = Spy()
    clearing = ContextEditingMiddleware(edits=[ClearToolUsesEdit(trigger=150, keep=1)])
    agent: Any = create_agent(model, [look], middleware=[clearing, spy.middleware()], checkpointer=InMemorySaver())
    for number in range(4):
        agent.invoke({"messages": [HumanMessage(f"message {number}")]}, thread("cleared"))
    results = [message.content for message in spy.given[-1] if message.type == "tool"]
    assert "[cleared]" in results and results[-1] != "[cleared]"
    tools = model.bind_tools([look]).kwargs["tools"]  # type: ignore[attr-defined]
    answers = [pair for pair in zip(spy.given, spy.replies, strict=True) if pair[0][-1].type == "tool"]
    assert len(answers) == 4
    for given, reply in answers:
        assert reply.content == answer_afresh(model, given, tools).content


def test_a_rate_limiter_is_asked_before_each_call(model: ChatDLite) -> None:
    class Counting(InMemoryRateLimiter):
        count = 0

        def acquire(self, *, blocking: bool = True) -> bool:
            self.count += 1
            return True

        async def aacquire(self, *, blocking: bool = True) -> bool:
            self.count += 1
            return True

    limiter = Counting()
    limited = model.model_copy(update={"rate_limiter": limiter})
    limited.invoke("hello")
    list(limited.stream("hello"))
    asyncio.run(limited.ainvoke("hello"))
    assert limiter.count == 3


@pytest.mark.filterwarnings("ignore::langchain_core._api.beta_decorator.LangChainBetaWarning")
def test_events_of_both_versions_tell_the_whole_reply(model: ChatDLite) -> None:
    asking = model.bind(response_format=ANSWER)
    expected = asking.invoke("hello")

    async def second() -> list[Any]:
        return [event async for event in asking.astream_events("hello", version="v2")]

    events = asyncio.run(second())
    parts = [event["data"]["chunk"] for event in events if event["event"] == "on_chat_model_stream"]
    assert "".join(part.content for part in parts) == expected.content
    assert events[-1]["data"]["output"].content == expected.content
    stream = model.stream_events("hello", version="v3", response_format=ANSWER)
    assert "".join(stream.text) == expected.content
    assert stream.output.usage_metadata == expected.usage_metadata

    async def third() -> Any:
        stream = await model.astream_events("hello", version="v3", response_format=ANSWER)
        return "".join([text async for text in stream.text])

    assert asyncio.run(third()) == expected.content

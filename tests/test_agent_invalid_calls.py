"""Malformed calls of every kind, said once and said for ever, in LangChain's own agent over a scripted model."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import wrap_model_call
from langchain_core.messages import AIMessage, BaseMessage, ToolMessage
from langchain_core.messages.tool import invalid_tool_call
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver

from dlite_agent import ChatDLite, Settings
from dlite_agent.agent import InvalidCallRetry
from dlite_agent.agent.invalid_calls import INVALID
from dlite_agent.agent.turns import ENDED_BY
from dlite_agent.bench.agent.malformed import MALFORMED, is_whole, whole
from dlite_agent.runtime import close_all
from dlite_agent.testing import ScriptedChatModel, calling, write_tiny_chat_model

GO: dict[str, Any] = {"messages": [("user", "go")]}
THREAD: dict[str, Any] = {"configurable": {"thread_id": "1"}, "recursion_limit": 60}


def agent_of(model: ScriptedChatModel, tools: list[Any], **bounds: int) -> Any:
    return create_agent(model, tools, middleware=[InvalidCallRetry(**bounds)], checkpointer=InMemorySaver())


def assert_whole(messages: list[BaseMessage]) -> None:
    assert is_whole(messages), messages


@pytest.mark.parametrize("kind", MALFORMED)
def test_a_malformed_call_for_ever_is_bounded_reported_and_never_run(add: Any, ran: Any, kind: str) -> None:
    model = ScriptedChatModel(script=[MALFORMED[kind]])
    events = list(agent_of(model, [add]).stream(GO, THREAD, stream_mode=["custom", "values"]))
    messages = events[-1][1]["messages"]
    assert ran == []
    assert model.choices == [None, None, None, "none"]
    assert_whole(messages)
    errors = [message for message in messages if isinstance(message, ToolMessage)]
    assert errors and all(error.status == "error" and INVALID in error.additional_kwargs for error in errors)
    assert max(len(error.text) for error in errors) < 600
    assert messages[-1].additional_kwargs[ENDED_BY] == "invalid_calls"
    assert messages[-1].text and not messages[-1].tool_calls
    assert [payload for mode, payload in events if mode == "custom"][-1]["dlite"] == "turn_ended"


@pytest.mark.parametrize("kind", MALFORMED)
def test_a_model_that_mends_its_call_goes_on_and_has_it_run_once(add: Any, ran: Any, kind: str) -> None:
    model = ScriptedChatModel(script=[MALFORMED[kind], calling("add", a=1, b=1), AIMessage("2")])
    messages = asyncio.run(agent_of(model, [add]).ainvoke(GO, THREAD))["messages"]
    assert ran == [(1, 1)]
    assert messages[-1].text == "2"
    assert_whole(messages)


def test_a_model_without_tools_may_still_answer_at_the_end(add: Any, ran: Any) -> None:
    model = ScriptedChatModel(script=[*[MALFORMED["unclosed"]] * 3, AIMessage("I cannot add these.")])
    messages = agent_of(model, [add]).invoke(GO, THREAD)["messages"]
    assert messages[-1].text == "I cannot add these."
    assert ENDED_BY not in messages[-1].additional_kwargs


def test_the_next_turn_starts_afresh(add: Any, ran: Any) -> None:
    model = ScriptedChatModel(script=[*[MALFORMED["unclosed"]] * 4, calling("add", a=1, b=1), AIMessage("2")])
    agent = agent_of(model, [add])
    agent.invoke(GO, THREAD)
    messages = agent.invoke(GO, THREAD)["messages"]
    assert messages[-1].text == "2"
    assert ran == [(1, 1)]
    assert_whole(messages)


def test_valid_calls_beside_an_invalid_one_are_run_and_the_rounds_still_counted(add: Any, ran: Any) -> None:
    mixed = whole({"a": 1, "b": 1})
    mixed.invalid_tool_calls = [invalid_tool_call(name="add", args="{", id="i1", error=None)]
    messages = agent_of(ScriptedChatModel(script=[mixed]), [add]).invoke(GO, THREAD)["messages"]
    assert ran == [(1, 1)] * 3
    assert messages[-1].additional_kwargs[ENDED_BY] == "invalid_calls"
    assert_whole(messages)


def test_invalid_calls_between_valid_ones_are_bounded_too(add: Any, ran: Any) -> None:
    script = [reply for n in range(9) for reply in (MALFORMED["unclosed"], calling("add", a=n, b=n))]
    model = ScriptedChatModel(script=script)
    messages = agent_of(model, [add], max_rounds=4).invoke(GO, THREAD)["messages"]
    assert ran == [(n, n) for n in range(3)]
    assert messages[-1].additional_kwargs[ENDED_BY] == "invalid_calls"


def test_a_cut_reply_of_our_own_model_keeps_the_calls_it_finished(add: Any, ran: Any) -> None:
    finished = whole({"a": 1, "b": 1}, finish_reason="length", dlite={"raw": "..."})
    agent_of(ScriptedChatModel(script=[finished, AIMessage("2")]), [add]).invoke(GO, THREAD)
    assert ran == [(1, 1)]


def test_arguments_are_held_to_a_json_schema_too(ran: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}

    @tool("count", description="Count.", args_schema=schema)
    def count(**args: Any) -> str:
        ran.append(args)
        return "counted"

    script = [calling("count", a="x"), calling("count"), calling("count", a=1), AIMessage("done")]
    messages = agent_of(ScriptedChatModel(script=script), [count]).invoke(GO, THREAD)["messages"]
    assert ran == [{"a": 1}]
    said = [message.text for message in messages if isinstance(message, ToolMessage)]
    assert "'x' is not of type 'integer'" in said[0] and "'a' is a required property" in said[1]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "string", "pattern": r"^\p{L}+$"},  # of another dialect of regular expressions
        {"$ref": "#/definitions/Missing"},
        {"$ref": "http://127.0.0.1:9/schema.json"},
        {"type": "strin"},
    ],
)
def test_a_schema_that_cannot_be_checked_leaves_that_to_the_tool(ran: Any, part: dict[str, str]) -> None:
    @tool("count", description="Count.", args_schema={"type": "object", "properties": {"a": part}})
    def count(**args: Any) -> str:
        ran.append(args)
        return "counted"

    script = [calling("count", a="x"), AIMessage("done")]
    messages = agent_of(ScriptedChatModel(script=script), [count]).invoke(GO, THREAD)["messages"]
    assert ran == [{"a": "x"}]
    assert messages[-1].text == "done"


def test_errors_tell_a_cut_reply_from_a_broken_one_and_are_the_same_bytes_again(add: Any) -> None:
    def errors(kind: str) -> list[str]:
        model = ScriptedChatModel(script=[MALFORMED[kind], AIMessage("no")])
        messages = agent_of(model, [add]).invoke(GO, THREAD)["messages"]
        return [message.text for message in messages if isinstance(message, ToolMessage)]

    assert "token limit" in errors("cut inside a key")[0]
    assert "token limit" not in errors("unclosed")[0]
    assert json.dumps(errors("wrong type")) == json.dumps(errors("wrong type"))
    assert "a: Input should be a valid integer" in errors("wrong type")[0]


def test_calls_that_the_engine_cuts_are_answered_and_end_in_words(tmp_path: Path, add: Any, ran: Any) -> None:
    @wrap_model_call
    def forced(request: Any, handler: Any) -> Any:
        choice = request.tool_choice or "any"
        return handler(request.override(tool_choice=choice, model_settings={"max_tokens": 30}))

    settings = Settings(home=tmp_path, redis_url=None, threads=1, offline=True)
    model = ChatDLite(model=str(write_tiny_chat_model(tmp_path / "model")), settings=settings)
    agent: Any = create_agent(model, [add], middleware=[InvalidCallRetry(), forced], checkpointer=InMemorySaver())
    messages = agent.invoke(GO, THREAD)["messages"]
    close_all()
    assert ran == []
    assert_whole(messages)
    replies = [message for message in messages if isinstance(message, AIMessage)]
    assert [len(reply.invalid_tool_calls) for reply in replies] == [1, 1, 1, 0]
    assert [reply.response_metadata["finish_reason"] for reply in replies] == ["length"] * 4
    assert all("token limit" in message.text for message in messages if isinstance(message, ToolMessage))
    reused = [reply.usage_metadata["input_token_details"]["cache_read"] for reply in replies]  # type: ignore[index]
    totals = [reply.usage_metadata["total_tokens"] for reply in replies]  # type: ignore[index]
    assert reused[1:] == [total - 1 for total in totals[:-1]]  # asking again computes nothing twice

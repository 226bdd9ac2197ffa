"""What breaks the reuse of a prompt, seen on a tiny target that really computes and reuses rows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import wrap_model_call
from langchain_core.messages import AIMessage, HumanMessage, RemoveMessage, SystemMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver

from dlite_agent import ChatDLite, Settings
from dlite_agent.agent import DriftReporter
from dlite_agent.agent.drift import ADVICE, find_drift, record_prompt
from dlite_agent.runtime import close_all
from dlite_agent.testing import TINY_CHAT_TEMPLATE, write_tiny_chat_model

GO: dict[str, Any] = {"messages": [("user", "go on with it")]}
THREAD: dict[str, Any] = {"configurable": {"thread_id": "1"}}
FORGETFUL = TINY_CHAT_TEMPLATE.replace("{{ message['content'] }}", "{{ message['content'] }}{{ messages | length }}")
"""A template that writes into every message how many there are."""


@tool
def look() -> str:
    """Look around."""
    return "a lake"


@pytest.fixture(scope="module")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., ChatDLite]]:
    home = tmp_path_factory.mktemp("home")

    def make(template: str = TINY_CHAT_TEMPLATE) -> ChatDLite:
        folder = write_tiny_chat_model(tmp_path_factory.mktemp("model"))
        (folder / "chat_template.jinja").write_text(template)
        settings = Settings(home=home, redis_url=None, threads=1, offline=True)
        return ChatDLite(model=str(folder), settings=settings, max_tokens=8)

    yield make
    close_all()


@pytest.fixture(scope="module")
def model(make_model: Callable[..., ChatDLite]) -> ChatDLite:
    return make_model()


def agent_of(model: ChatDLite, *middleware: Any, prompt: str = "You are terse.", tools: Any = ()) -> Any:
    more = [*middleware, DriftReporter()]
    return create_agent(model, [*tools], system_prompt=prompt, middleware=more, checkpointer=InMemorySaver())


def turn(agent: Any, given: Any = GO) -> tuple[list[Any], AIMessage]:
    """The reports of a turn, and its reply."""
    events = list(agent.stream(given, THREAD, stream_mode=["custom", "values"]))
    return [payload for mode, payload in events if mode == "custom"], events[-1][1]["messages"][-1]


def usage(message: Any) -> tuple[int, int, int]:
    told = message.usage_metadata
    return told["input_tokens"], told["total_tokens"], told["input_token_details"]["cache_read"]


def assert_cost(event: Any, before: AIMessage, reply: AIMessage) -> None:
    num_prompt, _, reused = usage(reply)
    assert event["num_reused"] == reused
    assert event["num_lost"] == min(usage(before)[1], num_prompt) - 1 - reused > 0
    assert event["advice"] == ADVICE[event["cause"]]


def test_a_conversation_that_only_grows_has_no_drift(model: ChatDLite) -> None:
    agent = agent_of(model)
    assert [turn(agent)[0] for _ in range(3)] == [[], [], []]


def test_a_clock_in_the_system_message_is_found(model: ChatDLite) -> None:
    ticks = count(1000)

    @wrap_model_call
    def clock(request: Any, handler: Any) -> Any:
        return handler(request.override(system_message=SystemMessage(f"It is {next(ticks)}.")))

    agent = agent_of(model, clock)
    _, first = turn(agent)
    (event,), second = turn(agent)
    assert (event["cause"], event["message"]) == ("system", None)
    assert_cost(event, first, second)


def test_tools_that_change_are_found_and_withholding_them_costs_nothing(model: ChatDLite) -> None:
    calls = count()

    @wrap_model_call
    def changing(request: Any, handler: Any) -> Any:
        request = request.override(tool_choice="none")
        return handler(request.override(tools=[]) if next(calls) == 2 else request)

    agent = agent_of(model, changing, tools=[look])
    first, second, third = turn(agent), turn(agent), turn(agent)
    assert first[0] == second[0] == []
    assert third[0][0]["cause"] == "tools"
    assert_cost(third[0][0], second[1], third[1])


@pytest.mark.parametrize("how", ["changed", "removed"])
def test_a_message_that_is_changed_or_removed_is_named(model: ChatDLite, how: str) -> None:
    agent = agent_of(model)
    turn(agent)
    _, before = turn(agent)
    (first, *_) = agent.get_state(THREAD).values["messages"]
    edit = HumanMessage("something else", id=first.id) if how == "changed" else RemoveMessage(id=first.id)
    agent.update_state(THREAD, {"messages": [edit]})
    (event,), reply = turn(agent)
    assert (event["cause"], event["message"], event["label"]) == (how, 0, "human")
    assert_cost(event, before, reply)


def test_a_message_put_in_between_by_a_middleware_is_named(model: ChatDLite) -> None:
    calls = count()

    @wrap_model_call
    def reminding(request: Any, handler: Any) -> Any:
        reminder = [HumanMessage("Remember to be brief.")] if next(calls) else []
        return handler(request.override(messages=[*request.messages[:1], *reminder, *request.messages[1:]]))

    agent = agent_of(model, reminding)
    _, first = turn(agent)
    (event,), second = turn(agent)
    assert (event["cause"], event["message"]) == ("inserted", 1)
    assert_cost(event, first, second)


def test_a_template_that_writes_history_anew_is_told_from_rows_that_were_not_kept(make_model: Any) -> None:
    rewriting = agent_of(make_model(FORGETFUL))
    _, first = turn(rewriting)
    (event,), second = turn(rewriting)
    assert event["cause"] == "template"
    assert_cost(event, first, second)
    model = make_model()
    agent = agent_of(model)
    _, first = turn(agent)
    keeper = model.runtime.keeper
    keeper._idle.clear()  # as another process would find it
    (event,), second = turn(agent)
    assert (event["cause"], event["num_reused"]) == ("not_kept", 0)
    assert_cost(event, first, second)


def test_taking_up_an_earlier_point_is_no_drift_and_async_calls_are_compared_too(model: ChatDLite) -> None:
    agent = agent_of(model)
    turn(agent)
    turn(agent)
    early = next(s for s in agent.get_state_history(THREAD) if len(s.values["messages"]) == 2)

    async def fork() -> list[Any]:
        return [event async for event in agent.astream(GO, early.config, stream_mode="custom")]

    assert asyncio.run(fork()) == []
    agent.update_state(THREAD, {"messages": [HumanMessage("else", id=early.values["messages"][0].id)]})

    async def again() -> list[Any]:
        return [event async for event in agent.astream(GO, THREAD, stream_mode="custom")]

    assert [event["cause"] for event in asyncio.run(again())] == ["changed"]


def test_rows_the_store_has_lost_and_models_that_tell_nothing() -> None:
    def reply(cache_read: int | None, **stats: int) -> AIMessage:
        details: Any = {} if cache_read is None else {"input_token_details": {"cache_read": cache_read}}
        told: Any = {"input_tokens": 100, "output_tokens": 10, "total_tokens": 110, **details}
        return AIMessage("ok", usage_metadata=told, response_metadata={"dlite": {"stats": stats}})

    messages = [HumanMessage("a")]
    before = record_prompt(None, messages, [], reply(0))
    grown = [*messages, reply(0), HumanMessage("b")]

    def drift(said: AIMessage) -> Any:
        return find_drift(before, record_prompt(None, grown, [], said), said)

    assert drift(reply(40, blocks_lost=1)).cause == "evicted"
    assert drift(reply(40, blocks_lost=1)).num_lost == 59
    assert drift(reply(None)) is None
    assert drift(reply(99)) is None

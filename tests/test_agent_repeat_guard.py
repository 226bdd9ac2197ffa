"""Repeated calls in LangChain's own agent over a scripted model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from langchain.agents import create_agent
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_core.tools import ToolException, tool

from dlite_agent.agent import RepeatGuard
from dlite_agent.agent.repeat_guard import REPEATED
from dlite_agent.agent.turns import ENDED_BY
from dlite_agent.testing import ScriptedChatModel, calling


def run(model: ScriptedChatModel, one: Any, guard: RepeatGuard) -> list[BaseMessage]:
    agent = create_agent(model, [one], middleware=[guard])
    messages: list[BaseMessage] = agent.invoke({"messages": [HumanMessage("go")]})["messages"]
    return messages


def repeats(messages: list[BaseMessage]) -> list[str | None]:
    return [m.additional_kwargs.get(REPEATED) for m in messages if isinstance(m, ToolMessage)]


def test_a_repeated_call_is_answered_from_the_record_and_then_tools_are_withheld(add: Any, ran: Any) -> None:
    model = ScriptedChatModel(script=[calling("add", a=1, b=2), calling("add", b=2, a=1), AIMessage("3")])
    messages = run(model, add, RepeatGuard())
    assert ran == [(1, 2)]
    assert repeats(messages) == [None, "recorded"]
    assert messages[4].text.startswith("3\n")
    assert model.choices == [None, None, "none"]


def test_it_does_the_same_asynchronously_and_reports_it(add: Any, ran: Any) -> None:
    async def events() -> list[Any]:
        model = ScriptedChatModel(script=[calling("add", a=1, b=2), calling("add", a=1, b=2), AIMessage("3")])
        agent = create_agent(model, [add], middleware=[RepeatGuard()])
        given: Any = {"messages": [HumanMessage("go")]}
        return [event async for event in agent.astream(given, stream_mode="custom")]

    assert asyncio.run(events()) == [{"dlite": "repeated_call", "tool": "add", "how": "recorded"}]
    assert ran == [(1, 2)]


def test_a_call_is_run_again_after_another_and_the_same_result_is_marked(add: Any, ran: Any) -> None:
    calls = [calling("add", a=a, b=a) for a in (1, 5, 1, 5, 1)]
    model = ScriptedChatModel(script=[*calls, AIMessage("done")])
    messages = run(model, add, RepeatGuard())
    assert ran == [(1, 1), (5, 5), (1, 1), (5, 5), (1, 1)]
    assert repeats(messages) == [None, None, "same", "same", "same"]
    assert model.choices == [None] * 5 + ["none"]  # going round in a circle is bounded


def test_another_result_of_the_same_call_is_no_repeat() -> None:
    progress = iter(["10 %", "60 %", "60 %", "done"])

    @tool
    def status() -> str:
        """Say how far it is."""
        return next(progress)

    model = ScriptedChatModel(script=[*[calling("status")] * 4, AIMessage("It is done.")])
    messages = run(model, status, RepeatGuard(volatile=["status"]))
    assert repeats(messages) == [None, None, "same", None]
    assert messages[-1].text == "It is done."
    assert set(model.choices) == {None}


def test_a_call_that_failed_may_be_tried_again() -> None:
    answers: Iterator[Any] = iter([ToolException("busy"), ToolException("busy"), "a lake"])

    @tool
    def look() -> str:
        """Look around."""
        answer = next(answers)
        if isinstance(answer, ToolException):
            raise answer
        return str(answer)

    look.handle_tool_error = True
    messages = run(ScriptedChatModel(script=[*[calling("look")] * 3, AIMessage("A lake.")]), look, RepeatGuard())
    assert repeats(messages) == [None, "same", None]


def test_a_turn_has_a_bounded_number_of_calls(add: Any, ran: Any) -> None:
    calls = [calling("add", a=number, b=0) for number in range(3)]
    model = ScriptedChatModel(script=[*calls, AIMessage("enough")])
    run(model, add, RepeatGuard(max_calls=3))
    assert model.choices == [None, None, None, "none"]


def test_a_model_that_calls_on_without_tools_is_stopped_in_words(add: Any, ran: Any) -> None:
    model = ScriptedChatModel(script=[calling("add", a=1, b=2)])
    messages = run(model, add, RepeatGuard())
    assert ran == [(1, 2)]
    assert model.choices == [None, None, "none"]
    assert messages[-1].additional_kwargs[ENDED_BY] == "repeated_calls"
    assert messages[-2].text.startswith("Error: this call was not run")


def test_call_ids_that_every_reply_uses_again_do_not_mix_results_up(add: Any, ran: Any) -> None:
    def said(a: int) -> AIMessage:
        return AIMessage("", tool_calls=[{"name": "add", "args": {"a": a, "b": 0}, "id": "call_0"}])

    messages = run(ScriptedChatModel(script=[said(1), said(2), said(2), AIMessage("2")]), add, RepeatGuard())
    assert [m.text.split("\n")[0] for m in messages if isinstance(m, ToolMessage)] == ["1", "2", "2"]
    assert ran == [(1, 0), (2, 0)]

"""The plan in the state of a graph, and out of the way of the cache."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langgraph.checkpoint.memory import InMemorySaver

from dlite_agent import RedisSaver, create_dlite_agent
from dlite_agent.agent.plan import edit_plan, plan_text
from dlite_agent.testing import ScriptedChatModel, calling

GO: dict[str, Any] = {"messages": [("user", "go")]}
THREAD: dict[str, Any] = {"configurable": {"thread_id": "1"}}


def writing(*statuses: str) -> AIMessage:
    todos = [{"content": f"step {number}", "status": status} for number, status in enumerate(statuses, start=1)]
    return calling("write_todos", todos=todos)


def marking(*edits: tuple[int, str, str]) -> AIMessage:
    return AIMessage(
        "",
        tool_calls=[
            {"name": "update_plan", "args": {"step": step, "status": status, "note": note}, "id": f"m{step}{status}"}
            for step, status, note in edits
        ],
    )


SCRIPT = [
    writing("pending", "pending"),
    marking((1, "in_progress", "")),
    marking((1, "completed", "3 files"), (2, "in_progress", "")),
    AIMessage("half done"),
    marking((2, "completed", "")),
    AIMessage("done"),
]


def agent_of(model: ScriptedChatModel, saver: Any) -> Any:
    return create_dlite_agent(model, [], checkpointer=saver, has_plan_updates=True)


def statuses(values: Any) -> list[str]:
    return [step["status"] for step in values["todos"]]


def test_the_plan_is_streamed_as_it_changes_and_two_steps_may_change_at_once() -> None:
    agent = agent_of(ScriptedChatModel(script=SCRIPT), InMemorySaver())
    events = [event for event in agent.stream(GO, THREAD, stream_mode="custom") if event["dlite"] == "plan"]
    assert [statuses(event) for event in events] == [
        ["pending", "pending"],
        ["in_progress", "pending"],
        ["completed", "in_progress"],
    ]
    assert agent.get_state(THREAD).values["todos"] == [
        {"content": "step 1", "status": "completed", "note": "3 files"},
        {"content": "step 2", "status": "in_progress"},
    ]


def test_the_prompt_only_grows_while_the_plan_changes() -> None:
    def texts(messages: list[BaseMessage]) -> list[str]:
        return [repr((message.type, message.text, getattr(message, "tool_calls", None))) for message in messages]

    model = ScriptedChatModel(script=SCRIPT)
    agent = agent_of(model, InMemorySaver())
    agent.invoke(GO, THREAD)
    agent.invoke(GO, THREAD)
    prompts = [texts(prompt) for prompt in model.prompts]
    assert len(prompts) == len(SCRIPT)
    for shorter, longer in pairwise(prompts):
        assert longer[: len(shorter)] == shorter
    assert prompts[0][0].startswith("('system'") and "step 1" not in prompts[-1][0]


def test_a_plan_survives_its_graph_a_fork_and_an_edit_by_hand(client: Any) -> None:
    model = ScriptedChatModel(script=SCRIPT)
    agent_of(model, RedisSaver(client)).invoke(GO, THREAD)
    agent = agent_of(model, RedisSaver(client))  # as after a restart: everything is from the server
    assert statuses(agent.invoke(GO, THREAD)) == ["completed", "completed"]
    early = next(
        s for s in agent.get_state_history(THREAD) if s.values.get("todos") and statuses(s.values)[0] == "pending"
    )
    fork = agent.update_state(early.config, {"messages": [HumanMessage("otherwise")]}, as_node="__start__")
    model.prompts[:] = model.prompts[:1]
    assert statuses(agent.invoke(None, fork)) == ["completed", "in_progress"]
    by_hand = agent.update_state(THREAD, {"todos": {"step": 2, "status": "completed", "note": "by hand"}})
    assert agent.get_state(by_hand).values["todos"][1]["note"] == "by hand"
    replaced = agent.update_state(THREAD, {"todos": []})
    assert agent.get_state(replaced).values["todos"] == []


@pytest.mark.parametrize("step", [0, 3, -1])
def test_a_step_that_is_not_there_is_an_error_and_changes_nothing(step: int) -> None:
    script = [writing("pending", "pending"), marking((step, "completed", "")), AIMessage("done")]
    agent = agent_of(ScriptedChatModel(script=script), InMemorySaver())
    state = asyncio.run(agent.ainvoke(GO, THREAD))
    (error,) = [m for m in state["messages"] if isinstance(m, ToolMessage) and m.status == "error"]
    assert "step" in error.text
    assert statuses(state) == ["pending", "pending"]


def test_an_edit_names_the_step_it_changed() -> None:
    agent = agent_of(ScriptedChatModel(script=SCRIPT), InMemorySaver())
    messages = agent.invoke(GO, THREAD)["messages"]
    said = [message.text for message in messages if isinstance(message, ToolMessage)][1:]
    assert said == ["1. [~] step 1", "1. [x] step 1 (3 files)", "2. [~] step 2"]


def test_edits_of_nothing_change_nothing_and_a_plan_has_one_text() -> None:
    assert edit_plan(None, {"step": 1, "status": "completed", "note": ""}) == []
    assert edit_plan([{"content": "a", "status": "pending"}], None) == [{"content": "a", "status": "pending"}]
    assert plan_text([{"content": "a", "status": "pending"}, {"content": "b", "status": "completed"}]) == (
        "1. [ ] a\n2. [x] b"
    )

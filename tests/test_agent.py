"""The middleware small models need, in LangChain's own agent over a scripted model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage
from langgraph.checkpoint.memory import InMemorySaver

from dlite_agent.agent import RepeatGuard, create_dlite_agent
from dlite_agent.agent.events import (
    AgentEvent,
    CallEvent,
    PlanEvent,
    ReportEvent,
    ResultEvent,
    ToolEvent,
    as_json,
    from_json,
    run_turn,
)
from dlite_agent.demo.task import DemoTask
from dlite_agent.errors import ConfigError
from dlite_agent.testing import ScriptedChatModel, calling


def broken(number: int) -> AIMessage:
    call = {"name": "add", "args": '{"a": 1', "id": f"broken{number}", "error": None, "type": "invalid_tool_call"}
    return AIMessage("", invalid_tool_calls=[call])


def plan(*statuses: str) -> AIMessage:
    return calling(
        "write_todos", todos=[{"content": f"step {i}", "status": status} for i, status in enumerate(statuses)]
    )


def test_a_turn_streams_its_calls_results_and_plan_once(add: Any) -> None:
    script = [plan("pending", "pending"), calling("add", a=2, b=2), AIMessage("4"), AIMessage("hello again")]
    model = ScriptedChatModel(script=script)
    agent = create_dlite_agent(model, [add], checkpointer=InMemorySaver())
    config = {"configurable": {"thread_id": "1"}}
    events = list(run_turn(agent, "go", config))
    assert [event.name for event in events if isinstance(event, ToolEvent)] == ["write_todos", "add"]
    assert [event.text for event in events if isinstance(event, ResultEvent)][1] == "4"
    plans = [event.todos for event in events if isinstance(event, PlanEvent)]
    assert plans == [[{"content": "step 0", "status": "pending"}, {"content": "step 1", "status": "pending"}]]
    assert not [event for event in run_turn(agent, "more", config) if isinstance(event, ToolEvent | ResultEvent)]


def test_a_middleware_of_ones_own_takes_the_place_of_ours(add: Any) -> None:
    model = ScriptedChatModel(script=[*(calling("add", a=n, b=n) for n in range(2)), AIMessage("enough")])
    agent = create_dlite_agent(model, [add], middleware=[RepeatGuard(max_calls=2)], name="adder")
    assert agent.invoke({"messages": [("user", "go")]})["messages"][-1].name == "adder"
    assert model.choices == [None, None, "none"]


def test_history_that_a_middleware_rewrites_is_not_shown_again(add: Any) -> None:
    script = [*(broken(number) for number in range(3)), AIMessage("fine")]
    agent = create_dlite_agent(ScriptedChatModel(script=script), [add], checkpointer=InMemorySaver())
    config = {"configurable": {"thread_id": "2"}}
    reports = [event for event in run_turn(agent, "go", config) if isinstance(event, ReportEvent)]
    assert [(event.kind, event.fields["num_rounds"]) for event in reports] == [("invalid_calls", n) for n in (1, 2, 3)]
    later = list(run_turn(agent, "and now?", config))
    assert len([event for event in later if isinstance(event, ToolEvent)]) == 0


def test_events_survive_json() -> None:
    call = CallEvent(10, 5, "stop", {"passes": 2, "draft_us": 1, "target_us": 999_999})
    events: list[AgentEvent] = [call, PlanEvent([{"content": "x"}]), ReportEvent("drift", {"num_lost": 3})]
    assert [from_json(json.loads(json.dumps(as_json(event)))) for event in events] == events
    assert call.tau == 2.0
    assert call.tokens_per_second == pytest.approx(4.0)
    assert from_json({"event": "turn", "number": 1}) is None


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    DemoTask.load(1).prepare(tmp_path)
    return tmp_path


@pytest.mark.parametrize("wording", range(1, 6))
def test_the_demo_counts_as_done_only_with_file_plan_and_answer(workspace: Path, wording: int) -> None:
    task = DemoTask.load(wording)
    assert len(task.turns) > task.kill_after_turn
    done = {"todos": [{"content": "x", "status": "completed"}] * 3, "messages": [AIMessage(f"It is {task.total}.")]}
    (workspace / "total.txt").write_text(f"total: {task.total}0")
    assert all(check.is_met for check in task.check(workspace, done))
    for spoilt in ({**done, "todos": []}, {**done, "messages": [AIMessage("It is 1754.5")]}):
        assert [check.is_met for check in task.check(workspace, spoilt)].count(False) == 1
    (workspace / "total.txt").write_text("754.55")
    assert not task.check(workspace, done)[0].is_met


def test_a_wording_that_is_not_there_says_which_are() -> None:
    with pytest.raises(ConfigError, match="1 to 5"):
        DemoTask.load(6)

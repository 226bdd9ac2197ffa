"""The middleware small models need, in LangChain's own agent over a scripted model."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.runnables import Runnable
from langgraph.checkpoint.memory import InMemorySaver
from pydantic import Field

from dlite_agent.agent import InvalidCallRetry, RepeatGuard, create_dlite_agent
from dlite_agent.agent.events import (
    AgentEvent,
    CallEvent,
    PlanEvent,
    ResultEvent,
    ToolEvent,
    as_json,
    from_json,
    run_turn,
)
from dlite_agent.agent.repeat_guard import REPEATED
from dlite_agent.demo.task import DemoTask
from dlite_agent.errors import ConfigError


class ScriptedModel(BaseChatModel):
    """Answers with its script, message by message, and notes which tool choice each call had."""

    script: list[AIMessage]
    choices: list[Any] = Field(default_factory=list)

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, tools: Sequence[Any], *, tool_choice: Any = None, **kwargs: Any) -> Runnable[Any, AIMessage]:
        return self.bind(tool_choice=tool_choice)

    def _generate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
        self.choices.append(kwargs.get("tool_choice"))
        return ChatResult(generations=[ChatGeneration(message=self.script[len(self.choices) - 1].model_copy())])


def calling(name: str, **args: Any) -> AIMessage:
    calling.count = getattr(calling, "count", 0) + 1  # type: ignore[attr-defined]
    return AIMessage("", tool_calls=[{"name": name, "args": args, "id": f"call{calling.count}"}])  # type: ignore[attr-defined]


def broken(number: int) -> AIMessage:
    call = {"name": "add", "args": '{"a": 1', "id": f"broken{number}", "error": None, "type": "invalid_tool_call"}
    return AIMessage("", invalid_tool_calls=[call])


@pytest.fixture
def ran() -> list[tuple[int, int]]:
    return []


@pytest.fixture
def add(ran: list[tuple[int, int]]) -> Callable[[int, int], int]:
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        ran.append((a, b))
        return a + b

    return add


def run(model: ScriptedModel, add: Any, *middleware: Any) -> list[BaseMessage]:
    agent = create_agent(model, [add], middleware=list(middleware))
    messages: list[BaseMessage] = agent.invoke({"messages": [HumanMessage("go")]})["messages"]
    return messages


def test_a_repeated_call_is_answered_from_the_record_and_then_tools_are_withheld(add: Any, ran: Any) -> None:
    model = ScriptedModel(script=[calling("add", a=1, b=2), calling("add", b=2, a=1), AIMessage("3")])
    messages = run(model, add, RepeatGuard())
    assert ran == [(1, 2)]
    results = [message for message in messages if isinstance(message, ToolMessage)]
    assert str(results[1].content).startswith("3\n")
    assert [REPEATED in result.additional_kwargs for result in results] == [False, True]
    assert model.choices == [None, None, "none"]


def test_another_call_in_between_makes_it_no_repeat(add: Any, ran: Any) -> None:
    calls = [calling("add", a=1, b=2), calling("add", a=5, b=5), calling("add", a=1, b=2)]
    run(ScriptedModel(script=[*calls, AIMessage("done")]), add, RepeatGuard())
    assert ran == [(1, 2), (5, 5), (1, 2)]


def test_a_turn_has_a_bounded_number_of_calls(add: Any, ran: Any) -> None:
    calls = [calling("add", a=number, b=0) for number in range(3)]
    model = ScriptedModel(script=[*calls, AIMessage("enough")])
    run(model, add, RepeatGuard(max_calls=3))
    assert model.choices == [None, None, None, "none"]


def test_an_invalid_call_is_never_run_and_asked_again_a_bounded_number_of_times(add: Any, ran: Any) -> None:
    model = ScriptedModel(script=[broken(number) for number in range(5)])
    messages = run(model, add, InvalidCallRetry(max_retries=2))
    assert ran == []
    assert len(model.choices) == 3
    errors = [message for message in messages if isinstance(message, ToolMessage)]
    assert [error.status for error in errors] == ["error", "error"]
    assert isinstance(messages[-1], AIMessage)
    assert messages[-1].invalid_tool_calls  # the end is in plain sight


def test_a_model_that_mends_its_call_goes_on(add: Any, ran: Any) -> None:
    run(ScriptedModel(script=[broken(9), calling("add", a=1, b=1), AIMessage("2")]), add, InvalidCallRetry())
    assert ran == [(1, 1)]


def plan(*statuses: str) -> AIMessage:
    return calling(
        "write_todos", todos=[{"content": f"step {i}", "status": status} for i, status in enumerate(statuses)]
    )


def test_a_turn_streams_its_calls_results_and_plan_once(add: Any) -> None:
    script = [plan("pending", "pending"), calling("add", a=2, b=2), AIMessage("4"), AIMessage("hello again")]
    model = ScriptedModel(script=script)
    agent = create_dlite_agent(model, [add], checkpointer=InMemorySaver())
    config = {"configurable": {"thread_id": "1"}}
    events = list(run_turn(agent, "go", config))
    assert [event.name for event in events if isinstance(event, ToolEvent)] == ["write_todos", "add"]
    assert [event.text for event in events if isinstance(event, ResultEvent)][1] == "4"
    plans = [event.todos for event in events if isinstance(event, PlanEvent)]
    assert plans == [[{"content": "step 0", "status": "pending"}, {"content": "step 1", "status": "pending"}]]
    assert not [event for event in run_turn(agent, "more", config) if isinstance(event, ToolEvent | ResultEvent)]


def test_history_that_a_middleware_rewrites_is_not_shown_again(add: Any) -> None:
    script = [*(broken(number) for number in range(3)), AIMessage("fine")]
    agent = create_dlite_agent(ScriptedModel(script=script), [add], checkpointer=InMemorySaver())
    config = {"configurable": {"thread_id": "2"}}
    list(run_turn(agent, "go", config))
    later = list(run_turn(agent, "and now?", config))
    assert len([event for event in later if isinstance(event, ToolEvent)]) == 0


def test_events_survive_json() -> None:
    call = CallEvent(10, 5, "stop", {"passes": 2, "draft_us": 1, "target_us": 999_999})
    events: list[AgentEvent] = [call, PlanEvent([{"content": "x"}])]
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

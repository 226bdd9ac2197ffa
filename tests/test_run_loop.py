"""The loop of `dlite-agent run` over a scripted model, with the checkpoints in a real server."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import redis
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.outputs import ChatResult
from langchain_core.tools import BaseTool, tool

from dlite_agent import RedisSaver
from dlite_agent.agent.events import PlanEvent, ResultEvent, TextEvent
from dlite_agent.errors import ConfigError
from dlite_agent.run.approval import Answer
from dlite_agent.run.events import (
    ApprovalEvent,
    EndEvent,
    ErrorEvent,
    ForkedEvent,
    NoteEvent,
    RunEvent,
    StartEvent,
    ToolsEvent,
    TurnEndEvent,
    UndoneEvent,
)
from dlite_agent.run.history import History, check_thread_name
from dlite_agent.run.inputs import Input, Message, SlashCommand
from dlite_agent.run.loop import Agent, Loop
from dlite_agent.run.opening import make_graph
from dlite_agent.run.stopping import Stopper
from dlite_agent.testing import ScriptedChatModel, calling

ADD_TWICE = AIMessage(
    "", tool_calls=[{"name": "add", "args": {"a": n, "b": n}, "id": f"add{n}", "type": "tool_call"} for n in (1, 2)]
)
PLAN = calling("write_todos", todos=[{"content": "step", "status": "pending"}])
Step = Input | type[KeyboardInterrupt]


class Steps:
    """Reads prepared input; a KeyboardInterrupt among it is a Ctrl-C at the prompt."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = list(steps)

    def read(self, question: ApprovalEvent | None) -> Input | None:
        step = self._steps.pop(0) if self._steps else None
        if step is KeyboardInterrupt:
            raise KeyboardInterrupt
        assert not isinstance(step, type)
        return step


class Seen(list[RunEvent]):
    """Keeps what is shown."""

    def show(self, event: RunEvent) -> None:
        self.append(event)

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self if isinstance(event, kind)]

    @property
    def outcomes(self) -> list[str]:
        return [event.outcome for event in self.of(TurnEndEvent)]


class Bench:
    """Runs loops on one thread of one server, each as another process would."""

    def __init__(self, client: redis.Redis, add: Callable[[int, int], int]) -> None:
        self.saver = RedisSaver(client)
        self.tools: list[BaseTool] = [tool(add)]
        self.history: History | None = None
        self.code = 0

    def run(self, model: ScriptedChatModel, *steps: Step, is_asking: bool = False) -> Seen:
        graph = make_graph(model, self.tools, self.saver, is_asking=is_asking)
        self.history = History(graph, self.saver, None, "thread")
        seen = Seen()
        agent = Agent(
            history=self.history,
            tools=self.tools,
            is_asking=is_asking,
            model="scripted",
            workspace=Path(),
            resume_command=lambda thread: f"resume {thread}",
        )
        with Stopper() as stopper:
            self.code = Loop(agent, view=seen, reader=Steps(steps), stopper=stopper).run()
        return seen

    @property
    def messages(self) -> list[Any]:
        assert self.history is not None
        return self.history.messages


@pytest.fixture
def bench(client: redis.Redis, add: Callable[[int, int], int]) -> Bench:
    return Bench(client, add)


def says(*script: AIMessage | str) -> ScriptedChatModel:
    return ScriptedChatModel(script=[AIMessage(said) if isinstance(said, str) else said for said in script])


def types(messages: Sequence[Any]) -> list[str]:
    return [message.type for message in messages]


def test_a_turn_is_shown_and_the_plan_only_when_it_changes(bench: Bench) -> None:
    model = says(PLAN, calling("add", a=1, b=2), "three", PLAN.model_copy(update={"id": None}), "as before")
    seen = bench.run(model, Message("go"), SlashCommand("/plan"), Message("again"))
    assert [event.text for event in seen.of(TextEvent)] == ["three", "as before"]
    assert len(seen.of(PlanEvent)) == 2  # as it came, and as it was asked for
    assert seen.outcomes == ["done", "done"]
    assert seen.of(EndEvent) == [EndEvent("resume thread")]
    later = bench.run(model)
    assert later.of(StartEvent)[0].num_turns == 2
    assert len(later.of(PlanEvent)) == 1


def test_calls_run_as_they_are_decided(bench: Bench, ran: list[tuple[int, int]]) -> None:
    model = says(*(calling("add", a=n, b=0) for n in (1, 2, 3, 4)), "done")
    decisions = [Answer("no", "not one"), Answer("edit", args={"a": "x"}), Answer("edit", args={"a": 20, "b": 0})]
    seen = bench.run(model, Message("go"), *decisions, Answer("always"), SlashCommand("/tools"), is_asking=True)
    assert ran == [(20, 0), (3, 0), (4, 0)]
    assert [event.args["a"] for event in seen.of(ApprovalEvent)] == [1, 2, 2, 3]
    assert "not one" in seen.of(ResultEvent)[0].text
    assert any("not one" in str(message.content) for message in model.prompts[1])
    assert "do not fit add" in seen.of(ErrorEvent)[0].message
    assert [event.tools[0]["is_asked"] for event in seen.of(ToolsEvent)] == [False]
    assert seen.outcomes == ["done"]


def test_a_question_is_asked_again_and_two_calls_of_one_reply_are_two(bench: Bench, ran: list[tuple[int, int]]) -> None:
    first = bench.run(says(ADD_TWICE), Message("go"), Answer("yes"), is_asking=True)
    assert first.outcomes == ["waiting"]
    assert ran == [(1, 1)]
    second = bench.run(says("done"), Message("not an answer"), Answer("no"), is_asking=True)
    assert [event.args["a"] for event in second.of(ApprovalEvent)] == [2]
    assert "answer first" in second.of(ErrorEvent)[0].message
    assert second.outcomes == ["done"]
    assert ran == [(1, 1)]
    assert types(bench.messages) == ["human", "ai", "tool", "tool", "ai"]


def test_ctrl_c_at_a_question_stops_the_turn_and_the_call_is_not_run(bench: Bench, ran: list[tuple[int, int]]) -> None:
    model = says(ADD_TWICE, "next")
    steps: list[Step] = [Message("go"), Answer("yes"), KeyboardInterrupt, Message("more")]
    seen = bench.run(model, *steps, is_asking=True)
    assert seen.outcomes == ["stopped", "done"]
    assert ran == [(1, 1)]
    assert types(bench.messages) == ["human", "ai", "tool", "tool", "ai", "human", "ai"]
    results = {m.tool_call_id: m for m in bench.messages if isinstance(m, ToolMessage)}
    assert results["add1"].content == "2"
    assert "was not run" in str(results["add2"].content)
    assert types(model.prompts[1])[1:] == types(bench.messages)[:-1]


def test_a_person_leaves_with_a_second_ctrl_c_in_a_row(bench: Bench) -> None:
    steps: list[Step] = [KeyboardInterrupt, Message("go"), KeyboardInterrupt, KeyboardInterrupt, Message("never")]
    seen = bench.run(says("hi"), *steps)
    assert len(seen.of(NoteEvent)) == 2
    assert seen.outcomes == ["done"]
    assert isinstance(seen[-1], EndEvent)


def test_a_signal_in_a_tool_ends_the_turn_when_the_tool_has(bench: Bench, ran: list[tuple[int, int]]) -> None:
    @tool
    def stop(a: int) -> str:
        """Press Ctrl-C."""
        os.kill(os.getpid(), signal.SIGINT)
        ran.append((a, a))
        return "stopping"

    bench.tools.append(stop)
    seen = bench.run(says(calling("stop", a=1), "never said"), Message("go"), Message("more"))
    assert seen.outcomes == ["stopped", "done"]
    assert [str(message.content) for message in bench.messages[2:4]] == [
        "stopping",
        "I stopped here: the person stopped the turn.",
    ]
    assert ran == [(1, 1)]


def test_undo_goes_back_and_what_was_undone_can_be_read_and_forked(bench: Bench) -> None:
    model = says(PLAN, "one", "two", "other two", "two again")
    steps: list[Step] = [Message("first"), Message("second"), SlashCommand("/undo"), Message("second, better")]
    seen = bench.run(model, *steps)
    (undone,) = seen.of(UndoneEvent)
    assert (undone.text, undone.num_turns) == ("second", 1)
    assert [str(m.content) for m in bench.messages if m.type == "human"] == ["first", "second, better"]
    assert [str(message.content) for message in model.prompts[-1] if message.type == "human"][-1] == "second, better"
    assert "second" not in [message.content for message in model.prompts[-1]]
    assert bench.history is not None
    at = {"configurable": {"thread_id": "thread", "checkpoint_id": undone.checkpoint}}
    assert [m.content for m in bench.history.graph.get_state(at).values["messages"]][-2:] == ["second", "two"]

    forking = bench.run(model, SlashCommand(f"/fork way {undone.checkpoint}"), Message("go on"))
    assert forking.of(ForkedEvent) == [ForkedEvent("way", "thread", 0, 0)]
    assert [m.content for m in bench.messages if m.type != "tool"][-4:] == ["second", "two", "go on", "two again"]


def test_undo_takes_back_turn_by_turn_down_to_nothing(bench: Bench) -> None:
    undo = SlashCommand("/undo")
    model = says(PLAN, "one", "two", "stale", "fresh")
    steps: list[Step] = [Message("a"), Message("b"), undo, undo, undo, Message("x"), undo, Message("c")]
    seen = bench.run(model, *steps)
    assert [(event.text, event.num_turns) for event in seen.of(UndoneEvent)] == [("b", 1), ("a", 0), ("x", 0)]
    assert "nothing to undo" in seen.of(ErrorEvent)[0].message
    assert [message.content for message in bench.messages] == ["c", "fresh"]
    assert bench.history is not None
    assert not bench.history.state.values.get("todos")


def test_a_fork_goes_on_alone(bench: Bench) -> None:
    model = says("one", "two", "three")
    steps: list[Step] = [
        Message("a"),
        SlashCommand("/fork"),
        Message("b"),
        SlashCommand("/fork thread"),
        SlashCommand("/fork x y"),
    ]
    seen = bench.run(model, *steps)
    assert seen.of(ForkedEvent) == [ForkedEvent("thread-2", "thread", 0, 0)]
    assert [event.kind for event in seen.of(ErrorEvent)] == ["SessionExistsError", "UnknownSessionError"]
    assert seen.of(EndEvent) == [EndEvent("resume thread-2")]
    assert [message.content for message in bench.messages] == ["a", "one", "b", "two"]
    assert [e.thread for e in bench.run(model, SlashCommand("/fork")).of(ForkedEvent)] == ["thread-3"]
    assert [message.content for message in bench.messages] == ["a", "one"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("/nosuch", "/help lists them"),
        ("/plan now", "at most 0"),
        ("/fork 'a", "cannot be read"),
        ("/fork ''", "printable"),
    ],
)
def test_a_command_that_cannot_work_is_said(bench: Bench, line: str, expected: str) -> None:
    seen = bench.run(says("hi"), SlashCommand(line), SlashCommand("/help"), SlashCommand("/quit"), Message("never"))
    (error,) = seen.of(ErrorEvent)
    assert expected in error.message
    assert seen.outcomes == []


class FailingChatModel(ScriptedChatModel):
    """A scripted model that cannot go on where its script says so."""

    def _generate(self, *args: Any, **kwargs: Any) -> ChatResult:
        result = super()._generate(*args, **kwargs)
        if result.generations[0].text == "fail":
            raise ConfigError("no model")
        return result


def test_a_turn_that_fails_is_an_error_and_the_next_one_goes_on(bench: Bench) -> None:
    script = [calling("add", a=1, b=2), AIMessage("fail"), AIMessage("next"), AIMessage("fail")]
    seen = bench.run(FailingChatModel(script=script[:3]), Message("go"), Message("more"))
    assert [event.message for event in seen.of(ErrorEvent)] == ["no model"]
    assert seen.outcomes == ["failed", "done"]
    assert types(bench.messages) == ["human", "ai", "tool", "ai", "human", "ai"]
    assert bench.code == 0
    bench.run(FailingChatModel(script=script[3:]), Message("go"))
    assert bench.code == 1


@pytest.mark.parametrize("error", [ConfigError("no view"), RuntimeError("no\nview"), MemoryError(), ValueError("x")])
@pytest.mark.parametrize("is_asking", [False, True])
def test_what_a_tool_raises_is_told_to_the_model_and_the_turn_goes_on(
    bench: Bench, ran: list[tuple[int, int]], error: Exception, is_asking: bool
) -> None:
    @tool
    def look(a: int) -> str:
        """Look."""
        raise error

    bench.tools.append(look)
    both = calling("look", a=1).tool_calls + calling("add", a=1, b=2).tool_calls
    model = says(AIMessage("", tool_calls=both), "next")
    answers = [Answer("always"), Answer("always")] if is_asking else []
    seen = bench.run(model, Message("go"), *answers, Message("more"), is_asking=is_asking)
    assert seen.outcomes == ["done", "done"] and bench.code == 0
    assert ran == [(1, 2)]
    told = next(message for message in model.prompts[1] if message.type == "tool" and message.name == "look")
    expected = f"{type(error).__name__}: {' '.join(str(error).split())}".strip()
    assert isinstance(told, ToolMessage) and told.status == "error"
    assert expected in told.text and "\n" not in told.text
    assert [event.is_error for event in seen.of(ResultEvent) if event.name == "look"] == [True]


def test_a_second_ctrl_c_ends_a_tool_and_the_next_turn_says_so(bench: Bench) -> None:
    @tool
    def look() -> str:
        """Look."""
        raise KeyboardInterrupt

    bench.tools.append(look)
    seen = bench.run(says(calling("look"), "next"), Message("go"), Message("more"))
    assert seen.outcomes == ["stopped", "done"]
    assert types(bench.messages) == ["human", "ai", "tool", "ai", "human", "ai"]
    assert "may have been run" in str(bench.messages[2].content)


@pytest.mark.parametrize("name", ["", "  ", "a\nb", "\x1b[2J", "\udc80", "x" * 201])
def test_a_thread_s_name_can_be_printed(name: str) -> None:
    with pytest.raises(ConfigError, match="printable"):
        check_thread_name(name)
    assert check_thread_name("Größe 1/2") == "Größe 1/2"

"""A turn's events: what is told of it, and that none of its texts drives a terminal."""

from __future__ import annotations

import io
from typing import Any

import pytest
from langchain_core.messages import AIMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.errors import GraphDrained
from langgraph.runtime import RunControl
from rich.console import Console

from dlite_agent.agent import RepeatGuard, create_dlite_agent
from dlite_agent.agent.events import AgentEvent, PlanEvent, ResultEvent, TextEvent, ToolEvent, run_turn
from dlite_agent.agent.terminal import ActivityBar, plain, show_event
from dlite_agent.testing import ScriptedChatModel, calling

HOSTILE = "\x1b[2J\x9b31m\r\x08\u202e [red]:smile:"
WRITTEN_OUT = "\\x1b[2J\\x9b31m\\x0d\\x08\\u202e [red]:smile:"


@pytest.mark.parametrize(
    "event",
    [
        TextEvent(HOSTILE),
        ToolEvent(HOSTILE, {}),
        ResultEvent("tool", HOSTILE, is_error=True),
        PlanEvent([{"content": HOSTILE, "status": "pending"}]),
    ],
)
def test_what_would_drive_a_terminal_is_written_out(event: AgentEvent) -> None:
    out = io.StringIO()
    show_event(event, Console(file=out, width=100))
    assert WRITTEN_OUT in out.getvalue()
    assert plain("a\r\nb\tc\n") == "a\nb\tc\n"


def test_an_activity_is_not_drawn_where_the_cursor_cannot_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    out = io.StringIO()
    with ActivityBar(Console(file=out, force_terminal=True)) as bar:
        bar.show("loading")
    assert out.getvalue() == ""


def test_a_last_word_that_is_not_the_model_s_is_told(add: Any) -> None:
    model = ScriptedChatModel(script=[calling("add", a=n, b=n) for n in range(3)])
    agent = create_dlite_agent(model, [add], middleware=[RepeatGuard(max_calls=1)], checkpointer=InMemorySaver())
    events = list(run_turn(agent, "go", {"configurable": {"thread_id": "1"}}))
    assert [event.text for event in events if isinstance(event, TextEvent)] == [
        "I stopped here: the calls repeat themselves or are too many."
    ]


def test_a_turn_can_be_ended_after_the_step_that_it_is_in() -> None:
    control = RunControl()

    def look() -> str:
        """Look."""
        control.request_drain()
        return "a view"

    model = ScriptedChatModel(script=[calling("look"), AIMessage("never said")])
    agent = create_dlite_agent(model, [look], checkpointer=InMemorySaver())
    seen: list[AgentEvent] = []
    with pytest.raises(GraphDrained):
        seen.extend(run_turn(agent, "go", {"configurable": {"thread_id": "1"}}, control=control))
    assert seen == [ToolEvent("look", {}), ResultEvent("look", "a view", is_error=False)]


def test_a_result_in_blocks_is_shown_as_its_text() -> None:
    def look() -> list[dict[str, str]]:
        """Look as tools of MCP servers answer."""
        return [{"type": "text", "text": "a view"}, {"type": "text", "text": "and more"}]

    model = ScriptedChatModel(script=[calling("look"), AIMessage("done")])
    agent = create_dlite_agent(model, [look], has_plan=False, checkpointer=InMemorySaver())
    seen = list(run_turn(agent, "go", {"configurable": {"thread_id": "1"}}))
    assert ResultEvent("look", "a view\nand more", is_error=False) in seen

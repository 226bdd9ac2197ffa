"""Calls that wait for a person, through `ChatDLite`: a tiny target with random weights writes them under a grammar."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import redis
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool

from dlite_agent import ChatDLite, RedisSaver, SessionStore, Settings
from dlite_agent.run.history import History
from dlite_agent.run.inputs import LineReader
from dlite_agent.run.json_view import JsonView
from dlite_agent.run.loop import Agent, Loop
from dlite_agent.run.opening import make_graph
from dlite_agent.run.stopping import Stopper
from dlite_agent.runtime import close_all
from dlite_agent.testing import write_tiny_chat_model

Talk = Callable[..., list[dict[str, Any]]]


class CallingChatModel(ChatDLite):
    """Has to send a letter when the person has spoken, and to answer in words after that."""

    def _stream(self, messages: list[Any], *args: Any, **kwargs: Any) -> Iterator[Any]:
        choice = "send_letter" if isinstance(messages[-1], HumanMessage) else "none"
        yield from super()._stream(messages, *args, **kwargs | {"tool_choice": choice, "parallel_tool_calls": False})


@pytest.fixture
def sent() -> list[str]:
    """Where letters were sent."""
    return []


@pytest.fixture
def talk(tmp_path: Path, client: redis.Redis, sent: list[str]) -> Iterator[Talk]:
    """Sends lines to a run that asks, with a model loaded anew; returns its events."""

    @tool
    def send_letter(city: Literal["Oslo", "Bergen"]) -> str:
        """Send the prepared letter to a city."""
        sent.append(city)
        return f"sent to {city}"

    folder = write_tiny_chat_model(tmp_path / "model", max_position_embeddings=8192)
    settings = Settings(home=tmp_path, redis_url=None, threads=1, offline=True)

    def run(*lines: str | dict[str, Any]) -> list[dict[str, Any]]:
        store, saver, out = SessionStore(client), RedisSaver(client), io.StringIO()
        model = CallingChatModel(model=str(folder), settings=settings, session_store=store, max_tokens=100)
        graph = make_graph(model, [send_letter], saver, is_asking=True)
        agent = Agent(History(graph, saver, store, "thread"), [send_letter], True, "tiny", tmp_path, str)
        given = io.StringIO("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
        with Stopper() as stopper:
            assert Loop(agent, view=JsonView(out), reader=LineReader(given), stopper=stopper).run() == 0
        close_all()
        return [json.loads(line) for line in out.getvalue().splitlines()]

    yield run
    close_all()


def of(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == kind]


def test_a_call_runs_as_it_is_approved_rejected_or_edited(talk: Talk, sent: list[str]) -> None:
    events = talk("go", {"approve": True}, "go", {"approve": False, "reason": "not today"}, "go")
    approved, rejected, _ = of(events, "approval")
    assert sent == [approved["args"]["city"]]
    assert [event["outcome"] for event in of(events, "turn_end")] == ["done", "done", "waiting"]
    ran, refused = of(events, "result")
    assert ran["text"] == f"sent to {sent[0]}" and not ran["is_error"]
    assert "not today" in refused["text"] and refused["is_error"] and rejected["name"] == "send_letter"
    first, second, third, *_ = (event["stats"] | event for event in of(events, "call"))
    assert second["reused_ram"] == first["input_tokens"] + first["output_tokens"] - 1  # waiting costs nothing
    assert third["reused_ram"] == second["input_tokens"] + second["output_tokens"] - 1


def test_an_edited_call_runs_in_the_next_process_and_arguments_that_do_not_fit_ask_again(
    talk: Talk, sent: list[str]
) -> None:
    before = talk("go")
    (asked,) = of(before, "approval")
    other = {"Oslo": "Bergen", "Bergen": "Oslo"}[asked["args"]["city"]]
    events = talk({"approve": {"city": "Paris"}}, {"approve": {"city": other}})
    assert of(events, "approval") == [asked, asked]
    assert "do not fit send_letter: city" in of(events, "error")[0]["message"]
    assert sent == [other]
    assert other in of(events, "result")[0]["text"] and of(events, "turn_end")[0]["outcome"] == "done"
    (stored,), (call,) = of(before, "call"), of(events, "call")
    assert call["stats"]["reused_store"] == stored["input_tokens"] + stored["output_tokens"] - 1
    assert of(events, "resumed")[0]["computed_again"] == 0

"""Whose session a turn is, and when it is stored; with a real server and a tiny target."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langgraph.checkpoint.memory import InMemorySaver

from dlite_agent import ChatDLite, RedisSaver, SessionStore, Settings
from dlite_agent.agent import SessionMiddleware
from dlite_agent.runtime import close_all
from dlite_agent.testing import write_tiny_chat_model

GO: dict[str, Any] = {"messages": [("user", "go")]}
THREAD: dict[str, Any] = {"configurable": {"thread_id": "1"}}


class SlowStore(SessionStore):
    """A store that takes its time."""

    def commit(self, *args: Any, **kwargs: Any) -> Any:
        time.sleep(0.5)
        return super().commit(*args, **kwargs)


@pytest.fixture
def model(tmp_path: Path, client: redis.Redis) -> Iterator[ChatDLite]:
    folder = write_tiny_chat_model(tmp_path / "model")
    settings = Settings(home=tmp_path, redis_url=None, threads=1, offline=True, durability="async")
    yield ChatDLite(model=str(folder), settings=settings, max_tokens=4, session_store=SlowStore(client))
    close_all()


def agent_of(model: ChatDLite, *middleware: Any, saver: Any = None) -> Any:
    return create_agent(model, [], middleware=list(middleware), checkpointer=saver or InMemorySaver())


def is_stored(model: ChatDLite, message: Any) -> bool:
    record = message.response_metadata["dlite"]
    return model.session_store.get_snapshot(record["session"], record["snapshot"]) is not None


def test_a_turn_that_was_committed_in_the_background_is_stored_when_it_ends(model: ChatDLite) -> None:
    waits = agent_of(model, SessionMiddleware(model))
    assert not is_stored(model, agent_of(model).invoke(GO, THREAD)["messages"][-1])
    assert is_stored(model, waits.invoke(GO, {"configurable": {"thread_id": "2"}})["messages"][-1])
    later = asyncio.run(waits.ainvoke(GO, {"configurable": {"thread_id": "3"}}))
    assert is_stored(model, later["messages"][-1])


def test_forks_have_lines_of_their_own_and_a_line_goes_on_after_a_restart(
    model: ChatDLite, client: redis.Redis
) -> None:
    def turn(config: Any) -> Any:
        result = agent_of(model, SessionMiddleware(model), saver=RedisSaver(client)).invoke(GO, config)
        stamp, record = result["session"], result["messages"][-1].response_metadata["dlite"]
        assert stamp["thread_id"] == "1"
        assert (stamp["session"], stamp["snapshot"]) == (record["session"], record["snapshot"])
        return stamp

    first = turn(THREAD)
    past = agent_of(model, saver=RedisSaver(client)).get_state(THREAD).config
    second, fork = turn(THREAD), turn(past)
    assert len({first["line"], second["line"], fork["line"]}) == 3
    assert first["session"] == second["session"] == fork["session"]
    agent = agent_of(model, SessionMiddleware(model), saver=RedisSaver(client))
    assert agent.get_state(THREAD).values["session"] == fork


def test_a_turn_without_a_thread_is_reported(model: ChatDLite) -> None:
    agent: Any = create_agent(model, [], middleware=[SessionMiddleware(model)])
    (event,) = agent.stream(GO, stream_mode="custom")
    assert event["dlite"] == "no_thread"
    result = agent.invoke(GO)["session"]
    assert (result["thread_id"], result["snapshot"]) == (None, None)


def test_a_session_is_pinned_while_its_turn_is_open(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path, redis_url=None, threads=1, offline=True)
    folder = write_tiny_chat_model(tmp_path / "model")
    model = ChatDLite(model=str(folder), settings=settings, max_tokens=4)
    seen: list[tuple[str, ...]] = []

    class Watch(AgentMiddleware[Any, Any, Any]):
        def after_model(self, state: Any, runtime: Any) -> None:
            seen.append(pinned())

        def after_agent(self, state: Any, runtime: Any) -> None:
            seen.append(pinned())

    def pinned() -> tuple[str, ...]:
        return tuple(model.runtime.keeper.pinned)

    agent = agent_of(model, Watch(), SessionMiddleware(model))
    session = agent.invoke(GO, THREAD)["session"]
    close_all()
    assert session["session"] is not None and session["snapshot"] is None  # kept in RAM only
    assert seen == [(session["session"],), ()]

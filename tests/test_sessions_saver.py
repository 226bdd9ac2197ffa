"""The LangGraph saver on a real server: LangGraph's own contract, and no outage that looks like a new thread."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest
import redis
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import empty_checkpoint
from langgraph.checkpoint.conformance import checkpointer_test, validate
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.types import Command, Send, interrupt

from dlite_agent.errors import ConfigError, RecordError, StoreUnavailableError, UnstorableValueError
from dlite_agent.sessions.embedded import EmbeddedServer
from dlite_agent.sessions.keys import session_id
from dlite_agent.sessions.saver import RedisSaver
from dlite_agent.sessions.store import SessionStore

CONFORMANCE = {
    "put": 17,
    "put_writes": 10,
    "get_tuple": 10,
    "list": 16,
    "delete_thread": 5,
    "delete_for_runs": 7,
    "copy_thread": 8,
    "prune": 8,
}


class State(TypedDict):
    messages: Annotated[list[AnyMessage], add_messages]
    done: Annotated[list[str], lambda old, new: old + new]


def build(saver: Any) -> Any:
    """A graph with a fan-out, an interrupt and a reply."""

    def split(state: State) -> list[Send]:
        return [Send("work", {"item": name}) for name in ("b", "a", "c")]

    def work(state: Any) -> dict[str, Any]:
        return {"done": [state["item"]]}

    def ask(state: State) -> dict[str, Any]:
        return {"messages": [HumanMessage(interrupt({"question": "go on?"}), id=f"h{len(state['messages'])}")]}

    def reply(state: State) -> dict[str, Any]:
        return {"messages": [AIMessage(f"{len(state['messages'])} so far", id=f"a{len(state['messages'])}")]}

    graph = StateGraph(State)
    graph.add_node("work", work)
    graph.add_node("ask", ask)
    graph.add_node("reply", reply)
    graph.add_conditional_edges(START, split, ["work"])
    graph.add_edge("work", "ask")
    graph.add_edge("ask", "reply")
    graph.add_edge("reply", END)
    return graph.compile(checkpointer=saver)


def thread(name: str = "thread", **more: str) -> RunnableConfig:
    return {"configurable": {"thread_id": name, "checkpoint_ns": "", **more}}


def put(saver: RedisSaver, config: RunnableConfig, **values: Any) -> RunnableConfig:
    versions: dict[str, str | int | float] = dict.fromkeys(values, saver.get_next_version(None, None))
    checkpoint = empty_checkpoint()
    checkpoint["channel_values"], checkpoint["channel_versions"] = values, versions
    return saver.put(config, checkpoint, {"source": "loop", "step": 0, "parents": {}}, versions)


async def test_it_passes_every_conformance_test(client: redis.Redis) -> None:
    @checkpointer_test(name="RedisSaver")
    async def make() -> AsyncGenerator[RedisSaver, None]:
        yield RedisSaver(client)

    report = await validate(make)
    failures = [failure for result in report.results.values() for failure in result.failures]
    assert failures == []
    assert report.passed_all()
    assert {name: result.tests_passed for name, result in report.results.items() if result.detected} == CONFORMANCE


def test_a_graph_runs_as_it_does_in_memory(client: redis.Redis) -> None:
    seen = []
    for saver in (InMemorySaver(), RedisSaver(client)):
        graph = build(saver)
        config = thread()
        first = graph.invoke({"messages": [HumanMessage("hi", id="h0")]}, config)
        assert first["__interrupt__"][0].value == {"question": "go on?"}
        assert graph.invoke(Command(resume="yes"), config)["messages"][-1].content == "2 so far"
        history = [
            (each.values, each.next, each.metadata["step"], [task.name for task in each.tasks])
            for each in graph.get_state_history(config)
        ]
        seen.append(history)
    assert seen[0] == seen[1]


def test_a_second_saver_resumes_what_a_first_one_interrupted(client: redis.Redis, server: EmbeddedServer) -> None:
    build(RedisSaver(client)).invoke({"messages": [HumanMessage("hi", id="h0")]}, thread())
    with server.client() as other:
        graph = build(RedisSaver(other))
        assert graph.get_state(thread()).next == ("ask",)
        result = graph.invoke(Command(resume="yes"), thread())
    assert [message.content for message in result["messages"]] == ["hi", "yes", "2 so far"]
    assert result["done"] == ["b", "a", "c"]


def test_a_fork_keeps_both_branches(client: redis.Redis) -> None:
    graph = build(RedisSaver(client))
    graph.invoke({"messages": [HumanMessage("hi", id="h0")]}, thread())
    start = graph.get_state(thread()).config
    ends = {}
    for text in ("one", "two"):
        said = {"messages": [HumanMessage(text, id="h1")]}
        result = graph.invoke(None, graph.update_state(start, said, as_node="ask"))
        assert [message.content for message in result["messages"]] == ["hi", text, "2 so far"]
        ends[text] = graph.get_state(thread()).config
    for text, end in ends.items():
        assert graph.get_state(end).values["messages"][1].content == text


async def test_async_graphs_run_too(client: redis.Redis) -> None:
    graph = build(RedisSaver(client))
    await graph.ainvoke({"messages": [HumanMessage("hi", id="h0")]}, thread())
    await graph.ainvoke(Command(resume="yes"), thread())
    states = [state async for state in graph.aget_state_history(thread())]
    assert states == list(graph.get_state_history(thread()))
    await graph.checkpointer.adelete_thread("thread")
    assert await graph.checkpointer.aget_tuple(thread()) is None


async def test_threads_at_once_do_not_mix(client: redis.Redis) -> None:
    graph = build(RedisSaver(client))

    async def run(name: str) -> str:
        await graph.ainvoke({"messages": [HumanMessage(name, id="h0")]}, thread(name))
        result = await graph.ainvoke(Command(resume=f"yes {name}"), thread(name))
        return " ".join(message.content for message in result["messages"])

    results = await asyncio.gather(*(run(f"t{n}") for n in range(8)))
    assert results == [f"t{n} yes t{n} 2 so far" for n in range(8)]


def test_a_step_stores_only_the_channels_it_changed(client: redis.Redis) -> None:
    saver = RedisSaver(client)
    big = os.urandom(100_000)
    config = put(saver, thread(), big=big, small=0)
    found = saver.get_tuple(config)
    assert found is not None
    before = SessionStore(client).usage()["checkpoint"].num_bytes
    for step in range(20):
        checkpoint = empty_checkpoint()
        version = saver.get_next_version(found.checkpoint["channel_versions"]["small"], None)
        versions = {**found.checkpoint["channel_versions"], "small": version}
        checkpoint["channel_values"], checkpoint["channel_versions"] = {"big": big, "small": step}, versions
        config = saver.put(config, checkpoint, {"source": "loop", "step": step, "parents": {}}, {"small": version})
    latest = saver.get_tuple(thread())
    assert latest is not None
    assert latest.checkpoint["channel_values"] == {"big": big, "small": 19}
    assert SessionStore(client).usage()["checkpoint"].num_bytes - before < len(big)


def test_versions_grow_and_no_two_forks_make_the_same() -> None:
    saver = RedisSaver(redis.Redis())
    made = {saver.get_next_version("00000000000000000000000000000009.0000000000000001", None) for _ in range(100)}
    assert len(made) == 100
    assert min(made) > "00000000000000000000000000000009.9999999999999999"
    assert saver.get_next_version(None, None) < saver.get_next_version(1, None) < saver.get_next_version(9, None)


@pytest.mark.parametrize("name", ["", "*", "{}", "a:b", "x\ny", "\x00", "a" * 10_000, "}:k:*", "\ud800"])
def test_a_hostile_thread_id_reaches_only_its_own_checkpoints(client: redis.Redis, name: str) -> None:
    saver = RedisSaver(client)
    others = ["thread", "other", f"{name}x"]
    for position, other in enumerate(others):
        put(saver, thread(other), value=position)
    put(saver, thread(name), value="hostile")
    put(saver, thread(name, checkpoint_ns=name), value="inner")
    assert len(list(saver.list(thread(name)))) == (1 if name else 2)
    assert len(list(saver.list({"configurable": {"thread_id": name}}))) == 2
    listed = {found.config.get("configurable", {})["thread_id"] for found in saver.list(None)}
    assert listed == {*others, name}
    saver.delete_thread(name)
    assert saver.get_tuple(thread(name)) is None
    for position, other in enumerate(others):
        found = saver.get_tuple(thread(other))
        assert found is not None
        assert found.checkpoint["channel_values"] == {"value": position}


def test_names_that_run_together_are_kept_apart(client: redis.Redis) -> None:
    saver = RedisSaver(client)
    put(saver, thread(checkpoint_ns="a"), bc=1)
    put(saver, thread(checkpoint_ns="ab"), c=2)
    first, second = (saver.get_tuple(thread(checkpoint_ns=namespace)) for namespace in ("a", "ab"))
    assert first is not None
    assert second is not None
    assert [first.checkpoint["channel_values"], second.checkpoint["channel_values"]] == [{"bc": 1}, {"c": 2}]


def test_writes_come_in_the_order_of_their_tasks_and_special_ones_are_replaced(client: redis.Redis) -> None:
    saver = RedisSaver(client)
    config = put(saver, thread(), value=1)
    saver.put_writes(config, [("x", 3), ("y", 4)], "task a", "path 2")
    saver.put_writes(config, [("x", 1), ("__interrupt__", "old")], "task b", "path 1")
    saver.put_writes(config, [("x", "ignored"), ("__interrupt__", "new")], "task b", "path 1")
    found = saver.get_tuple(config)
    assert found is not None
    assert found.pending_writes == [
        ("task b", "__interrupt__", "new"),
        ("task b", "x", 1),
        ("task a", "x", 3),
        ("task a", "y", 4),
    ]


def test_a_session_and_its_thread_are_deleted_apart(client: redis.Redis) -> None:
    saver, store = RedisSaver(client), SessionStore(client)
    put(saver, thread(), value=1)
    store.acquire(session_id("thread"))
    saver.delete_thread("thread")
    assert store.head(session_id("thread")) is not None
    put(saver, thread(), value=1)
    store.delete_session(session_id("thread"))
    assert saver.get_tuple(thread()) is not None


def test_tenants_do_not_see_each_others_threads(client: redis.Redis) -> None:
    put(RedisSaver(client, tenant="a"), thread(), value=1)
    other = RedisSaver(client, tenant="b")
    assert other.get_tuple(thread()) is None
    assert list(other.list(None)) == []


def test_a_thread_expires_as_a_whole_and_use_extends_it(client: redis.Redis) -> None:
    saver = RedisSaver(client, ttl_s=100)
    uses: list[Callable[[], Any]] = [
        lambda: put(saver, thread(), value=1),
        lambda: saver.get_tuple(thread()),
        lambda: saver.put_writes(thread(checkpoint_id="x"), [("a", 1)], "task"),
    ]
    for use in uses:
        use()
        lives = [client.ttl(key) for key in client.scan_iter()]
        assert len(lives) == 2
        assert all(95 <= life <= 100 for life in lives)
        for key in client.scan_iter():
            client.expire(key, 10)
    forever = RedisSaver(client)
    put(forever, thread("kept"), value=1)
    assert sorted(client.ttl(key) for key in client.scan_iter())[:2] == [-1, -1]


@pytest.mark.parametrize("half", ["d", "i"])
def test_half_a_thread_is_an_error_not_a_new_thread(client: redis.Redis, half: str) -> None:
    saver = RedisSaver(client)
    config = put(saver, thread(), value=1)
    (key,) = client.scan_iter(match=f"*:k:{half}")
    client.delete(key)
    for call in (lambda: saver.get_tuple(thread()), lambda: saver.get_tuple(config), lambda: list(saver.list(config))):
        with pytest.raises(RecordError, match="half of a thread"):
            call()


def read_or_refuse(saver: RedisSaver) -> None:
    """Read and list a thread, and copy and prune it; a RecordError is an answer."""
    uses: list[Callable[[], Any]] = [
        lambda: saver.get_tuple(thread()),
        lambda: list(saver.list(None)),
        lambda: saver.copy_thread("thread", "copy"),
        lambda: saver.prune(["thread"]),
    ]
    for use in uses:
        with suppress(RecordError):
            use()


@pytest.mark.parametrize("kind", ["c", "t", "w"])
def test_whatever_is_damaged_in_a_thread_is_at_most_a_record_error(client: Any, kind: str) -> None:
    saver = RedisSaver(client)
    saver.put_writes(put(saver, thread(), value="text"), [("a", 1)], "task", "path")
    (data,) = client.scan_iter(match="*:k:d")
    saved = {key: client.dump(key) for key in client.scan_iter()}
    (name,) = [name for name in client.hkeys(data) if name.startswith(kind.encode())]
    record = client.hget(data, name)
    for position in range(len(record)):
        for changed in (
            record[:position],
            record[:position] + bytes([record[position] ^ 0x81]) + record[position + 1 :],
        ):
            client.flushall()
            for key, dumped in saved.items():
                client.restore(key, 0, dumped)
            client.hset(data, name, changed)
            read_or_refuse(saver)


def test_whatever_is_damaged_in_the_order_of_a_thread_is_at_most_a_record_error(client: Any) -> None:
    saver = RedisSaver(client)
    for position in range(40):
        client.flushall()
        saver.put_writes(put(saver, thread(), value="text"), [("a", 1)], "task", "path")
        (index,) = client.scan_iter(match="*:k:i")
        for name in client.zrange(index, 0, -1):
            client.zadd(index, {name[:position]: 0})
        read_or_refuse(saver)


@pytest.mark.parametrize("where", [{}, {"thread_id": None}, {"checkpoint_id": "x"}])
def test_a_config_that_names_no_thread_is_refused(client: redis.Redis, where: dict[str, Any]) -> None:
    saver = RedisSaver(client)
    config: RunnableConfig = {"configurable": where}
    uses: list[Callable[[], Any]] = [
        lambda: saver.get_tuple(config),
        lambda: list(saver.list(config)),
        lambda: put(saver, config, value=1),
        lambda: saver.put_writes(config, [("a", 1)], "task"),
    ]
    for use in uses:
        with pytest.raises(ConfigError, match="thread_id"):
            use()
    with pytest.raises(ConfigError, match="checkpoint_id"):
        saver.put_writes(thread(), [("a", 1)], "task")
    assert client.dbsize() == 0


def test_a_number_names_the_same_thread_everywhere(client: redis.Redis) -> None:
    saver = RedisSaver(client)
    number: Any = 42
    put(saver, thread("42"), value=1)
    assert saver.get_tuple({"configurable": {"thread_id": number, "checkpoint_ns": None}}) is not None
    saver.delete_thread(number)
    assert client.dbsize() == 0


@pytest.mark.parametrize("value", [1 << 80, object(), {"deep": [lambda: None]}], ids=["integer", "object", "function"])
def test_a_value_that_cannot_be_stored_is_refused_by_its_channel(client: redis.Redis, value: Any) -> None:
    saver = RedisSaver(client)
    with pytest.raises(UnstorableValueError, match="'value' cannot be stored"):
        put(saver, thread("odd"), value=value)
    config = put(saver, thread("odd"), value=1)
    with pytest.raises(UnstorableValueError, match="'notes' cannot be stored"):
        saver.put_writes(config, [("value", 2), ("notes", value)], "task")
    found = saver.get_tuple(config)
    assert found is not None
    assert found.pending_writes == []  # none of them, or all


@pytest.mark.parametrize("ttl", [0, -1, 1.5, float("nan"), True, 2**62])
def test_a_life_that_no_key_can_have_is_refused(client: redis.Redis, ttl: Any) -> None:
    for make in (RedisSaver, SessionStore):
        with pytest.raises(ConfigError, match="ttl_s"):
            make(client, ttl_s=ttl)


def test_a_planted_pickle_is_never_loaded(client: redis.Redis, tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return (os.mkdir, (str(tmp_path / "boom"),))

    saver = RedisSaver(client)
    config = put(saver, thread(), value="plain")
    (key,) = client.scan_iter(match="*:k:d")
    for field, record in client.hgetall(key).items():
        if b"plain" in bytes(record):  # type: ignore[arg-type]
            planted = pickle.dumps(Bomb())
            client.hset(key, field, b"\x00\x00\x00\x06pickle" + len(planted).to_bytes(4, "big") + planted)
    with pytest.raises(RecordError, match="pickle"):
        saver.get_tuple(config)
    assert not (tmp_path / "boom").exists()


def test_an_object_that_is_no_plain_data_is_not_stored(client: redis.Redis) -> None:
    with pytest.raises(TypeError):
        put(RedisSaver(client), thread(), value=object())
    assert client.dbsize() == 0


@dataclass
class Point:
    x: int


def test_only_allowed_classes_come_back_as_themselves(client: redis.Redis) -> None:
    put(RedisSaver(client, allowed_types=[Point]), thread(), value=Point(3))
    for allowed, expected in (([Point], Point(3)), ([], {"x": 3})):
        found = RedisSaver(client, allowed_types=allowed).get_tuple(thread())
        assert found is not None
        assert found.checkpoint["channel_values"] == {"value": expected}


def test_a_decoding_client_is_refused(server: EmbeddedServer) -> None:
    with pytest.raises(ConfigError, match="decode_responses=False"):
        RedisSaver(redis.Redis(unix_socket_path=server.state.socket, decode_responses=True))


def test_an_outage_is_an_error_never_a_new_thread(tmp_path: Path) -> None:
    with EmbeddedServer.start(tmp_path / "data") as server, server.client() as client:
        saver = RedisSaver(client)
        config = put(saver, thread(), value=1)
        os.kill(int((tmp_path / "data" / "server.pid").read_text()), signal.SIGKILL)
        calls: list[Callable[[], Any]] = [
            lambda: saver.get_tuple(thread()),
            lambda: saver.get_tuple(config),
            lambda: list(saver.list(thread())),
            lambda: list(saver.list(None)),
            lambda: put(saver, thread(), value=2),
            lambda: saver.put_writes(config, [("a", 1)], "task"),
            lambda: saver.delete_thread("thread"),
            lambda: asyncio.run(saver.aget_tuple(thread())),
        ]
        for call in calls:
            with pytest.raises(StoreUnavailableError, match="does not answer"):
                call()
        with EmbeddedServer.start(tmp_path / "data"):
            assert saver.get_tuple(config) is not None

"""Threads are pruned, copied and cleared of runs without a loss for what stays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, TypedDict

import pytest
import redis
from langchain_core.runnables import RunnableConfig
from langgraph.channels.delta import DeltaChannel
from langgraph.checkpoint.base import empty_checkpoint
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, interrupt

from dlite_agent.errors import ConfigError, RecordError
from dlite_agent.sessions.pruning import StoredCheckpoint, all_but_latest, remove_checkpoints
from dlite_agent.sessions.saver import RedisSaver
from dlite_agent.sessions.threads import Thread


def extend(old: list[str], batches: Any) -> list[str]:
    return [*old, *(text for batch in batches for text in batch)]


class State(TypedDict):
    plain: list[str]
    replayed: Annotated[list[str], DeltaChannel(extend, snapshot_frequency=3)]


def build(saver: RedisSaver) -> Any:
    """A graph that writes to a channel of each kind and then asks."""

    def work(state: State) -> dict[str, Any]:
        text = f"turn {len(state['plain'])}"
        return {"plain": [*state["plain"], text], "replayed": [text]}

    def ask(state: State) -> dict[str, Any]:
        return {"replayed": [interrupt("go on?")]}

    graph = StateGraph(State)
    graph.add_node("work", work)
    graph.add_node("ask", ask)
    graph.add_edge(START, "work")
    graph.add_edge("work", "ask")
    graph.add_edge("ask", END)
    return graph.compile(checkpointer=saver)


def thread(name: str = "thread", **metadata: str) -> RunnableConfig:
    return {"configurable": {"thread_id": name}, "metadata": metadata}


def run(graph: Any, num_turns: int, name: str = "thread") -> None:
    for number in range(num_turns):
        start: dict[str, list[str]] = {"plain": [], "replayed": []} if number == 0 else {}
        graph.invoke(start, thread(name, run_id=f"run {number}"))
        graph.invoke(Command(resume=f"yes {number}"), thread(name, run_id=f"run {number}"))


def values(graph: Any, name: str = "thread") -> Any:
    return graph.get_state(thread(name)).values


def put(saver: RedisSaver, parent: RunnableConfig, **channels: Any) -> RunnableConfig:
    versions: dict[str, str | int | float] = {name: saver.get_next_version(None, None) for name in channels}
    checkpoint = empty_checkpoint()
    checkpoint["channel_values"], checkpoint["channel_versions"] = channels, versions
    return saver.put(parent, checkpoint, {"source": "loop", "step": 0, "parents": {}}, versions)


def named(name: str = "thread") -> RunnableConfig:
    return {"configurable": {"thread_id": name, "checkpoint_ns": ""}}


@pytest.mark.parametrize("num_turns", [1, 2, 3, 4])
def test_a_pruned_thread_has_the_same_state_and_goes_on(client: redis.Redis, num_turns: int) -> None:
    saver = RedisSaver(client)
    graph = build(saver)
    run(graph, num_turns)
    run(graph, num_turns, "other")
    expected = values(graph)
    assert expected["replayed"] == [text for n in range(num_turns) for text in (f"turn {n}", f"yes {n}")]
    before = client.hlen(Thread.named("thread", saver.keys).data)
    saver.prune(["thread"])
    assert client.hlen(Thread.named("thread", saver.keys).data) < before
    assert values(graph) == values(graph, "other") == expected
    for name in ("thread", "other"):
        graph.invoke({}, thread(name))
        graph.invoke(Command(resume="last"), thread(name))
    assert values(graph) == values(graph, "other")


def test_a_pruned_thread_can_be_resumed_at_its_interrupt(client: redis.Redis) -> None:
    saver = RedisSaver(client)
    graph = build(saver)
    graph.invoke({"plain": [], "replayed": []}, thread())
    saver.prune(["thread"])
    assert graph.get_state(thread()).next == ("ask",)
    assert graph.invoke(Command(resume="yes"), thread())["replayed"] == ["turn 0", "yes"]


def test_pruning_frees_what_only_the_removed_checkpoints_held(client: redis.Redis) -> None:
    saver = RedisSaver(client)
    config = put(saver, named(), value="x" * 1000)
    saver.put_writes(config, [("value", "y" * 1000)], "task")
    put(saver, config, value="small")
    saver.prune(["thread"])
    kept = Thread.named("thread", saver.keys)
    assert sum(len(record) for record in client.hvals(kept.data)) < 1000
    assert client.zcard(kept.index) == 1
    assert client.hlen(kept.data) == 3  # the checkpoint, its blob, the thread's id


def test_another_strategy_is_refused(client: redis.Redis) -> None:
    with pytest.raises(ConfigError, match="keep_latest or delete"):
        RedisSaver(client).prune(["thread"], strategy="keep_newest")


def test_a_runs_checkpoints_go_and_the_last_run_stays(client: redis.Redis) -> None:
    saver = RedisSaver(client)
    graph = build(saver)
    run(graph, 2)
    plain = values(graph)["plain"]
    saver.delete_for_runs(["run 0"])
    left = list(saver.list(thread()))
    assert {found.metadata.get("run_id") for found in left} == {"run 1"}
    assert values(graph)["plain"] == plain
    saver.delete_for_runs(["run 1", "no such run"])
    assert client.dbsize() == 0


def test_a_copy_is_the_same_thread_and_a_thread_of_its_own(client: redis.Redis) -> None:
    saver = RedisSaver(client, ttl_s=100)
    graph = build(saver)
    run(graph, 2)
    graph.invoke({}, thread())
    saver.copy_thread("thread", "copy")
    expected = values(graph)
    assert values(graph, "copy") == expected
    assert {found.config.get("configurable", {})["thread_id"] for found in saver.list(None)} == {"thread", "copy"}
    assert all(0 < client.ttl(key) <= 100 for key in client.scan_iter())
    graph.invoke(Command(resume="only here"), thread("copy"))
    assert values(graph) == expected
    saver.delete_thread("thread")
    assert values(graph, "copy")["replayed"][-1] == "only here"


def test_a_checkpoint_stored_meanwhile_is_seen_before_anything_is_removed(client: redis.Redis) -> None:
    saver = RedisSaver(client)
    first = put(saver, named(), value=1)
    seen: list[int] = []

    def choose(stored: Mapping[bytes, StoredCheckpoint], look: Callable[[Iterable[bytes]], set[bytes]]) -> set[bytes]:
        seen.append(len(stored))
        if len(seen) == 1:
            put(saver, first, value=2)
        return all_but_latest(stored, look)

    remove_checkpoints(client, Thread.named("thread", saver.keys), choose, parse=saver._parse)
    assert seen == [1, 2]
    (left,) = saver.list(named())
    assert left.checkpoint["channel_values"] == {"value": 2}


def test_a_checkpoint_removed_while_it_is_read_is_gone_not_empty(client: redis.Redis) -> None:
    saver = RedisSaver(client)
    config = named()
    for number in range(3):
        config = put(saver, config, value=number)
    listing = saver.list(named())
    assert next(listing).checkpoint["channel_values"] == {"value": 2}
    saver.prune(["thread"])
    assert list(listing) == []


@pytest.mark.parametrize("half", ["data", "index"])
def test_half_a_thread_is_an_error(client: redis.Redis, half: str) -> None:
    saver = RedisSaver(client)
    put(saver, named(), value=1)
    client.delete(getattr(Thread.named("thread", saver.keys), half))
    calls: list[Callable[[], None]] = [
        lambda: saver.prune(["thread"]),
        lambda: saver.copy_thread("thread", "copy"),
    ]
    for call in calls:
        with pytest.raises(RecordError, match="half of a thread"):
            call()
    assert client.dbsize() == 1

"""Compaction on a tiny target that really reuses rows, and on a scripted model where the messages matter."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import pairwise, takewhile
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import SummarizationMiddleware
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver

from dlite_agent import ChatDLite, Settings, create_dlite_agent
from dlite_agent.agent import DriftReporter, PrefixCompaction
from dlite_agent.agent.turns import is_summary
from dlite_agent.errors import ConfigError
from dlite_agent.runtime import close_all
from dlite_agent.testing import ScriptedChatModel, calling, write_tiny_chat_model

THREAD: dict[str, Any] = {"configurable": {"thread_id": "1"}}
BUDGET: dict[str, Any] = {"max_tokens": 900, "target_tokens": 600, "keep_tokens": 150, "summary_tokens": 120}


def summarize(messages: list[Any]) -> str:
    return f"{len(messages)} messages, the last one: {messages[-1].text}"


@tool
def look(where: str) -> str:
    """Look somewhere."""
    return f"nothing of note {where}, as on every other day of the year"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChatDLite]:
    folder = write_tiny_chat_model(tmp_path_factory.mktemp("model"))
    settings = Settings(home=tmp_path_factory.mktemp("home"), redis_url=None, threads=1, offline=True)
    yield ChatDLite(model=str(folder), settings=settings, max_tokens=20)
    close_all()


def talk(model: ChatDLite, *middleware: Any, turns: int = 16) -> tuple[list[tuple[int, int]], list[Any]]:
    """Prompt and reused tokens of each turn, and the reports."""
    agent: Any = create_agent(model, [], middleware=list(middleware), checkpointer=InMemorySaver())
    usage, reports = [], []
    for number in range(turns):
        given = {"messages": [("user", f"Question {number}: what is new about the bridge over the river today?")]}
        for mode, payload in agent.stream(given, THREAD, stream_mode=["custom", "values"]):
            if mode == "custom":
                reports.append(payload)
        told = payload["messages"][-1].usage_metadata
        usage.append((told["input_tokens"], told["input_token_details"]["cache_read"]))
    return usage, reports


def test_the_start_of_the_prompt_is_reused_and_the_bill_is_what_the_engine_says(model: ChatDLite) -> None:
    usage, reports = talk(model, PrefixCompaction(model, **BUDGET, summarizer=summarize), DriftReporter())
    bills = [event for event in reports if event["dlite"] == "compaction"]
    shrunk = [now for before, now in pairwise(usage) if now[0] < before[0]]
    assert len(bills) == len(shrunk) >= 2
    for bill, (num_prompt, reused) in zip(bills, shrunk, strict=True):
        assert num_prompt <= BUDGET["target_tokens"]
        assert bill["num_after"] == pytest.approx(num_prompt, rel=0.05)  # noise is not what its text is encoded to
        assert bill["num_before"] > BUDGET["max_tokens"]
        assert bill["num_kept"] + bill["num_recomputed"] == bill["num_after"]
        assert 0.9 * bill["num_kept"] < reused < num_prompt - bill["num_summary"] / 4
        assert reused > num_prompt / 3
    drifts = [event for event in reports if event["dlite"] == "prefix_drift"]
    assert [(event["cause"], event["label"]) for event in drifts] == [("compacted", "summary")] * len(bills)


def test_of_as_long_a_prompt_it_recomputes_less_than_compaction_from_the_start(model: ChatDLite) -> None:
    stock = SummarizationMiddleware(
        model,
        trigger=("tokens", BUDGET["max_tokens"]),
        keep=("tokens", BUDGET["target_tokens"] - BUDGET["summary_tokens"]),
        token_counter=lambda messages: model.get_num_tokens_from_messages(list(messages)),  # type: ignore[arg-type]
        summarizer=summarize,
    )

    def costliest(middleware: Any) -> tuple[int, int]:
        """Tokens of the prompt that had the most to compute, and how many these were."""
        usage, _ = talk(model, middleware)
        num_prompt, reused = max(usage[1:], key=lambda told: told[0] - told[1])
        return num_prompt, num_prompt - reused

    ours, theirs = costliest(PrefixCompaction(model, **BUDGET, summarizer=summarize)), costliest(stock)
    assert ours[0] == pytest.approx(theirs[0], rel=0.2)
    assert ours[1] < 0.6 * theirs[1]


def test_the_model_itself_can_write_the_summary(model: ChatDLite) -> None:
    _, reports = talk(model, PrefixCompaction(model, **BUDGET))
    assert any(event["num_summary"] > 20 for event in reports)


def scripted(turns: int) -> list[AIMessage]:
    script = [calling("write_todos", todos=[{"content": "look everywhere", "status": "in_progress"}])]
    return [*script, *(calling("look", where=f"at place {number}") for number in range(turns)), AIMessage("done")]


def test_calls_keep_their_results_the_plan_stays_and_the_start_is_untouched() -> None:
    model = ScriptedChatModel(script=scripted(10))
    compaction = PrefixCompaction(model, max_tokens=300, target_tokens=220, summary_tokens=40, summarizer=summarize)
    agent = create_dlite_agent(model, [look], checkpointer=InMemorySaver(), middleware=[compaction])
    asyncio.run(agent.ainvoke({"messages": [("user", "Look at ten places.")]}, THREAD))
    assert any("messages" in message.text for prompt in model.prompts for message in prompt)
    for prompt in model.prompts:
        due: set[Any] = set()
        for message in prompt:
            if isinstance(message, ToolMessage):
                due.remove(message.tool_call_id)
            assert isinstance(message, ToolMessage) or not due
            if isinstance(message, AIMessage):
                due = {call["id"] for call in message.tool_calls}
    first, last = model.prompts[1], model.prompts[-1]
    same = list(takewhile(lambda pair: pair[0].id == pair[1].id, zip(first[1:], last[1:], strict=False)))
    assert len(same) == 3  # the task, the plan's call and its result
    summaries = [m.text for m in last if is_summary(m)]
    assert len(summaries) == 1 and summaries[0].endswith("The plan:\n1. [~] look everywhere")


def test_below_the_budget_nothing_happens() -> None:
    model = ScriptedChatModel(script=scripted(2))
    agent = create_agent(model, [look], middleware=[PrefixCompaction(model, max_tokens=5000)])
    given: Any = {"messages": [("user", "Look.")]}
    assert list(agent.stream(given, stream_mode="custom")) == []


@pytest.mark.parametrize(
    "numbers",
    [
        {"max_tokens": 300},
        {"max_tokens": 1000, "target_tokens": 1000},
        {"max_tokens": 1000, "keep_tokens": 0},
        {"max_tokens": 1000, "summary_tokens": -1},
    ],
)
def test_a_budget_without_room_is_refused(numbers: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        PrefixCompaction(ScriptedChatModel(script=[]), **numbers)  # type: ignore[arg-type]

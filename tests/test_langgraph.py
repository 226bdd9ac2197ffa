"""ChatDLite in LangGraph's and LangChain's own graphs, on random weights: grammars decide whether a reply is a call."""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Iterator
from typing import Annotated, Any, TypedDict

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import HumanInTheLoopMiddleware, wrap_model_call
from langchain.agents.structured_output import ProviderStrategy
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, ToolMessage
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.config import get_stream_writer
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.prebuilt import ToolNode, create_react_agent, tools_condition
from langgraph.types import Command, Send
from langgraph.warnings import LangGraphDeprecatedSinceV10
from pydantic import BaseModel

from dlite_agent import ChatDLite, Settings
from dlite_agent.runtime import close_all
from dlite_agent.testing import write_tiny_chat_model

GO: dict[str, Any] = {"messages": [("user", "go")]}
LOOP = ["human", "ai", "tool", "ai"]


class State(TypedDict):
    messages: Annotated[list[AnyMessage], add_messages]


class Answer(BaseModel):
    """Whether it is far."""

    is_far: bool


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChatDLite]:
    folder = write_tiny_chat_model(tmp_path_factory.mktemp("model"))
    settings = Settings(home=tmp_path_factory.mktemp("home"), redis_url=None, threads=1, offline=True)
    yield ChatDLite(model=str(folder), settings=settings, max_tokens=16)
    close_all()


@pytest.fixture
def looks() -> list[str]:
    return []


@pytest.fixture
def look(looks: list[str]) -> Any:
    @tool
    def look() -> str:
        """Look around."""
        looks.append("looked")
        return "a lake"

    return look


def thread(name: str) -> RunnableConfig:
    return {"configurable": {"thread_id": name}}


def cache_read(message: Any) -> int:
    return int(message.usage_metadata["input_token_details"]["cache_read"])


def total(message: Any) -> int:
    return int(message.usage_metadata["total_tokens"])


def choice_for(messages: list[AnyMessage]) -> str:
    """A call first, and text once there is its result."""
    return "none" if isinstance(messages[-1], ToolMessage) else "any"


def choosing(model: ChatDLite, tools: list[Any], messages: list[AnyMessage]) -> Runnable[Any, AIMessage]:
    return model.bind_tools(tools, tool_choice=choice_for(messages), parallel_tool_calls=False, max_tokens=100)


def chosen(request: Any) -> Any:
    settings = {"parallel_tool_calls": False, "max_tokens": 100}
    return request.override(tool_choice=choice_for(request.messages), model_settings=settings)


@wrap_model_call
def call_first(request: Any, handler: Any) -> Any:
    return handler(chosen(request))


@wrap_model_call
async def call_first_async(request: Any, handler: Any) -> Any:
    return await handler(chosen(request))


def test_create_agent_calls_a_tool_answers_and_computes_nothing_twice(
    model: ChatDLite, look: Any, looks: list[str]
) -> None:
    agent: Any = create_agent(model, [look], middleware=[call_first], checkpointer=InMemorySaver())
    messages = agent.invoke(GO, thread("agent"))["messages"]
    assert [message.type for message in messages] == LOOP
    assert messages[2].content == "a lake"
    assert cache_read(messages[3]) == total(messages[1]) - 1
    longer = agent.invoke(GO, thread("agent"))["messages"]
    assert [message.type for message in longer] == LOOP * 2
    assert cache_read(longer[5]) == total(messages[3]) - 1
    assert looks == ["looked"] * 2


def test_create_agent_says_the_same_asynchronously(model: ChatDLite, look: Any) -> None:
    def said(messages: list[Any]) -> list[Any]:
        return [[message.type, message.content, *(call["name"] for call in calls_of(message))] for message in messages]

    def calls_of(message: Any) -> list[Any]:
        return getattr(message, "tool_calls", [])

    agent: Any = create_agent(model, [look], middleware=[call_first])
    other: Any = create_agent(model, [look], middleware=[call_first_async])
    assert said(asyncio.run(other.ainvoke(GO))["messages"]) == said(agent.invoke(GO)["messages"])


def test_create_react_agent_calls_a_tool_and_answers(model: ChatDLite, look: Any, looks: list[str]) -> None:
    def choose(state: Any, _: Any) -> Any:
        return choosing(model, [look], state["messages"])

    with pytest.warns(LangGraphDeprecatedSinceV10):
        agent = create_react_agent(choose, [look])
    messages = agent.invoke(GO)["messages"]
    assert [message.type for message in messages] == LOOP
    assert looks == ["looked"]


def test_a_tool_node_runs_the_calls_and_its_errors_reach_the_model(model: ChatDLite) -> None:
    @tool
    def fail() -> str:
        """Fail."""
        raise ValueError("no view from here")

    def ask(state: State) -> dict[str, Any]:
        return {"messages": [choosing(model, [fail], state["messages"]).invoke(state["messages"])]}

    builder = StateGraph(State)
    builder.add_node("model", ask)
    builder.add_node("tools", ToolNode([fail], handle_tool_errors=True))
    builder.add_edge(START, "model")
    builder.add_conditional_edges("model", tools_condition)
    builder.add_edge("tools", "model")
    graph: Any = builder.compile()
    messages = graph.invoke(GO)["messages"]
    assert [message.type for message in messages] == LOOP
    assert messages[2].status == "error"
    assert "Error: " in model.runtime.render(messages[:3], []) and "no view from here" in messages[2].content


@pytest.mark.parametrize("decision", ["approve", "reject"])
def test_a_person_is_asked_before_a_tool_runs_and_the_thread_goes_on_from_there(
    model: ChatDLite, look: Any, looks: list[str], decision: str
) -> None:
    asking = HumanInTheLoopMiddleware(interrupt_on={"look": True})
    agent: Any = create_agent(model, [look], middleware=[call_first, asking], checkpointer=InMemorySaver())
    config = thread(decision)
    paused = agent.invoke(GO, config)
    (interrupt,) = paused["__interrupt__"]
    assert [request["name"] for request in interrupt.value["action_requests"]] == ["look"]
    assert looks == []
    messages = agent.invoke(Command(resume={"decisions": [{"type": decision}]}), config)["messages"]
    assert [message.type for message in messages] == LOOP
    assert looks == ["looked"] * (decision == "approve")
    assert messages[2].status == ("success" if decision == "approve" else "error")
    assert cache_read(messages[3]) == total(messages[1]) - 1


def test_a_subgraph_has_a_session_of_its_own_in_the_thread(model: ChatDLite) -> None:
    class Both(State):
        inner: Annotated[list[AnyMessage], add_messages]

    def outer(state: Both) -> dict[str, Any]:
        return {"messages": [model.invoke(state["messages"])]}

    def inner(state: Both) -> dict[str, Any]:
        return {"inner": [model.invoke(state["inner"])]}

    child = StateGraph(Both).add_node("ask", inner).add_edge(START, "ask").compile()
    builder = StateGraph(Both).add_node("ask", outer).add_node("child", child)
    graph: Any = builder.add_edge(START, "ask").add_edge("ask", "child").compile(checkpointer=InMemorySaver())
    turn = {"messages": [HumanMessage("outer")], "inner": [HumanMessage("inner")]}
    first = graph.invoke(turn, thread("parent"))
    second = graph.invoke(turn, thread("parent"))
    for key in ("messages", "inner"):
        assert cache_read(second[key][-1]) == total(first[key][-1]) - 1


def test_what_is_sent_out_at_once_is_answered_as_it_is_alone(model: ChatDLite) -> None:
    class Questions(TypedDict):
        questions: list[str]
        answers: Annotated[list[tuple[str, Any]], operator.add]

    def ask(question: str) -> dict[str, Any]:
        return {"answers": [(question, model.invoke(question).content)]}

    builder = StateGraph(Questions)
    builder.add_node("ask", ask)  # type: ignore[arg-type]
    builder.add_conditional_edges(START, lambda state: [Send("ask", text) for text in state["questions"]], ["ask"])
    graph: Any = builder.compile(checkpointer=InMemorySaver())
    questions = [f"question {number}" for number in range(6)]
    expected = [(question, model.invoke(question).content) for question in questions]
    assert graph.invoke({"questions": questions}, thread("sent"))["answers"] == expected
    found = asyncio.run(graph.ainvoke({"questions": questions}, thread("sent asynchronously")))
    assert found["answers"] == expected


def streaming_graph(model: ChatDLite) -> Any:
    def ask(state: State) -> dict[str, Any]:
        get_stream_writer()({"asking": len(state["messages"])})
        return {"messages": [model.invoke(state["messages"])]}

    return StateGraph(State).add_node("ask", ask).add_edge(START, "ask").add_edge("ask", END).compile()


def check_streamed(parts: list[tuple[str, Any]], expected: Any) -> None:
    messages = [part for mode, part in parts if mode == "messages"]
    (update,) = [part["ask"]["messages"][0] for mode, part in parts if mode == "updates"]
    assert [part for mode, part in parts if mode == "custom"] == [{"asking": 1}]
    assert update.content == "".join(chunk.content for chunk, _ in messages) == expected
    assert len(messages) > 2 and {chunk.id for chunk, _ in messages} == {update.id}
    assert {metadata["langgraph_node"] for _, metadata in messages} == {"ask"}
    assert [chunk.usage_metadata for chunk, _ in messages if chunk.usage_metadata] == [update.usage_metadata]


def test_a_graph_streams_messages_updates_and_custom_parts(model: ChatDLite) -> None:
    modes = ["messages", "updates", "custom"]
    expected = model.invoke(GO["messages"]).content
    graph = streaming_graph(model)
    check_streamed(list(graph.stream(GO, stream_mode=modes)), expected)

    async def parts() -> list[tuple[str, Any]]:
        return [part async for part in graph.astream(GO, stream_mode=modes)]

    check_streamed(asyncio.run(parts()), expected)


def test_an_agent_that_streams_gives_out_a_call_whole_with_its_result(model: ChatDLite, look: Any) -> None:
    agent: Any = create_agent(model, [look], middleware=[call_first])
    chunks = [chunk for chunk, _ in agent.stream(GO, stream_mode="messages")]
    calls = [part for chunk in chunks for part in getattr(chunk, "tool_call_chunks", [])]
    assert [(part["name"], part["args"]) for part in calls] == [("look", "{}")]
    results = [chunk for chunk in chunks if isinstance(chunk, ToolMessage)]
    assert [(result.content, result.tool_call_id) for result in results] == [("a lake", calls[0]["id"])]


def test_an_agent_with_tools_ends_with_a_structured_response(model: ChatDLite, look: Any, looks: list[str]) -> None:
    @wrap_model_call
    def call_first_bound(request: Any, handler: Any) -> Any:  # under a ProviderStrategy the request's own is not bound
        settings = {"tool_choice": choice_for(request.messages), "parallel_tool_calls": False, "max_tokens": 100}
        return handler(request.override(model_settings=settings))

    agent: Any = create_agent(model, [look], response_format=ProviderStrategy(Answer), middleware=[call_first_bound])
    reply = agent.invoke(GO)
    assert isinstance(reply["structured_response"], Answer)
    assert looks == ["looked"]

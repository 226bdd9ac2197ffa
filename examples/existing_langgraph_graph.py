"""A LangGraph graph that knows nothing of this package takes a local model by changing one line.

python examples/existing_langgraph_graph.py [MODEL]
"""

from __future__ import annotations

import sys
from typing import Any

from langchain_core.language_models import BaseChatModel
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from dlite_agent import ChatDLite


def temperature(city: str) -> str:
    """Return the temperature in a city."""
    return f"18 degrees in {city}"


def build(model: BaseChatModel) -> Any:
    """Return the graph as it was before."""
    with_tools = model.bind_tools([temperature])

    def call_model(state: MessagesState) -> dict[str, Any]:
        return {"messages": [with_tools.invoke(state["messages"])]}

    builder = StateGraph(MessagesState)
    builder.add_node("model", call_model)
    builder.add_node("tools", ToolNode([temperature]))
    builder.add_edge(START, "model")
    builder.add_conditional_edges("model", tools_condition)
    builder.add_edge("tools", "model")
    return builder.compile(checkpointer=InMemorySaver())


def main(name: str = "qwen2.5-coder-1.5b") -> None:
    model = ChatDLite(model=name, max_tokens=120)  # was: model = init_chat_model("openai:gpt-5.5")
    graph = build(model)
    thread: Any = {"configurable": {"thread_id": "weather"}, "recursion_limit": 12}
    for question in ("How warm is it in Oslo? Use the tool.", "Is that warmer than 10 degrees?"):
        result = graph.invoke({"messages": [("user", question)]}, thread)
        usage = result["messages"][-1].usage_metadata
        reused = usage["input_token_details"]["cache_read"]
        print(f"{question}\n{result['messages'][-1].text}\n({reused} of {usage['input_tokens']} prompt tokens reused)")


if __name__ == "__main__":
    main(*sys.argv[1:])

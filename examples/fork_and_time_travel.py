"""Take a conversation up again from an earlier point, and compute only what is new.

python examples/fork_and_time_travel.py [MODEL]
"""

from __future__ import annotations

import sys
from typing import Any

from langchain.agents import create_agent
from langgraph.checkpoint.memory import InMemorySaver

from dlite_agent import ChatDLite


def ask(agent: Any, question: str, config: Any) -> None:
    reply = agent.invoke({"messages": [("user", question)]}, config)["messages"][-1]
    stats = reply.response_metadata["dlite"]["stats"]
    print(f"you: {question}\nmodel: {reply.text}")
    print(f"  {stats['reused_ram']} tokens of the prompt were there, {stats['prefilled']} were computed\n")


def main(model: str = "qwen2.5-coder-1.5b") -> None:
    agent: Any = create_agent(ChatDLite(model=model, max_tokens=60), [], checkpointer=InMemorySaver())
    thread: Any = {"configurable": {"thread_id": "holiday"}}
    ask(agent, "Name a city by the sea. One word.", thread)
    first = agent.get_state(thread).config  # the point to come back to
    ask(agent, "What can one eat there?", thread)

    print("--- back to the first answer, and on another way: a fork of the thread")
    ask(agent, "How does one get there by train?", first)
    fork = agent.get_state(thread).config  # the newest checkpoint of the thread is the fork's
    ask(agent, "And by ship?", fork)

    questions = [m.text for m in agent.get_state(thread).values["messages"] if m.type == "human"]
    print("the thread now holds:", *questions, sep="\n  ")


if __name__ == "__main__":
    main(*sys.argv[1:])

"""A ReAct loop in a graph of your own: swap the chat model, keep everything else.

python examples/react_loop.py [MODEL]
"""

from __future__ import annotations

import sys

from langchain.agents import create_agent
from langchain_core.messages import HumanMessage

from dlite_agent import ChatDLite


def multiply(a: float, b: float) -> float:
    """Multiply two numbers."""
    return a * b


def main(model: str = "qwen2.5-coder-1.5b") -> None:
    agent = create_agent(ChatDLite(model=model, max_tokens=200), [multiply])
    result = agent.invoke({"messages": [HumanMessage("What is 12.5 times 8? Use the tool.")]})
    for message in result["messages"]:
        message.pretty_print()


if __name__ == "__main__":
    main(*sys.argv[1:])

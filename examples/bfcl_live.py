"""A session of a benchmark, live: the model calls BFCL's own tools, and BFCL's own checker compares how they end.

python examples/bfcl_live.py [MODEL]

Needs the benchmark's package: pip install --no-deps bfcl-eval==2026.3.23 mpmath==1.3.0
"""

from __future__ import annotations

import sys
from typing import Any

from langchain_core.messages import AIMessage, ToolMessage
from langgraph.checkpoint.memory import InMemorySaver

from dlite_agent import ChatDLite, DLiteError, create_dlite_agent
from dlite_agent.bench.prompts import EXCERPT
from dlite_agent.environments import environment_tools, open_environment, read_live_tasks

SESSION = "bfcl_mt/base/3"
PROMPT = "You work in a file system with tools. Do exactly what the last message asks, then say so in one sentence."


def main(model: str = "qwen2.5-coder-1.5b", session: str = SESSION) -> None:
    (task,) = read_live_tasks(EXCERPT, ids=[session])
    environment = open_environment(task)
    tools = environment_tools(environment, task.session.tools)
    chat = ChatDLite(model=model, max_tokens=120)
    agent = create_dlite_agent(chat, tools, has_plan=False, system_prompt=PROMPT, checkpointer=InMemorySaver())
    thread: Any = {"configurable": {"thread_id": session}}
    num_shown = 0
    for text in task.user_turns:
        print(f"user: {text}")
        messages = agent.invoke({"messages": [("user", text)]}, thread)["messages"]
        for message in messages[num_shown:]:
            if isinstance(message, AIMessage):
                calls = [f"{call['name']}({call['args']})" for call in message.tool_calls]
                print("model:", *calls, message.text)
            elif isinstance(message, ToolMessage):
                print("tool:", message.text)
        num_shown = len(messages)
    end = environment.end_state()
    print("the end state is the benchmark's own" if end.is_equal else f"the end state differs: {end.difference}")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except DLiteError as error:
        sys.exit(str(error))

"""A person approves a tool call before it runs; the session waits, and goes on without computing anything twice.

python examples/hitl_approval.py [MODEL] [approve|reject]
"""

from __future__ import annotations

import sys
from typing import Any, Literal

from langchain.agents.middleware import HumanInTheLoopMiddleware, wrap_model_call
from langchain_core.messages import ToolMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command

from dlite_agent import ChatDLite, create_dlite_agent


def send_letter(city: Literal["Oslo", "Bergen"]) -> str:
    """Send the prepared letter to a city."""
    return f"sent to {city}"


@wrap_model_call
def act_then_answer(request: Any, handler: Any) -> Any:
    """Have even the smallest model call the tool first, once, and answer then."""
    choice = "none" if isinstance(request.messages[-1], ToolMessage) else "any"
    settings = {"parallel_tool_calls": False}
    return handler(request.override(tool_choice=choice, model_settings=settings))


def ask_person(action: dict[str, Any]) -> str:
    """Ask on the terminal."""
    answer = input(f"The model wants {action['name']}({action['args']}). Run it? [y/N] ")
    return "approve" if answer.strip().lower() == "y" else "reject"


def main(model: str = "qwen2.5-coder-1.5b", decision: str | None = None) -> None:
    agent = create_dlite_agent(
        ChatDLite(model=model, max_tokens=120),
        [send_letter],
        system_prompt="You send letters.",
        has_plan=False,
        checkpointer=InMemorySaver(),
        middleware=[act_then_answer, HumanInTheLoopMiddleware(interrupt_on={"send_letter": True})],
    )
    thread: Any = {"configurable": {"thread_id": "letters"}}
    result = agent.invoke({"messages": [("user", "Send the letter to Oslo.")]}, thread)
    while "__interrupt__" in result:
        (interrupt,) = result["__interrupt__"]
        decisions = [{"type": decision or ask_person(action)} for action in interrupt.value["action_requests"]]
        result = agent.invoke(Command(resume={"decisions": decisions}), thread)
    for message in result["messages"]:
        message.pretty_print()
    stats = result["messages"][-1].response_metadata["dlite"]["stats"]
    print(f"after the decision: {stats['reused_ram']} tokens were there, {stats['prefilled']} were computed")


if __name__ == "__main__":
    main(*sys.argv[1:])

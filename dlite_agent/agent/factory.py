"""The short way to an agent: a normal compiled LangGraph graph with the middleware small models need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain_core.language_models import BaseChatModel
from langchain_core.tools import BaseTool

from dlite_agent.agent.drift_reporter import DriftReporter
from dlite_agent.agent.invalid_calls import InvalidCallRetry
from dlite_agent.agent.plan import PlanMiddleware
from dlite_agent.agent.repeat_guard import RepeatGuard
from dlite_agent.agent.results import ResultShaper
from dlite_agent.agent.session import SessionMiddleware
from dlite_agent.chat_model import ChatDLite

SYSTEM_PROMPT = (
    "You are a careful assistant that works in a folder of files with tools. Do exactly what the last message asks: "
    "one tool call at a time, and when it is done, say so in one sentence."
)


def create_dlite_agent(
    model: BaseChatModel,
    tools: Sequence[BaseTool | Callable[..., Any]],
    *,
    checkpointer: Any = None,
    system_prompt: str = SYSTEM_PROMPT,
    has_plan: bool = True,
    has_plan_updates: bool = False,
    max_result_chars: int | None = None,
    middleware: Sequence[AgentMiddleware[Any, Any, Any]] = (),
    **options: Any,
) -> Any:
    """Return `langchain.agents.create_agent` with our middleware around the caller's.

    All texts are fixed, so the prompt only ever grows and stays cached. What brings one more tool is off until asked
    for: a small model chooses the better, the fewer it has.

    Args:
        model: Any chat model; `ChatDLite` keeps its sessions.
        tools: LangChain tools or functions.
        checkpointer: Where LangGraph keeps the conversation, such as `RedisSaver`.
        system_prompt: The system message.
        has_plan: Whether the agent has a plan (`write_todos`, LangChain's `todos` in the state).
        has_plan_updates: Whether it may also change single steps (`update_plan`).
        max_result_chars: Most characters of a tool result in the prompt; the rest is read with a tool, `read_result`.
            None leaves results as they are.
        middleware: More middleware; one of a kind that is here already takes its place, with bounds of your own.
        options: Other options of `create_agent`, such as `response_format`.
    """
    outer: list[AgentMiddleware[Any, Any, Any]] = [InvalidCallRetry(), RepeatGuard()]
    inner: list[AgentMiddleware[Any, Any, Any]] = [DriftReporter()]
    if has_plan:
        outer.insert(0, PlanMiddleware(has_updates=has_plan_updates))
    if max_result_chars is not None:
        outer.append(ResultShaper(max_chars=max_result_chars))
    if isinstance(model, ChatDLite):
        inner.insert(0, SessionMiddleware(model))
    given = {one.name for one in middleware}
    outer, inner = ([one for one in ours if one.name not in given] for ours in (outer, inner))
    return create_agent(
        model,
        list(tools),
        system_prompt=system_prompt,
        middleware=[*outer, *middleware, *inner],
        checkpointer=checkpointer,
        **options,
    )

"""Sessions run live on an event loop: how the benchmark's own checker sees their end, and how long the loop stalls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from langchain_core.messages import AIMessage
from langgraph.checkpoint.memory import InMemorySaver

from dlite_agent.agent import create_dlite_agent
from dlite_agent.bench.agent.replay import replay
from dlite_agent.bench.heartbeat import Delays, beat
from dlite_agent.bench.journal import Journal
from dlite_agent.chat_model import ChatDLite
from dlite_agent.environments import LiveTask, environment_tools, open_environment
from dlite_agent.recorded import RecordedSession
from dlite_agent.reply import PromptTooLongError

_PROMPT = "Do exactly what the last message asks, with the tools you have, then say so in one sentence."


@dataclass(frozen=True, slots=True)
class LiveReport:
    """What a live session gave.

    Attributes:
        session: Its name.
        turns: Turns of the user that were answered.
        model_calls: Replies of the model, and of the agent in its place.
        tool_calls: Calls that it made.
        num_prompt: Tokens of all prompts.
        reused: Those that were not computed again.
        is_end_equal: Whether the end state is the benchmark's own; that is the model's merit, not the agent's.
        seconds: Wall time, tools included.
        stall_p99_ms: 99th percentile of what the event loop came too late.
        stall_max_ms: The most.
    """

    session: str
    turns: int
    model_calls: int
    tool_calls: int
    num_prompt: int
    reused: int
    is_end_equal: bool
    seconds: float
    stall_p99_ms: float
    stall_max_ms: float


def run_live(task: LiveTask, chat: ChatDLite) -> LiveReport:
    """Run a session on an event loop of its own, with the model's own calls.

    Raises:
        MissingDependencyError: If the benchmark's package is not installed.
    """
    chat.warm_up()
    return asyncio.run(_run(task, chat))


async def _run(task: LiveTask, chat: ChatDLite) -> LiveReport:
    environment = open_environment(task)
    tools = environment_tools(environment, task.session.tools)
    agent = create_dlite_agent(chat, tools, has_plan=False, system_prompt=_PROMPT, checkpointer=InMemorySaver())
    config: Any = {"configurable": {"thread_id": f"live {task.session.id}"}}
    start = time.perf_counter()
    work = asyncio.create_task(_converse(agent, task.user_turns, config))
    delays = Delays.of(await beat(work))
    num_turns, messages = await work
    seconds = time.perf_counter() - start
    replies = [message for message in messages if isinstance(message, AIMessage)]
    usages = [message.usage_metadata for message in replies if message.usage_metadata is not None]
    return LiveReport(
        session=task.session.id,
        turns=num_turns,
        model_calls=len(replies),
        tool_calls=sum(len(reply.tool_calls) for reply in replies),
        num_prompt=sum(usage["input_tokens"] for usage in usages),
        reused=sum(usage.get("input_token_details", {}).get("cache_read", 0) for usage in usages),
        is_end_equal=environment.end_state().is_equal,
        seconds=seconds,
        stall_p99_ms=delays.p99_ms,
        stall_max_ms=delays.max_ms,
    )


async def _converse(agent: Any, texts: Sequence[str], config: Any) -> tuple[int, list[Any]]:
    """Say what the user says, as far as prompts have room; returns the turns that were answered, and all messages."""
    messages: list[Any] = []
    for number, text in enumerate(texts):
        try:
            messages = (await agent.ainvoke({"messages": [("user", text)]}, config))["messages"]
        except PromptTooLongError:
            return number, messages
    return len(texts), messages


def run_all_live(
    tasks: Sequence[LiveTask], chat: ChatDLite, *, journal: Journal, say: Callable[[str], None]
) -> list[LiveReport]:
    """Run the sessions that the journal does not hold; returns the reports of all."""
    finished = {fields["session"]: LiveReport(**fields) for fields in journal.reports()}
    for task in tasks:
        if task.session.id not in finished:
            report = finished[task.session.id] = run_live(task, chat)
            journal.add(asdict(report))
            end = "as the benchmark's own" if report.is_end_equal else "not as the benchmark's own"
            say(f"{report.session}: {report.model_calls} model calls, {report.tool_calls} tool calls, ended {end}")
    return [finished[task.session.id] for task in tasks]


def replay_stalls(session: RecordedSession, chat: ChatDLite, *, max_calls: int) -> Delays:
    """Return how the event loop stalls while a recorded session is replayed: for where no environment can be run."""

    async def run() -> Delays:
        work = asyncio.create_task(replay(session, chat, thread_id=f"stalls {session.id}", max_calls=max_calls))
        delays = await beat(work)
        await work
        return Delays.of(delays)

    chat.warm_up()
    return asyncio.run(run())

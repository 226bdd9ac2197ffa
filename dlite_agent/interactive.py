"""`dlite-agent run`: a person and an agent, a visible plan, and a thread that can be taken up again."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from langchain_core.messages import HumanMessage, RemoveMessage
from langgraph.errors import GraphRecursionError
from rich.console import Console
from rich.markup import escape

from dlite_agent.agent import create_dlite_agent
from dlite_agent.agent.events import PlanEvent, run_turn
from dlite_agent.agent.terminal import ActivityBar, show_event
from dlite_agent.chat_model import ChatDLite
from dlite_agent.config import Settings
from dlite_agent.errors import ConfigError, DLiteError
from dlite_agent.sessions.embedded import connect
from dlite_agent.sessions.saver import RedisSaver
from dlite_agent.sessions.store import SessionStore
from dlite_agent.tools import default_tools


@dataclass(frozen=True, slots=True)
class Options:
    """What the conversation runs with."""

    model: str
    drafter: str
    quantize: Any
    thread_id: str
    workspace: Path
    max_tokens: int

    @property
    def resume_command(self) -> str:
        """The command that takes the conversation up again."""
        words = ["dlite-agent", "run", "--thread", self.thread_id, "--model", self.model]
        return shlex.join([*words, "--workspace", str(self.workspace)])


def converse(options: Options, *, settings: Settings, console: Console) -> None:
    """Talk until end of input; Ctrl-C stops a turn, not the session.

    Raises:
        DLiteError: If the model, the server or the workspace cannot be used.
    """
    if not options.workspace.is_dir():
        raise ConfigError(f"the workspace {options.workspace} is no folder; create it, or name another")
    client = connect(settings)
    bar = ActivityBar(console)
    model = ChatDLite(
        model=options.model,
        drafter=options.drafter,
        quantize=options.quantize,
        max_tokens=options.max_tokens,
        session_store=SessionStore(client),
        settings=settings,
        on_prefill=bar.show_prefill,
    )
    with bar:
        bar.show(f"loading {options.model}")
        model.warm_up()
    graph = create_dlite_agent(model, default_tools(options.workspace), checkpointer=RedisSaver(client))
    config: dict[str, Any] = {"configurable": {"thread_id": options.thread_id}, "recursion_limit": 100}
    _greet(graph.get_state(config).values, options, console)
    while True:
        try:
            text = console.input("\n[bold cyan]you>[/] ").strip()
        except (EOFError, KeyboardInterrupt):
            console.print(f"\nresume with: {escape(options.resume_command)}", soft_wrap=True)
            return
        if text:
            with bar, _stopped_by_ctrl_c(model):
                _turn(graph, text, config, console)


def _greet(state: dict[str, Any], options: Options, console: Console) -> None:
    number = len(state.get("messages") or ())
    doing = f"resuming after {number} messages" if number else "new"
    console.print(
        f"thread {escape(options.thread_id)} ({doing}), workspace {escape(str(options.workspace.resolve()))}",
        highlight=False,
        soft_wrap=True,
    )
    if state.get("todos"):
        show_event(PlanEvent([dict(todo) for todo in state["todos"]]), console)


def _turn(graph: Any, text: str, config: dict[str, Any], console: Console) -> None:
    try:
        for event in run_turn(graph, text, config):
            show_event(event, console)
    except KeyboardInterrupt:
        console.print("\nstopped; the conversation goes on")
    except (DLiteError, GraphRecursionError) as error:
        console.print(f"\n[red]{type(error).__name__}[/]: {escape(str(error))}", highlight=False)
        _take_back(graph, config)


def _take_back(graph: Any, config: dict[str, Any]) -> None:
    """Remove a message that could not be answered: it would fail every later turn too."""
    messages = graph.get_state(config).values.get("messages") or ()
    if messages and isinstance(messages[-1], HumanMessage):
        graph.update_state(config, {"messages": [RemoveMessage(id=str(messages[-1].id))]}, as_node="__start__")


@contextmanager
def _stopped_by_ctrl_c(model: ChatDLite) -> Iterator[None]:
    """Stop the engine first: LangGraph waits for its nodes before it lets a KeyboardInterrupt out."""

    def stop(signum: int, frame: Any) -> None:
        model.runtime.jobs.cancel_all()
        signal.default_int_handler(signum, frame)

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)

"""`dlite-agent run`: a person and an agent, a visible plan, and a thread that can be taken up again."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from dlite_agent.agent import create_dlite_agent
from dlite_agent.agent.events import CallEvent, PlanEvent, ResultEvent, TextEvent, ToolEvent, run_turn
from dlite_agent.chat_model import ChatDLite
from dlite_agent.config import Settings
from dlite_agent.errors import DLiteError
from dlite_agent.sessions.embedded import connect
from dlite_agent.sessions.saver import RedisSaver
from dlite_agent.sessions.store import SessionStore
from dlite_agent.tools import default_tools

MARKS = {"pending": "[ ]", "in_progress": "[~]", "completed": "[x]"}
_SHOWN_CHARACTERS = 400


@dataclass(frozen=True, slots=True)
class Options:
    """What the conversation runs with."""

    model: str
    drafter: str
    quantize: Any
    thread_id: str
    workspace: Path
    max_tokens: int


def converse(options: Options, *, settings: Settings, console: Console) -> None:
    """Talk until end of input; Ctrl-C stops a turn, not the session.

    Raises:
        DLiteError: If the model, the server or the workspace cannot be used.
    """
    client = connect(settings, keep=True)
    model = ChatDLite(
        model=options.model,
        drafter=options.drafter,
        quantize=options.quantize,
        max_tokens=options.max_tokens,
        session_store=SessionStore(client),
        settings=settings,
    )
    model.warm_up()
    graph = create_dlite_agent(model, default_tools(options.workspace), checkpointer=RedisSaver(client))
    config: dict[str, Any] = {"configurable": {"thread_id": options.thread_id}, "recursion_limit": 100}
    _greet(graph.get_state(config).values, options, console)
    while True:
        try:
            text = console.input("\n[bold cyan]you>[/] ").strip()
        except (EOFError, KeyboardInterrupt):
            console.print(f"\nresume with: dlite-agent run --thread {escape(options.thread_id)}")
            return
        if text:
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
    except DLiteError as error:
        console.print(f"\n[red]{type(error).__name__}[/]: {escape(str(error))}", highlight=False)


def show_event(event: Any, console: Console) -> None:
    """Print one event of a turn."""
    if isinstance(event, TextEvent):
        console.print(escape(event.text), end="", highlight=False, soft_wrap=True)
    elif isinstance(event, CallEvent):
        console.print(f"\n   [dim]{call_line(event)}[/]", highlight=False)
    elif isinstance(event, ToolEvent):
        shown = json.dumps(event.args, ensure_ascii=False)
        kind = "call" if event.is_valid else "invalid call"
        console.print(f"   [yellow]{kind}[/] {escape(event.name)} {escape(shown)}", highlight=False)
    elif isinstance(event, ResultEvent):
        shown = event.text if len(event.text) <= _SHOWN_CHARACTERS else f"{event.text[:_SHOWN_CHARACTERS]}..."
        console.print(f"   [{'red' if event.is_error else 'green'}]result[/] {escape(shown)}", highlight=False)
    elif isinstance(event, PlanEvent):
        for todo in event.todos:
            mark = MARKS.get(todo["status"], "[?]")
            console.print(f"   [magenta]plan[/] {escape(mark)} {escape(todo['content'])}", highlight=False)


def call_line(call: CallEvent) -> str:
    """Return the figures of a model call in one line."""
    stats = call.stats
    return (
        f"prompt {call.input_tokens} = {stats['reused_ram']} from RAM + {stats['reused_store']} from Redis + "
        f"{stats['prefilled']} prefilled; {call.output_tokens} generated, tau {call.tau:.2f}, "
        f"{call.tokens_per_second:.1f} tokens/s"
    )

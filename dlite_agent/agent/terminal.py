"""Showing an agent's events on a terminal."""

from __future__ import annotations

import json

from rich.console import Console
from rich.markup import escape

from dlite_agent.agent.events import AgentEvent, CallEvent, PlanEvent, ResultEvent, TextEvent, ToolEvent

_MARKS = {"pending": "[ ]", "in_progress": "[~]", "completed": "[x]"}
_SHOWN_CHARACTERS = 400


def show_event(event: AgentEvent, console: Console) -> None:
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
            mark = _MARKS.get(todo["status"], "[?]")
            console.print(f"   [magenta]plan[/] {escape(mark)} {escape(todo['content'])}", highlight=False)


def call_line(call: CallEvent) -> str:
    """Return the figures of a model call in one line."""
    stats = call.stats
    return (
        f"prompt {call.input_tokens} = {stats['reused_ram']} from RAM + {stats['reused_store']} from Redis + "
        f"{stats['prefilled']} prefilled; {call.output_tokens} generated, tau {call.tau:.2f}, "
        f"{call.tokens_per_second:.1f} tokens/s"
    )

"""Showing an agent's events on a terminal."""

from __future__ import annotations

import json
import threading
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from dlite_agent.agent.events import AgentEvent, CallEvent, PlanEvent, ReportEvent, ResultEvent, TextEvent, ToolEvent

_MARKS = {"pending": "[ ]", "in_progress": "[~]", "completed": "[x]"}
_SHOWN_CHARACTERS = 400
_LONG_PREFILL = 64


class ActivityBar:
    """One transient line for what takes a while: loading weights, a long prefill. May be told from any thread."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("  {task.description}"), BarColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task: TaskID | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> ActivityBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.hide()

    def show(self, description: str, done: int = 0, total: int | None = None) -> None:
        """Show the line, or bring it up to date."""
        with self._lock:
            if self._task is None:
                self._task = self._progress.add_task(description, total=total)
                self._progress.start()
            self._progress.update(self._task, description=description, completed=done, total=total)

    def show_prefill(self, done: int, total: int) -> None:
        """Show how far a prefill is, if it is long enough to wait for."""
        if total >= _LONG_PREFILL and done < total:
            self.show(f"prefill of {total} tokens", done, total)
        else:
            self.hide()

    def hide(self) -> None:
        """Take the line away; nothing is live then, so that text can be streamed without newlines."""
        with self._lock:
            if self._task is not None:
                self._progress.stop()
                self._progress.remove_task(self._task)
                self._task = None


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
    elif isinstance(event, ReportEvent):
        shown = ", ".join(f"{name} {value}" for name, value in event.fields.items())
        console.print(f"   [dim]{escape(event.kind.replace('_', ' '))}: {escape(shown)}[/]", highlight=False)
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

"""Showing an agent's events on a terminal."""

from __future__ import annotations

import json
import threading
from types import TracebackType

from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from dlite_agent.agent.events import AgentEvent, CallEvent, PlanEvent, ReportEvent, ResultEvent, TextEvent, ToolEvent

_MARKS = {"pending": "[ ]", "in_progress": "[~]", "completed": "[x]"}
_SHOWN_CHARACTERS = 400
_LONG_PREFILL = 64
_CONTROLS = {*range(0x20), *range(0x7F, 0xA0)} - set(map(ord, "\n\t"))
_DIRECTIONS = {0x200E, 0x200F, 0x061C, *range(0x2028, 0x202F), *range(0x2066, 0x206A)}
_WRITTEN_OUT = {code: f"\\x{code:02x}" for code in _CONTROLS} | {code: f"\\u{code:04x}" for code in _DIRECTIONS}


class ActivityBar:
    """One transient line for what takes a while: loading weights, a long prefill. May be told from any thread."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("  {task.description}"), BarColumn(), TimeElapsedColumn())
        is_shown = console.is_terminal and not console.is_dumb_terminal
        self._progress = Progress(*columns, console=console, transient=True, disable=not is_shown)
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


def plain(text: str) -> str:
    """Return a text with everything a terminal would act on written out: control characters, marks of direction."""
    return text.replace("\r\n", "\n").translate(_WRITTEN_OUT)


def plain_line(text: str) -> str:
    """Return a text as `plain` does, on one line."""
    return plain(text.replace("\n", "\\n"))


def show_event(event: AgentEvent, console: Console) -> None:
    """Print one event of a turn; no text of a model or a tool drives the terminal."""
    if isinstance(event, TextEvent):
        console.out(plain(event.text), end="", highlight=False)
    elif isinstance(event, CallEvent):
        console.print(f"\n   [dim]{call_line(event)}[/]", highlight=False)
    elif isinstance(event, ToolEvent):
        shown = json.dumps(event.args, ensure_ascii=False)
        _show_line("call" if event.is_valid else "invalid call", "yellow", f"{event.name} {shown}", console)
    elif isinstance(event, ResultEvent):
        shown = event.text if len(event.text) <= _SHOWN_CHARACTERS else f"{event.text[:_SHOWN_CHARACTERS]}..."
        label = Text("   ").append("result", style="red" if event.is_error else "green")
        console.print(label.append(f" {plain(shown)}"))
    elif isinstance(event, ReportEvent):
        shown = ", ".join(f"{name} {value}" for name, value in event.fields.items())
        _show_line(f"{event.kind.replace('_', ' ')}:", "dim", shown, console)
    elif isinstance(event, PlanEvent):
        console.print(plan_panel(event))


def plan_panel(plan: PlanEvent) -> Panel:
    """Return a plan as a panel."""
    lines = (
        f"{_MARKS.get(todo['status'], '[?]')} {plain_line(todo['content'])}"
        + (f" ({plain_line(todo['note'])})" if todo.get("note") else "")
        for todo in plan.todos
    )
    num_done = sum(todo["status"] == "completed" for todo in plan.todos)
    title = f"plan, {num_done} of {len(plan.todos)} done"
    return Panel(Text("\n".join(lines)), title=title, title_align="left", border_style="magenta", expand=False)


def _show_line(label: str, style: str, text: str, console: Console) -> None:
    line = Text("   ").append(plain_line(label), style=style).append(f" {plain_line(text)}")
    console.print(line)


def call_line(call: CallEvent) -> str:
    """Return the figures of a model call in one line."""
    reused, restored, prefilled = (call.stats.get(name, 0) for name in ("reused_ram", "reused_store", "prefilled"))
    return (
        f"prompt {call.input_tokens} = {reused} from RAM + {restored} from Redis + {prefilled} prefilled; "
        f"{call.output_tokens} generated, tau {call.tau:.2f}, {call.tokens_per_second:.1f} tokens/s"
    )

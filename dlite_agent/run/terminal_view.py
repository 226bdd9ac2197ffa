"""A run as a person sees it, on any terminal and into a pipe."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.panel import Panel
from rich.table import Column, Table
from rich.text import Text

from dlite_agent.agent.events import AgentEvent, CallEvent, TextEvent
from dlite_agent.agent.terminal import plain, plain_line, show_event
from dlite_agent.run.approval import Answer, parse_arguments
from dlite_agent.run.events import (
    ApprovalEvent,
    EndEvent,
    ErrorEvent,
    ForkedEvent,
    HelpEvent,
    NoteEvent,
    ResumedEvent,
    RunEvent,
    SessionsEvent,
    StartEvent,
    StatsEvent,
    ToolsEvent,
    TurnEndEvent,
    UndoneEvent,
)
from dlite_agent.run.inputs import Input, read_plain

_PROMPT = "you> "
_ANSWER_PROMPT = "run it? [y]es, [n]o (why), [e]dit, [a]lways> "
_EDIT_PROMPT = "arguments> "


class TerminalView:
    """Prints events with rich; what is not ours is written out where a terminal would act on it."""

    def __init__(self, console: Console, *, on_show: Callable[[], None] = lambda: None) -> None:
        """Set where to print, and what makes room there first."""
        self._console = console
        self._make_room = on_show
        self._is_mid_line = False

    def show(self, event: RunEvent) -> None:
        """Print one event."""
        self._make_room()
        if isinstance(event, TextEvent):
            self._is_mid_line = not event.text.endswith("\n")
            show_event(event, self._console)
            return
        if self._is_mid_line and not isinstance(event, CallEvent):  # that begins a line itself
            self._console.print()
        self._is_mid_line = False
        show = _SHOWN.get(type(event))
        if show is not None:
            show(event, self._console)
        elif isinstance(event, AgentEvent):
            show_event(event, self._console)


def _line(text: str, console: Console, style: str = "") -> None:
    console.print(Text(plain_line(text), style=style), soft_wrap=True)


def _start(event: StartEvent, console: Console) -> None:
    doing = "new"
    if event.num_turns:
        doing = f"resumed, turns: {event.num_turns}, stored tokens: {event.stored_tokens}"
    _line(f"thread {event.thread} ({doing}), workspace {event.workspace}", console)
    if event.is_cut:
        _line("the last turn was cut short; your next message goes on from there", console)


def _resumed(event: ResumedEvent, console: Console) -> None:
    _line(f"   resumed: {event.restored} tokens restored, {event.computed_again} computed again", console, "dim")


def _approval(event: ApprovalEvent, console: Console) -> None:
    args = json.dumps(event.args, ensure_ascii=False, indent=2)
    body = Text(f"{plain_line(event.name)} {plain(args)}")
    console.print(Panel(body, title="wants to run", title_align="left", border_style="yellow", expand=False))


def _turn_end(event: TurnEndEvent, console: Console) -> None:
    if event.outcome == "stopped":
        _line("stopped; the conversation goes on", console)
    elif event.outcome == "waiting":
        _line("the question stays open; whoever resumes the thread is asked again", console)


def _error(event: ErrorEvent, console: Console) -> None:
    line = Text(event.kind, style="red").append(f": {plain_line(event.message)}", style="default")
    console.print(line, soft_wrap=True)


def _note(event: NoteEvent, console: Console) -> None:
    _line(event.text, console)


def _help(event: HelpEvent, console: Console) -> None:
    _rows(((name, what) for name, what in event.commands.items()), console)


def _tools(event: ToolsEvent, console: Console) -> None:
    _rows(((tool["name"], ("(asks) " if tool["is_asked"] else "") + tool["what"]) for tool in event.tools), console)


def _stats(event: StatsEvent, console: Console) -> None:
    table = _table("", "last turn", "in all")
    for name in event.in_all:
        table.add_row(name, _shown(event.last_turn[name]), _shown(event.in_all[name]))
    console.print(table)


def _sessions(event: SessionsEvent, console: Console) -> None:
    table = _table("thread", "turns", "tokens", "size", "last turn")
    for found in event.sessions:
        moment = found["last_turn_at"]
        when = "never" if moment is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(moment))
        name = "(unknown)" if found["thread"] is None else found["thread"]
        size = decimal(found["num_bytes"])
        table.add_row(Text(plain_line(name)), str(found["num_turns"]), str(found["num_tokens"]), size, when)
    console.print(table)


def _forked(event: ForkedEvent, console: Console) -> None:
    shared = f"{event.num_tokens} tokens in {event.num_records} shared records"
    _line(f"you are on thread {event.thread} now ({shared}); {event.origin} stays as it was", console)


def _undone(event: UndoneEvent, console: Console) -> None:
    _line(f"undone: {event.text}", console)
    advice = f"/fork NAME {event.checkpoint} goes on from what was undone"
    _line(f"turns left: {event.num_turns}; {advice}", console, "dim")


def _end(event: EndEvent, console: Console) -> None:
    _line(f"resume with: {event.resume_with}", console)


_SHOWN: dict[type, Callable[[Any, Console], None]] = {
    StartEvent: _start,
    ResumedEvent: _resumed,
    ApprovalEvent: _approval,
    TurnEndEvent: _turn_end,
    ErrorEvent: _error,
    NoteEvent: _note,
    HelpEvent: _help,
    ToolsEvent: _tools,
    StatsEvent: _stats,
    SessionsEvent: _sessions,
    ForkedEvent: _forked,
    UndoneEvent: _undone,
    EndEvent: _end,
}


def _table(*headers: str) -> Table:
    """Return a table that breaks words in a narrow terminal, and shortens none."""
    columns = (Column(header, overflow="fold") for header in headers)
    return Table(*columns, box=None, padding=(0, 2, 0, 0))


def _rows(rows: Any, console: Console) -> None:
    table = _table("", "")
    table.show_header = False
    for row in rows:
        table.add_row(*(Text(plain_line(cell)) for cell in row))
    console.print(table)


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {count}" for name, count in value.items()) or "0"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


class TerminalReader:
    """Reads what a person types, with line editing where the terminal can do it; input may be a pipe as well."""

    def __init__(self, console: Console) -> None:
        self._is_interactive = sys.stdin.isatty()
        self._console = console
        self._readline = _load_readline() if self._is_interactive and not console.is_dumb_terminal else None

    def read(self, question: ApprovalEvent | None) -> Input | None:
        """Prompt until there is something."""
        while True:
            if question is None and self._is_interactive:
                self._console.print()
            line = self._ask(_PROMPT if question is None else _ANSWER_PROMPT)
            if line is None:
                return None
            found = read_plain(line, is_asked=question is not None)
            if isinstance(found, Answer) and found.choice == "edit" and found.args is None:
                assert question is not None
                edited = self._ask(_EDIT_PROMPT, json.dumps(question.args))
                return None if edited is None else Answer("edit", args=parse_arguments(edited))
            if found is not None:
                return found

    def _ask(self, prompt: str, given: str = "") -> str | None:
        """Return a line, None at the end of input; `given` is there to be edited, where lines can be."""
        readline = self._readline
        if readline is not None and given:
            readline.set_startup_hook(lambda: readline.insert_text(given))
        try:
            return input(prompt if self._is_interactive else "")
        except EOFError:
            if self._is_interactive:
                self._console.print()
            return None
        except KeyboardInterrupt:
            self._console.print()
            raise
        finally:
            if readline is not None:
                readline.set_startup_hook(None)


def _load_readline() -> ModuleType | None:
    """Return the module that gives `input` line editing; some Pythons are built without it."""
    try:
        import readline
    except ImportError:
        return None
    return readline

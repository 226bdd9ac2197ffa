"""Puts a run together: server, model, agent and thread, and a view of them for people or for scripts."""

from __future__ import annotations

import io
import shlex
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from langchain.agents.middleware import AgentMiddleware, ToolRetryMiddleware
from langchain_core.tools import BaseTool
from rich.console import Console

from dlite_agent.agent import create_dlite_agent
from dlite_agent.agent.terminal import ActivityBar
from dlite_agent.chat_model import ChatDLite
from dlite_agent.config import Settings
from dlite_agent.errors import ConfigError
from dlite_agent.run.approval import asking_middleware
from dlite_agent.run.events import ErrorEvent
from dlite_agent.run.history import History, check_thread_name
from dlite_agent.run.inputs import LineReader
from dlite_agent.run.json_view import JsonView
from dlite_agent.run.loop import Agent, Loop
from dlite_agent.run.stopping import Stopper
from dlite_agent.run.terminal_view import TerminalReader, TerminalView
from dlite_agent.run.thread_lock import ThreadLock
from dlite_agent.sessions.embedded import connect
from dlite_agent.sessions.saver import RedisSaver
from dlite_agent.sessions.store import SessionStore
from dlite_agent.tools import default_tools

_FAILURE_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class Options:
    """What a run is started with.

    Attributes:
        model: The target.
        drafter: How its tokens are drafted.
        quantize: "auto", "int8" or None.
        thread_id: The thread to begin or resume.
        workspace: Folder of the tools.
        max_tokens: Upper bound of tokens per reply.
        is_asking: Whether tool calls wait for a decision.
    """

    model: str
    drafter: str
    quantize: Any
    thread_id: str
    workspace: Path
    max_tokens: int
    is_asking: bool = False

    def __post_init__(self) -> None:
        check_thread_name(self.thread_id)
        if not self.workspace.is_dir():
            raise ConfigError(f"the workspace {str(self.workspace)!r} is no folder; create it, or name another")

    def resume_command(self, thread_id: str) -> str:
        """Return the command that takes a thread up again."""
        words = ["dlite-agent", "run", "--thread", thread_id, "--model", self.model]
        asking = ["--approve"] if self.is_asking else []
        return shlex.join([*words, "--workspace", str(self.workspace), *asking])


def run_in_terminal(options: Options, *, settings: Settings, console: Console) -> int:
    """Talk with a person, or with lines of a pipe.

    Returns:
        The exit code.

    Raises:
        DLiteError: If the model, the server or the thread cannot be used.
    """
    _open_streams()
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):  # a byte that cannot be read or shown ends no conversation
            stream.reconfigure(errors="replace" if stream is sys.stdin else "backslashreplace")
    with ThreadLock(settings, options.thread_id) as lock, ActivityBar(console) as bar, Stopper() as stopper:
        bar.show(f"loading {options.model}")
        model = _load(options, settings, stopper, bar.show_prefill)
        view = TerminalView(console, on_show=bar.hide)
        agent = open_agent(options, model, lock)
        return Loop(agent, view=view, reader=TerminalReader(console), stopper=stopper).run()


def run_as_json(options: Callable[[], Options], *, settings: Settings) -> int:
    """Talk with a script: events on standard output, input from standard input.

    Args:
        options: Makes the options; what is wrong with them is an event, too.
        settings: Of the process.

    Returns:
        The exit code.

    Raises:
        DLiteError: If the model, the server or the thread cannot be used; the last event says so.
    """
    lines = _open_streams()
    view = JsonView(sys.stdout)
    if isinstance(lines, io.TextIOWrapper):
        lines.reconfigure(encoding="utf-8", errors="replace")
    try:
        with redirect_stdout(sys.stderr), Stopper() as stopper:  # libraries may print
            chosen = options()
            with ThreadLock(settings, chosen.thread_id) as lock:
                agent = open_agent(chosen, _load(chosen, settings, stopper), lock)
                return Loop(agent, view=view, reader=LineReader(lines), stopper=stopper).run()
    except BrokenPipeError:
        raise
    except Exception as error:  # also a fault of our own: its traceback is for us, and the script is told in its terms
        view.show(ErrorEvent(type(error).__name__, str(error), is_fatal=True))
        raise


def _open_streams() -> TextIO:
    """Return standard input, an empty one if it is closed.

    Raises:
        ConfigError: If standard output is closed.
    """
    if sys.stdout is None:
        raise ConfigError("standard output is closed, so nothing can be shown; open it, or send it to a file")
    if sys.stdin is None:
        sys.stdin = io.StringIO()
    return sys.stdin


def _load(
    options: Options, settings: Settings, stopper: Stopper, show_prefill: Callable[[int, int], None] | None = None
) -> ChatDLite:
    def on_prefill(done: int, total: int) -> None:
        stopper.check()
        if show_prefill is not None:
            show_prefill(done, total)

    model = ChatDLite(
        model=options.model,
        drafter=options.drafter,
        quantize=options.quantize,
        max_tokens=options.max_tokens,
        session_store=SessionStore(connect(settings)),
        settings=settings,
        on_prefill=on_prefill,
    )
    stopper.cancel = model.runtime.jobs.cancel_all
    return model


def open_agent(options: Options, model: ChatDLite, lock: ThreadLock) -> Agent:
    """Return the agent of a thread that this run holds.

    A thread with a question that nobody has answered asks on, whatever the options say: going on without the middleware
    would run the call.
    """
    store: SessionStore = model.session_store
    saver = RedisSaver(store.client)
    tools = default_tools(options.workspace)
    graph = make_graph(model, tools, saver, is_asking=True)
    history = History(graph, saver, store, options.thread_id, lock)
    is_asking = options.is_asking or history.question is not None
    if not is_asking:
        history.graph = make_graph(model, tools, saver, is_asking=False)
    return Agent(
        history=history,
        tools=tools,
        is_asking=is_asking,
        model=options.model,
        workspace=options.workspace,
        resume_command=options.resume_command,
    )


def make_graph(model: Any, tools: list[BaseTool], saver: RedisSaver, *, is_asking: bool) -> Any:
    """Return the agent's graph; calls of its own tools, not of the plan's, wait for a decision if it asks.

    What a tool raises is told to the model as an error, and nothing is tried again: the call may have done its work.
    """
    middleware: list[AgentMiddleware[Any, Any, Any]] = []
    if is_asking:
        middleware.append(asking_middleware(tool.name for tool in tools))
    middleware.append(ToolRetryMiddleware(max_retries=0, retry_on=(Exception,), on_failure=_failure))
    return create_dlite_agent(model, tools, checkpointer=saver, middleware=middleware)


def _failure(error: Exception) -> str:
    found = " ".join(f"{type(error).__name__}: {error}".split())[:_FAILURE_CHARACTERS]
    return f"Error: the tool failed ({found}); it may have done a part of its work."

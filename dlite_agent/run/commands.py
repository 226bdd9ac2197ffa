"""The slash commands: each looks at the conversation or moves it, and returns what to show."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence

from langchain_core.tools import BaseTool

from dlite_agent.agent.events import PlanEvent
from dlite_agent.errors import ConfigError
from dlite_agent.run.events import HelpEvent, NoteEvent, RunEvent, SessionsEvent, StatsEvent, ToolsEvent
from dlite_agent.run.figures import Figures, last_turn
from dlite_agent.run.history import History
from dlite_agent.sessions.inventory import take_inventory

QUIT = "/quit"

_COMMANDS = {
    "/help": "list the commands",
    "/plan": "show the plan",
    "/tools": "list the agent's tools, and which calls you are asked about",
    "/stats": "what the last turn and the conversation cost: tokens, drafts, speed",
    "/undo": "take your last message back; the way that is left stays in the checkpoints",
    "/fork": "[NAME [CHECKPOINT]] go on in a new thread with the same history",
    "/sessions": "list the stored sessions",
    QUIT: "leave; the conversation can be resumed",
}
_MOST_ARGUMENTS = {"/fork": 2}


class Commands:
    """Runs slash commands on a thread."""

    def __init__(self, history: History, tools: Sequence[BaseTool], is_asked: Callable[[str], bool]) -> None:
        """Set what they work on.

        Args:
            history: The thread.
            tools: The agent's own, the plan's not among them.
            is_asked: Says whether calls of a tool wait for a decision.
        """
        self._history = history
        self._tools = tools
        self._is_asked = is_asked
        self._run: dict[str, Callable[..., RunEvent]] = {
            "/help": lambda: HelpEvent(dict(_COMMANDS)),
            "/plan": self._plan,
            "/tools": self._list_tools,
            "/stats": self._stats,
            "/undo": history.undo,
            "/fork": history.fork,
            "/sessions": self._sessions,
        }

    def run(self, line: str) -> RunEvent:
        """Run one command.

        Raises:
            ConfigError: If there is no such command, or its arguments cannot work.
            DLiteError: If it fails.
        """
        try:
            name, *arguments = shlex.split(line)
        except ValueError as error:
            raise ConfigError(f"the command cannot be read: {error}") from error
        if name not in self._run:
            raise ConfigError(f"there is no command {name[:80]!r}; /help lists them")
        most = _MOST_ARGUMENTS.get(name, 0)
        if len(arguments) > most:
            raise ConfigError(f"{name} was given {len(arguments)} arguments; expected at most {most}")
        return self._run[name](*arguments)

    def _plan(self) -> RunEvent:
        plan = self._history.plan
        return PlanEvent(plan) if plan else NoteEvent("there is no plan")

    def _list_tools(self) -> RunEvent:
        return ToolsEvent(
            [
                {
                    "name": tool.name,
                    "what": tool.description.strip().split("\n")[0],
                    "is_asked": self._is_asked(tool.name),
                }
                for tool in self._tools
            ]
        )

    def _stats(self) -> RunEvent:
        messages = self._history.messages
        return StatsEvent(Figures.of_messages(last_turn(messages)).as_json(), Figures.of_messages(messages).as_json())

    def _sessions(self) -> RunEvent:
        store = self._history.store
        if store is None:
            return NoteEvent("sessions are not stored")
        return SessionsEvent(
            [
                {
                    "thread": info.name.thread_id if info.name else None,
                    "num_turns": info.num_turns,
                    "num_tokens": info.num_tokens,
                    "num_bytes": info.num_bytes,
                    "last_turn_at": info.last_turn_at,
                }
                for info in take_inventory(store).sessions
            ]
        )

"""The loop of `dlite-agent run`: input, a turn, questions in it, its end. What happens is told to a view as events."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from langchain_core.tools import BaseTool
from langgraph.errors import GraphDrained, GraphRecursionError
from langgraph.runtime import RunControl
from langgraph.types import Command
from pydantic import ValidationError

from dlite_agent.agent.events import CallEvent, PlanEvent, run_turn
from dlite_agent.agent.turns import is_said
from dlite_agent.errors import ConfigError, ContextLengthError, DLiteError
from dlite_agent.run.approval import Answer, decision
from dlite_agent.run.commands import QUIT, Commands
from dlite_agent.run.events import (
    ApprovalEvent,
    EndEvent,
    ErrorEvent,
    ForkedEvent,
    MessageEvent,
    NoteEvent,
    Outcome,
    ResumedEvent,
    RunEvent,
    StartEvent,
    TurnEndEvent,
    UndoneEvent,
)
from dlite_agent.run.figures import Figures
from dlite_agent.run.history import BROKEN, STOPPED, History, missing_end
from dlite_agent.run.inputs import Input, Message, Reader, SlashCommand
from dlite_agent.run.stopping import Stopper

_LEAVING = "no turn runs; Ctrl-C again or the end of input (Ctrl-D) leaves"


class View(Protocol):
    """Shows events."""

    def show(self, event: RunEvent) -> None:
        """Show one event."""
        ...


@dataclass(frozen=True, slots=True)
class Agent:
    """What a conversation is held with.

    Attributes:
        history: The thread.
        tools: The agent's own tools.
        is_asking: Whether their calls wait for a decision.
        model: What to call the model.
        workspace: Folder of the tools.
        resume_command: Says how to resume a thread.
    """

    history: History
    tools: Sequence[BaseTool]
    is_asking: bool
    model: str
    workspace: Path
    resume_command: Callable[[str], str]


class Loop:
    """Talks until the end of input."""

    def __init__(self, agent: Agent, *, view: View, reader: Reader, stopper: Stopper) -> None:
        """Set who talks, and where.

        Args:
            agent: The agent and its thread.
            view: Shows what happens.
            reader: Where input comes from.
            stopper: Entered already.
        """
        self._agent = agent
        self._history = agent.history
        self._view = view
        self._reader = reader
        self._stopper = stopper
        self._always: set[str] = set()
        self._commands = Commands(self._history, agent.tools, self._is_asked)
        self._plan: list[dict[str, str]] = []
        self._calls: list[CallEvent] = []
        self._resumed_rows: int | None = None  # until the first call of a resumed conversation has said what it cost
        self._outcome: Outcome = "done"

    def run(self) -> int:
        """Talk until the end of input.

        Returns:
            The exit code: 0, or 1 if the last turn failed.

        Raises:
            DLiteError: If the thread cannot be read as it begins.
        """
        self._begin()
        while self._outcome != "waiting" and (given := self._next()) is not None:
            if isinstance(given, Message):
                self._say(given.text)
            elif isinstance(given, SlashCommand):
                self._command(given.line)
            else:
                self._fail(ConfigError("no call waits for an answer"))
        self._view.show(EndEvent(self._agent.resume_command(self._history.thread_id)))
        return 1 if self._outcome == "failed" else 0

    def _begin(self) -> None:
        state = self._history.state
        messages = state.values.get("messages") or ()
        num_turns, rows = sum(map(is_said, messages)), self._history.stored_rows()
        history, agent = self._history, self._agent
        is_asked = history.question is not None
        is_cut = not is_asked and bool(state.next or missing_end(messages, BROKEN))
        workspace = str(agent.workspace.resolve())
        self._view.show(StartEvent(history.thread_id, workspace, agent.model, num_turns, rows, is_cut))
        self._resumed_rows = rows if num_turns else None
        self._show_plan()
        if is_asked:
            self._end_turn(self._settle("done"))

    def _next(self) -> Input | None:
        """Wait for input; None to leave, which a second Ctrl-C in a row does, too."""
        was_interrupted = False
        while True:
            try:
                given = self._reader.read(None)
            except ConfigError as error:
                self._fail(error)
                continue
            except KeyboardInterrupt:
                if was_interrupted:
                    return None
                was_interrupted = True
                self._view.show(NoteEvent(_LEAVING))
                continue
            return None if given == SlashCommand(QUIT) else given

    def _say(self, text: str) -> None:
        def begin() -> None:
            self._view.show(MessageEvent(text))
            self._history.mend(BROKEN)

        self._calls = []
        outcome = self._guarded(begin)
        if outcome == "done":
            outcome = self._settle(self._advance(text))
        self._end_turn(outcome)

    def _command(self, line: str) -> None:
        try:
            event = self._commands.run(line)
        except DLiteError as error:
            self._fail(error)
        except KeyboardInterrupt:
            self._view.show(NoteEvent("stopped"))
        else:
            self._view.show(event)
            if isinstance(event, UndoneEvent | ForkedEvent):
                self._resumed_rows = None
                self._show_plan()

    def _advance(self, given: str | Command[Any]) -> Outcome:
        """Run the graph until it ends, asks, fails or is stopped."""
        with self._stopper.turn() as control:
            return self._guarded(lambda: self._follow(given, control))

    def _follow(self, given: str | Command[Any], control: RunControl) -> None:
        try:
            for event in run_turn(self._history.graph, given, self._history.config, control=control):
                self._stopper.check()
                self._tell(event)
        except (GraphDrained, ValueError) as error:
            if isinstance(error, DLiteError) or not control.drain_requested:
                raise
            self._history.mend(STOPPED)  # a ValueError is LangChain's: a call that was cancelled before its first token
            raise GraphDrained(str(control.drain_reason)) from error

    def _settle(self, outcome: Outcome) -> Outcome:
        """Ask whatever the turn waits for, and go on, until it has ended."""
        while outcome == "done" and (question := self._history.question) is not None:
            answer = Answer("yes") if question.name in self._always else self._ask(question)
            if not isinstance(answer, Answer):
                return answer
            if answer.choice == "always":
                self._always.add(question.name)
            outcome = self._go_on(question, answer)
        return outcome

    def _go_on(self, question: ApprovalEvent, answer: Answer) -> Outcome:
        """Go on with an answer; arguments that the tool cannot take leave the question open."""
        answered = None if answer.choice == "no" else question.id
        outcome = self._guarded(lambda: self._history.mark_answered(answered))
        if outcome != "done":
            return outcome
        try:
            return self._advance(decision(question, answer))
        except ValidationError as error:
            self._history.mark_answered(None)
            found = "; ".join(f"{'.'.join(map(str, item['loc'][3:]))}: {item['msg']}" for item in error.errors())
            self._fail(ConfigError(f"these arguments do not fit {question.name}: {found}"))
            return "done"

    def _ask(self, question: ApprovalEvent) -> Answer | Outcome:
        """Ask until there is an answer; without one the turn has stopped, or waits on."""
        self._view.show(question)
        while True:
            try:
                given = self._reader.read(question)
            except ConfigError as error:
                self._fail(error)
                continue
            except KeyboardInterrupt:
                return self._guarded(lambda: self._history.mend(STOPPED), then="stopped")
            if given is None or given == SlashCommand(QUIT):
                return "waiting"
            if isinstance(given, Answer):
                return given
            self._fail(ConfigError("a call waits for your decision; answer first, or stop the turn with Ctrl-C"))

    def _guarded(self, work: Callable[[], object], *, then: Outcome = "done") -> Outcome:
        """Do some work of a turn; say what went wrong in it."""
        try:
            work()
        except (GraphDrained, KeyboardInterrupt):
            return "stopped"
        except (DLiteError, GraphRecursionError) as error:
            self._fail(error)
            if isinstance(error, ContextLengthError):
                self._guarded(self._take_back)
            return "failed"
        return then

    def _take_back(self) -> None:
        """Undo a message that does not fit the context: it would fail every later turn, too."""
        if self._history.is_unanswered():
            self._history.undo()

    def _tell(self, event: RunEvent) -> None:
        if isinstance(event, PlanEvent):
            if event.todos == self._plan:
                return
            self._plan = event.todos
        self._view.show(event)
        if isinstance(event, CallEvent):
            self._calls.append(event)
            self._tell_resumption(event)

    def _tell_resumption(self, call: CallEvent) -> None:
        if self._resumed_rows is None:
            return
        restored = call.stats.get("reused_store", 0)
        again = max(0, self._resumed_rows - restored - call.stats.get("reused_ram", 0))
        self._resumed_rows = None
        self._view.show(ResumedEvent(restored, again))

    def _end_turn(self, outcome: Outcome) -> None:
        self._outcome = outcome
        self._view.show(TurnEndEvent(outcome, Figures.of(self._calls).as_json()))

    def _show_plan(self) -> None:
        plan = self._history.plan
        if plan:
            self._tell(PlanEvent(plan))
        self._plan = plan

    def _is_asked(self, tool: str) -> bool:
        return self._agent.is_asking and tool not in self._always

    def _fail(self, error: Exception) -> None:
        self._view.show(ErrorEvent(type(error).__name__, str(error)))

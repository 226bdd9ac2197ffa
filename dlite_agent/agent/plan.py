"""A plan that costs the cache nothing: it is in the graph's state, and in the prompt only as calls and their results.

LangChain's `TodoListMiddleware` ends the system message with a fixed text and never writes the plan there, so the
prompt only grows; it is built on here. Its own texts take 1,500 tokens, a minute of a CPU's prefill: these are short.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, Literal, NotRequired, TypedDict

from langchain.agents.middleware import TodoListMiddleware
from langchain.agents.middleware.types import AgentState, ModelRequest, ModelResponse, OmitFromInput
from langchain.tools import ToolRuntime
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.tools import ToolException
from langgraph.types import Command
from pydantic import BaseModel, Field

from dlite_agent.agent.reports import report
from dlite_agent.agent.turns import rounds_of_turn
from dlite_agent.tools.factory import make_tool

Status = Literal["pending", "in_progress", "completed"]

_PROMPT = "Keep the plan with write_todos: give the whole list, each item with its content and status."
_PROMPT_WITH_UPDATES = f"{_PROMPT} Change one step with update_plan."
_WRITE_DESCRIPTION = (
    "Write or update the plan: the whole list of steps, each with content and status (pending, in_progress, completed)."
)
_PLAN_TOOLS = ("write_todos", "update_plan")
_MARKS = {"pending": "[ ]", "in_progress": "[~]", "completed": "[x]"}


class Step(TypedDict):
    """A step of the plan."""

    content: str
    status: Status
    note: NotRequired[str]


class StepEdit(TypedDict):
    """A change of one step, as an update of the graph's `todos`."""

    step: int
    status: Status
    note: str


def edit_plan(plan: list[Step] | None, change: list[Step] | StepEdit | None) -> list[Step]:
    """Return the plan after a change: a whole new plan, or an edit of one step (from 1 on).

    Edits of several steps may come from one reply; an edit of a step that is no more changes nothing.
    """
    steps = list(plan or ())
    if not isinstance(change, dict):
        return steps if change is None else list(change)
    index = change["step"] - 1
    if 0 <= index < len(steps):
        edited = steps[index].copy()
        edited["status"] = change["status"]
        if change["note"]:
            edited["note"] = change["note"]
        steps[index] = edited
    return steps


def plan_text(plan: Sequence[Step]) -> str:
    """Return a plan as numbered lines."""
    return "\n".join(_line(number, step) for number, step in enumerate(plan, start=1))


class PlanState(AgentState[Any]):
    """Graph state with the plan, by the name it has in LangChain."""

    todos: NotRequired[Annotated[list[Step], OmitFromInput, edit_plan]]


class UpdatePlanArgs(BaseModel):
    """Arguments of `update_plan`."""

    step: int = Field(ge=1, description="Number of the step, from 1 on")
    status: Status
    note: str = Field(default="", description="What came of it")


class PlanMiddleware(TodoListMiddleware[Any, Any]):
    """LangChain's todo list with short texts, edits of single steps, and reports.

    The plan is `todos` in the graph's state, where a resumed thread and a fork find it. A reply that changed it is
    followed by a report "plan" with all of it.
    """

    state_schema = PlanState  # type: ignore[assignment]

    def __init__(self, *, has_updates: bool = True) -> None:
        """Set whether the model has `update_plan(step, status, note)` beside the whole-list `write_todos`."""
        super().__init__(
            system_prompt=_PROMPT_WITH_UPDATES if has_updates else _PROMPT, tool_description=_WRITE_DESCRIPTION
        )
        if has_updates:
            update: Any = update_plan
            self.tools = [*self.tools, make_tool(update, UpdatePlanArgs)]

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> ModelResponse[Any] | AIMessage:
        """Report a plan that changed; end the system message with the fixed text on plans."""
        _report_change(request)
        return super().wrap_model_call(request, handler)

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]
    ) -> ModelResponse[Any] | AIMessage:
        """Do the same asynchronously."""
        _report_change(request)
        return await super().awrap_model_call(request, handler)


def update_plan(runtime: ToolRuntime[Any, Any], step: int, status: Status, note: str = "") -> Command[Any]:
    """Change the status of one step of the plan."""
    plan = edit_plan(runtime.state.get("todos"), None)
    if step > len(plan):
        raise ToolException(f"the plan has {len(plan)} steps, step is {step}; write the plan with write_todos")
    change = StepEdit(step=step, status=status, note=note)
    line = _line(step, edit_plan(plan, change)[step - 1])
    message = ToolMessage(line, tool_call_id=runtime.tool_call_id or "", name="update_plan")
    return Command(update={"todos": change, "messages": [message]})


def _line(number: int, step: Step) -> str:
    note = step.get("note")
    return f"{number}. {_MARKS.get(step['status'], '[?]')} {step['content']}" + (f" ({note})" if note else "")


def _report_change(request: ModelRequest[Any]) -> None:
    rounds = rounds_of_turn(request.messages)
    if rounds and any(call["name"] in _PLAN_TOOLS for call in rounds[-1].reply.tool_calls):
        todos: Any = request.state.get("todos") or []
        report(request.runtime, "plan", todos=[dict(step) for step in todos])

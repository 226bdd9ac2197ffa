"""Tool calls that wait for a person: LangChain's middleware asks, a thread keeps the question, an answer decides it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from langchain.agents.middleware import HumanInTheLoopMiddleware, InterruptOnConfig
from langgraph.types import Command

from dlite_agent.errors import ConfigError
from dlite_agent.run.events import ApprovalEvent

Choice = Literal["yes", "no", "edit", "always"]

_EXPECTED = "y, n, n REASON, e, e {JSON arguments} or a (always this tool)"
_CHOICES: dict[str, Choice] = {
    word: choice for choice in ("yes", "no", "edit", "always") for word in (choice[0], choice)
}


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer to a question.

    Attributes:
        choice: "always" approves this call and all later ones of its tool in this run.
        reason: With "no": what the model is told.
        args: With "edit": the arguments the tool is called with; None if they have yet to be asked for.
    """

    choice: Choice
    reason: str = ""
    args: dict[str, Any] | None = None


def asking_middleware(tools: Iterable[str]) -> HumanInTheLoopMiddleware[Any, Any, Any]:
    """Return the middleware that asks before each call of these tools.

    It asks where a call is about to run, so calls that are refused or answered from the record ask nobody.
    """
    config = InterruptOnConfig(allowed_decisions=["approve", "edit", "reject"])
    return HumanInTheLoopMiddleware(dict.fromkeys(tools, config), interrupt_mode="per_call")


def open_question(tasks: Iterable[Any], answered: str | None) -> ApprovalEvent | None:
    """Return the first question that waits for an answer.

    Where a call was approved and did not end, its process died in it: nothing is asked then, since going on, with
    whatever answer, would run it again.

    Args:
        tasks: Of a thread's newest state.
        answered: Id of the question that was answered last.
    """
    interrupts = [interrupt for task in tasks for interrupt in task.interrupts]
    if not interrupts or any(interrupt.id == answered for interrupt in interrupts):
        return None
    value = interrupts[0].value
    return ApprovalEvent(interrupts[0].id, value["name"], dict(value["args"]))


def parse_answer(text: str) -> Answer:
    """Read an answer as it is typed.

    Raises:
        ConfigError: If it is none.
    """
    word, _, rest = text.strip().partition(" ")
    choice = _CHOICES.get(word.lower())
    rest = rest.strip()
    if choice is None or (rest and choice in ("yes", "always")):
        raise ConfigError(f"{text.strip()[:80]!r} is no answer; expected {_EXPECTED}")
    if choice == "edit" and rest:
        return Answer("edit", args=parse_arguments(rest))
    return Answer(choice, reason=rest)


def parse_arguments(text: str) -> dict[str, Any]:
    """Read the arguments of an edited call.

    Raises:
        ConfigError: If they are no JSON object.
    """
    try:
        args = json.loads(text)
    except (ValueError, RecursionError) as error:  # nested too deeply is RecursionError
        raise ConfigError(f"the arguments are no JSON: {error}") from error
    if not isinstance(args, dict):
        raise ConfigError(f"the arguments are {text.strip()[:80]!r}; expected a JSON object")
    return args


def decision(question: ApprovalEvent, answer: Answer) -> Command[Any]:
    """Return what LangGraph goes on with; the middleware checks edited arguments against the tool's schema."""
    if answer.choice == "edit":
        made: dict[str, Any] = {"type": "edit", "edited_action": {"name": question.name, "args": answer.args}}
    elif answer.choice == "no":
        made = {"type": "reject", **({"message": answer.reason} if answer.reason else {})}
    else:
        made = {"type": "approve"}
    return Command(resume={question.id: made})

"""What a parsed reply consists of: text, calls, and calls that cannot be run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dlite_agent.prompting.forms import CallForm
from dlite_agent.prompting.schemas import Schema


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Text to show, of the answer or of the thinking before it."""

    text: str
    is_thinking: bool = False


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A complete call; `raw` is the call as it was written, without the markers around it."""

    name: str
    args: dict[str, Any]
    raw: str


@dataclass(frozen=True, slots=True)
class InvalidToolCall:
    """A call that cannot be run; `raw` is its arguments as far as they can be told, `error` says what is wrong."""

    name: str | None
    raw: str
    error: str


Event = TextDelta | ToolCall | InvalidToolCall


def read_call(form: CallForm, text: str, schemas: Mapping[str, Schema]) -> ToolCall | InvalidToolCall:
    """The call that a text is, or what is wrong with it."""
    try:
        name, args = form.read(text, schemas)
    except ValueError as error:
        return invalid_call(form, text, str(error))
    return ToolCall(name, args, text)


def invalid_call(form: CallForm, text: str, error: str) -> InvalidToolCall:
    """A call that is broken or cut off."""
    name, raw = form.guess(text)
    return InvalidToolCall(name, raw, error)

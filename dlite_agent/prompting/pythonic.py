"""Calls as Python writes them: `get_weather(city="Paris", days=2)`. LFM2 lists them, Gemma puts one on each line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dlite_agent.errors import PromptError
from dlite_agent.prompting.forms import Call, JsonForm, checked
from dlite_agent.prompting.literals import PYTHON, python_literal, read_arguments
from dlite_agent.prompting.rules import (
    Property,
    Rules,
    alternatives,
    comma_separated,
    listed_values,
    plain_name,
    properties_of,
    quoted,
)
from dlite_agent.prompting.schemas import Schema
from dlite_agent.prompting.spans import SPACE, TOOL_NAME, SpanStyle, scan_literal, scan_name, skip_space

_SPAN = SpanStyle(("(", "[", "{"), (")", "]", "}"), {'"': '"', "'": "'"}, has_escapes=True)
_JSON = JsonForm()


@dataclass(frozen=True, slots=True)
class PythonicForm:
    """A function call with keyword arguments that are literals; JSON objects are understood, but not written.

    Attributes:
        is_listed: Whether several calls are written as a list.
    """

    is_listed: bool
    span: SpanStyle = _SPAN
    after: str = ""
    markers: tuple[str, ...] = ()
    malformed: str = "the call is not name(key=value, ...)"

    def find_body(self, text: str, position: int) -> int:
        """Where the arguments begin, or the object."""
        if text.startswith("{", position):
            return position
        position = scan_name(text, position)
        if position < 0:
            return position
        start = skip_space(text, position)
        reached = scan_literal(text, start, "(")
        return start if reached >= 0 else reached

    def read(self, text: str, schemas: Mapping[str, Schema]) -> Call:
        """Read the arguments as literals."""
        text = text.strip(SPACE)
        if text.startswith("{"):
            return _JSON.read(text, schemas)
        name = TOOL_NAME.match(text)
        body = self.find_body(text, 0)
        if name is None or body < 0:
            raise ValueError(self.malformed)
        return name.group(), checked(read_arguments(text[body:], PYTHON))

    def guess(self, text: str) -> tuple[str | None, str]:
        """What stands before the bracket, and what behind."""
        text = text.strip(SPACE)
        if text.startswith("{"):
            return _JSON.guess(text)
        body = self.find_body(text, 0)
        return (text[:body].strip(SPACE), text[body:]) if body >= 0 else (None, text)

    def write(self, name: str, args: Mapping[str, Any], schema: Schema) -> str:
        """The call with Python's constants and JSON's strings."""
        odd = next((word for word in (name, *args) if not TOOL_NAME.fullmatch(word)), None)
        if odd is not None:
            raise PromptError(f"the name {odd!r} cannot be written without quotes; rename the tool or the argument")
        return f"{name}({', '.join(f'{key}={python_literal(value)}' for key, value in args.items())})"

    def rule(self, name: str, schema: Schema, rules: Rules) -> str:
        """Arguments in the schema's order. Strings, numbers, lists and objects are JSON, which Python reads too."""
        members = [_member(part, rules) for part in properties_of(schema, name)]
        return f"{quoted(plain_name(name, name) + '(')} {comma_separated(members, rules, ', ')} {quoted(')')}"


def _member(part: Property, rules: Rules) -> tuple[str, bool]:
    return (
        f"{quoted(plain_name(part.key, part.where) + '=')} {_value(part.schema, part.where, rules)}",
        part.is_required,
    )


def _value(schema: Schema, where: str, rules: Rules) -> str:
    options = alternatives(schema, where)
    if options:
        return rules.rule(" | ".join(_value(option, path, rules) for option, path in options))
    listed = listed_values(schema)
    if listed is not None and any(value is None or isinstance(value, bool) for value in listed):
        return rules.rule(" | ".join(quoted(python_literal(value)) for value in listed))
    if schema.get("type") == "boolean" and listed is None:
        return rules.rule('"True" | "False"')
    if schema.get("type") == "null":
        return rules.rule('"None"')
    return rules.json(schema)

"""Calls as Qwen3-Coder writes them: `<function=...>` around one `<parameter=...>` tag for each argument.

The format has no quotes and no escapes, so what a value is depends on the tool's schema: text where that takes strings
only, else JSON if it is JSON that fits, else text. A string with `</parameter>` in it cannot be written as text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dlite_agent.errors import PromptError, UnsupportedSchemaError
from dlite_agent.prompting.forms import Call, checked, load_json
from dlite_agent.prompting.rules import (
    ANNOTATIONS,
    Property,
    Rules,
    alternatives,
    is_text,
    listed_values,
    plain_name,
    properties_of,
    quoted,
    with_definitions,
)
from dlite_agent.prompting.schemas import Schema, is_valid
from dlite_agent.prompting.spans import SPACE, TOOL_NAME, SpanStyle, scan_literal
from dlite_agent.prompting.values import JsonStyle, ValueRules

_OPEN, _CLOSE = "<parameter=", "</parameter>"
_SPAN = SpanStyle(("<function=",), ("</function>",), {_OPEN: _CLOSE}, has_escapes=False)
_FUNCTION = re.compile(r"\s*<function=([^<>\n]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)
_JSON = JsonStyle(_CLOSE)
_CONSTANTS = {"True": True, "False": False, "None": None}
_MISSING = object()


@dataclass(frozen=True, slots=True)
class ParameterTagsForm:
    """A tag with the tool's name around a tag for each argument."""

    span: SpanStyle = _SPAN
    after: str = ""
    is_listed: bool = False
    markers: tuple[str, ...] = ("<function=", "</function>", _OPEN, _CLOSE)
    malformed: str = "the call is not <function=name> with <parameter=key> tags in it"

    def find_body(self, text: str, position: int) -> int:
        """Where the tag begins."""
        reached = scan_literal(text, position, "<function=")
        return position if reached >= 0 else reached

    def read(self, text: str, schemas: Mapping[str, Schema]) -> Call:
        """Read each value by its parameter's schema."""
        function = _FUNCTION.fullmatch(text)
        if function is None:
            raise ValueError(self.malformed)
        name, body = function.group(1).strip(SPACE), function.group(2)
        position = len(body) - len(body.lstrip(SPACE))
        args: dict[str, Any] = {}
        while position < len(body):
            found = _PARAMETER.match(body, position)
            if found is None:
                raise ValueError(self.malformed)
            key = found.group(1).strip(SPACE)
            if key in args:
                raise ValueError(f"{key!r} is given twice")
            args[key] = _read_value(found.group(2), _schema_of(key, schemas.get(name)))
            position = found.end()
        return name, checked(args)

    def guess(self, text: str) -> tuple[str | None, str]:
        """What stands in the first tag, and what behind."""
        found = re.match(r"\s*<function=([^<>\n]+)>(.*)", text, re.DOTALL)
        return (found.group(1), found.group(2).strip(SPACE)) if found else (None, text.strip(SPACE))

    def write(self, name: str, args: Mapping[str, Any], schema: Schema) -> str:
        """Strings as they are where they are read so, everything else as JSON.

        What is no string comes back as one if the schema takes nothing else.
        """
        odd = next((word for word in (name, *args) if not TOOL_NAME.fullmatch(word)), None)
        if odd is not None:
            raise PromptError(f"the name {odd!r} cannot be written without quotes; rename the tool or the argument")
        parts = [
            f"{_OPEN}{key}>\n{_write_value(value, _schema_of(key, schema))}\n{_CLOSE}\n" for key, value in args.items()
        ]
        return f"<function={name}>\n{''.join(parts)}</function>"

    def rule(self, name: str, schema: Schema, rules: Rules) -> str:
        """Parameters in the schema's order."""
        parts = [_parameter(part, rules) for part in properties_of(schema, name)]
        return f"{quoted(f'<function={plain_name(name, name)}>' + chr(10))} {' '.join(parts)} {quoted('</function>')}"


def _parameter(part: Property, rules: Rules) -> str:
    opened = quoted(f"{_OPEN}{plain_name(part.key, part.where)}>\n")
    body = rules.rule(f"{opened} {_value(part.schema, part.where, rules)}")
    return body if part.is_required else f"{body}?"


def _value(schema: Schema, where: str, rules: Rules) -> str:
    """A value and its closing tag. Text may be read as JSON where that fits as well, and then is as valid."""
    closed = f"\n{_CLOSE}\n"
    if is_text(schema):
        return rules.text(schema, closer=_CLOSE, after=closed, where=where)
    options = alternatives(schema, where)
    if options:
        return rules.rule(" | ".join(_value(option, path, rules) for option, path in options))
    listed = listed_values(schema)
    if listed is not None and not schema.keys() - ANNOTATIONS - {"type", "enum", "const"}:
        return rules.rule(" | ".join(quoted(_write_value(value, schema) + closed) for value in listed))
    return f"{ValueRules(rules, _JSON).value(schema, where)} {quoted(closed)}"


def _schema_of(key: str, schema: Schema | None) -> Schema:
    """The schema of a parameter, or one that takes anything."""
    inner = ((schema or {}).get("properties") or {}).get(key)
    try:
        return with_definitions(inner, schema or {}, key) if isinstance(inner, Mapping) else {}
    except UnsupportedSchemaError:
        return {}


def _read_value(text: str, schema: Schema) -> Any:
    if is_text(schema):
        return text
    value = _read_json(text)
    if value is not _MISSING and is_valid(value, schema):
        return value
    if is_valid(text, schema):
        return text
    if value is _MISSING:
        raise ValueError(f"{text!r} is neither JSON nor a string that the tool takes")
    return value


def _read_json(text: str) -> Any:
    text = text.strip(SPACE)
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    try:
        return load_json(text)
    except ValueError:
        return _MISSING


def _write_value(value: Any, schema: Schema) -> str:
    if isinstance(value, str) and _CLOSE not in value and _read_back(value, schema) == value:
        return value
    if isinstance(value, str) and is_text(schema):
        raise PromptError(f"a string with {_CLOSE} in it cannot be written in this dialect; choose another")
    return _JSON.literal(value)


def _read_back(text: str, schema: Schema) -> Any:
    try:
        return _read_value(text, schema)
    except ValueError:
        return _MISSING
